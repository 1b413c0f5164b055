"""Weights of few bits, from the conversion to the answer: what is folded, when it is used, and when it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from engine import linear
from engine.convert import fold
from engine.linear import Foldable
from engine.protocol import EngineLimits, Places
from engine.quantised import grid, native
from engine.recipe import FOLDED
from engine.torch_engine import TorchEngine
from model_pool.catalog import resolve
from policies.errors import EngineError
from tests.acceptance.families import tiny
from tests.engine_helpers import quantise, request, run, save_tiny

LIMITS = EngineLimits(max_model_len=128, block_size=4, step_tokens=32, max_running=4)
PROMPT = tuple(range(10, 40))
BREAKS = {
    "test_few_bits_answer_as": ("engine/quantised/native.cpp", "* scale[v] + offset[v];", "* scale[v];"),
    "test_a_file_that_is_of_other": ("engine/weights.py", "if not self._filled or _is_of(made, weight):", "if True:"),
    "test_a_file_that_cannot": ("engine/weights.py", "(OSError, LoadFailed, ValueError,", "(OSError,"),
    "test_a_file_written_over": ("engine/weights.py", "*([self._folded] if self._folded else [])", ""),
    "test_without_a_compiler": ("engine/torch_engine.py", "LoadFailed, KeyError,", "LoadFailed,"),
    "test_a_form_is_taken": ("engine/linear.py", "min(best, seconds), form", "seconds, form"),
    "test_a_file_with_something_odd": ("engine/weights.py", "and _may_be_of(stored, weight):", "is not None:"),
    "test_one_that_is_folded": ("model_pool/catalog.py", "    if (dest / FOLDED).exists():\n        return dest\n", ""),
    "test_a_model_converted_before": ("model_pool/catalog.py", "if not (dest / FOLDED).exists():", "if False:"),
}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("code")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_tiny(tiny("llama"), tmp_path / "model")
    quantise(path)
    fold(path)
    return path


@pytest.fixture(autouse=True)
def folded_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring must not choose for us."""
    monkeypatch.setattr(linear, "_fastest", lambda _, foldable: "folded" if foldable else "reordered")


def engine_of(model: Path, code: Path) -> TorchEngine:
    places = Places(recipes=str(model.parent / "recipes"), code=str(code))
    return TorchEngine(model, 4 * 2**30, LIMITS, places=places)


def loaded(model: Path, code: Path) -> TorchEngine:
    engine = engine_of(model, code)
    engine.load()
    engine.warm()
    return engine


def answer(engine: TorchEngine, name: str = "a") -> tuple[int, ...]:
    return run(engine, request(name, PROMPT, 12, ignore_eos=True))[name].tokens


def plain_answer(model: Path) -> tuple[int, ...]:
    engine = TorchEngine(model, 4 * 2**30, LIMITS)
    engine.load()
    engine.warm()
    assert "folded" not in engine._weights.packed_layers.values()
    return answer(engine)


def forms(engine: TorchEngine) -> set[str]:
    return set(engine._weights.packed_layers.values())


@pytest.mark.parametrize("stored", ["4 bits", "8 bits", "bfloat16"])
def test_few_bits_answer_as_the_model_does_asleep_compiled_and_loaded_again(
    stored: str, tmp_path: Path, code: Path
) -> None:
    model = save_tiny(tiny("llama"), tmp_path / "model", "bfloat16" if stored == "bfloat16" else "float32")
    if stored != "bfloat16":
        quantise(model, int(stored[0]))
        fold(model)
    expected = plain_answer(model)
    engine = loaded(model, code)
    assert forms(engine) == {"folded"}
    assert engine.stats().weights == "15 matrices in the few bits they came in"
    assert answer(engine) == expected
    if stored == "4 bits":  # the code is the same for all, and takes half a minute
        assert engine.settle() == "compiled"
        assert answer(engine, "b") == expected
    engine.sleep()
    engine.wake()
    assert answer(engine, "c") == expected
    engine.close()
    again = engine_of(model, code)
    again.load(asleep=True)
    again.wake()
    assert forms(again) == {"folded"}
    assert again.stats().layers == "compiled" or stored != "4 bits"
    assert answer(again) == expected
    assert again.report.weight_bytes == engine.report.weight_bytes
    again.close()


def test_a_file_that_is_of_other_weights_is_not_used(model: Path, code: Path) -> None:
    kept = (model / FOLDED).read_bytes()
    save_tiny(tiny("llama"), model, seed=1)
    (model / FOLDED).write_bytes(kept)
    engine = loaded(model, code)
    assert forms(engine) == {"reordered"}
    assert answer(engine) == plain_answer(model)
    engine.close()


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "long", "nothing in it"])
def test_a_file_that_cannot_be_read_is_not_used(damage: str, model: Path, code: Path) -> None:
    file = model / FOLDED
    whole = file.read_bytes()
    damaged = {"cut": whole[:-100], "empty": b"", "garbage": b"\x10" + bytes(7) + b"{not json", "long": b"\xff" * 64}
    file.write_bytes(damaged.get(damage, b"\x02" + bytes(7) + b"{}"))
    engine = loaded(model, code)
    assert "folded" not in forms(engine)
    assert answer(engine) == plain_answer(model)
    engine.close()


def reshaped(folded: torch.Tensor) -> torch.Tensor:
    return torch.cat([folded.reshape(-1), folded.reshape(-1)[:1]])


@pytest.mark.parametrize(
    "odd",
    [
        reshaped,
        lambda folded: folded[:0],
        lambda folded: folded[:32],
        lambda folded: folded.view(torch.float32),
        lambda folded: torch.cat([folded, folded], 1),
        lambda folded: torch.cat([folded[:32], torch.randint(0, 99, folded[32:].shape, dtype=torch.uint8)]),
        lambda folded: torch.full_like(folded, 255),
    ],
    ids=["a byte more", "empty", "fewer outputs", "floats", "wider", "another end", "all ones"],
)
def test_a_file_with_something_odd_in_it_is_not_used(
    odd: Callable[[torch.Tensor], torch.Tensor], model: Path, code: Path
) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    folded = {each: tensor.clone() for each, tensor in load_file(model / FOLDED).items()}
    save_file({**folded, name: odd(folded[name]).contiguous()}, model / FOLDED)
    engine = loaded(model, code)
    others = dict(engine._weights.packed_layers)
    assert others.pop(name.removesuffix(".weight")) == "reordered"
    assert set(others.values()) == {"folded"}
    assert answer(engine) == plain_answer(model)
    engine.close()


def test_a_file_written_over_while_the_model_sleeps_is_noticed_when_it_wakes(model: Path, code: Path) -> None:
    engine = loaded(model, code)
    engine.sleep()
    (model / FOLDED).write_bytes((model / FOLDED).read_bytes())
    with pytest.raises(EngineError, match=f"{FOLDED} is not what this model was loaded from"):
        engine.wake()
    engine.close()


def test_without_a_compiler_what_was_folded_at_an_earlier_load_is_loaded_anew(
    model: Path, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded(model, code)
    expected = answer(first)
    first.close()
    monkeypatch.setattr(native, "_kernel", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = loaded(model, tmp_path / "other code")
    assert forms(engine) == {"reordered"}
    assert answer(engine) == expected
    engine.close()


@pytest.mark.parametrize(
    ("plain", "reordered", "folded", "chosen"),
    [
        (1.0, 0.5, 0.1, "folded"),
        (1.0, 1.2, 1.2, "folded"),  # it takes less memory
        (1.0, 0.5, 0.7, "reordered"),
        (1.0, 1.2, 1.4, "reordered"),
        (1.0, 2.0, 2.0, None),
    ],
)
def test_a_form_is_taken_unless_it_is_clearly_slower(
    plain: float, reordered: float, folded: float, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(linear, "_seconds", lambda *_: {None: plain, "reordered": reordered, "folded": folded})
    weight = torch.ones(32, 32)
    assert linear._fastest(weight, Foldable(weight.bfloat16().view(-1), 32)) == chosen


# -- the conversion -----------------------------------------------------------------------------


def test_matrices_on_a_grid_are_folded_and_nothing_else(tmp_path: Path) -> None:
    model = save_tiny(tiny("llama"), tmp_path)
    fold(model)
    assert load_file(model / FOLDED) == {}
    quantise(model)
    fold(model)
    stored, folded = load_file(model / "model.safetensors"), load_file(model / FOLDED)
    assert set(folded) == {name for name, tensor in stored.items() if tensor.dim() == 2}
    for name, tensor in folded.items():
        torch.testing.assert_close(grid.unfold(tensor, stored[name].shape[1]), stored[name], rtol=1e-6, atol=1e-7)
    assert not list(model.glob("*.partial-*"))


def test_a_fold_that_fails_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / FOLDED).unlink()

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.convert._flush", full)
    with pytest.raises(OSError, match="No space left"):
        fold(model)
    assert not list(model.glob(f"{FOLDED}*"))


def silent(_: str, __: float) -> None:
    """No progress."""


@pytest.mark.parametrize("damage", [lambda _: None, lambda path: (path / "model.safetensors").write_bytes(b"weights")])
def test_a_model_converted_before_is_folded_when_it_is_resolved_and_serves_as_well_if_it_cannot_be(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    dest = save_tiny(tiny("llama"), tmp_path / "models" / "smollm2-135m-instruct")
    quantise(dest)
    damage(dest)
    assert resolve("demo:smollm2-135m-instruct", tmp_path, silent) == dest
    assert (dest / FOLDED).exists() == ((dest / "model.safetensors").stat().st_size > 100)


def test_one_that_is_folded_waits_for_no_other_conversion_and_needs_no_right_to_write(model: Path) -> None:
    dest = model.parent / "models" / "smollm2-135m-instruct"
    dest.parent.mkdir()
    model.rename(dest)
    with FileLock(model.parent / "convert.lock"):
        assert resolve("demo:smollm2-135m-instruct", model.parent, silent) == dest


def test_what_a_killed_fold_left_is_gone(model: Path) -> None:
    dest = model.parent / "models" / "smollm2-135m-instruct"
    dest.parent.mkdir()
    model.rename(dest)
    (dest / FOLDED).rename(dest / f"{FOLDED}.partial-1")
    resolve("demo:smollm2-135m-instruct", model.parent, silent)
    assert [file.name for file in dest.glob(f"{FOLDED}*")] == [FOLDED]
