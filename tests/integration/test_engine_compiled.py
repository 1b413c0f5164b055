"""Layers compiled in the background: when they are taken over, when they are not, and that the answer is the same."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import code_files, guards
from engine.attention.native import NativeStep
from engine.compiled import adopt, words
from engine.protocol import EngineLimits, Places
from engine.torch_engine import TorchEngine
from tests.acceptance.families import ALTERNATING, check_right, tiny
from tests.engine_helpers import request, run, save_tiny

LIMITS = EngineLimits(max_model_len=128, block_size=4, step_tokens=32, max_running=4)
PROMPT = tuple(range(10, 40))
BREAKS = {
    "test_an_engine_answers_while": ("engine/compiled/adopt.py", "self._process.poll() is None:", "True:"),
    "test_what_was_proven": ("engine/torch_engine.py", "compiled=self._adoption.proven", 'compiled=""'),
    "test_layers_that_say_otherwise": ("engine/compiled/adopt.py", '"" if same else', '"" if True else'),
    "test_a_description_of_something": ("engine/compiled/adopt.py", "ours.scores == its.scores and", ""),
    "test_what_may_pass": ("engine/compiled/build.py", "(_said(error))\n        sys.exit(1)\n", "\n"),
    "test_nothing_is_compiled": ("engine/compiled/build.py", "headers\": False", "headers\": True"),
    "test_a_damaged_library": ("engine/compiled/words.py", "return found if whole else None", "return found"),
    "test_code_that_others": ("engine/compiled/words.py", "if not code_files.only_ours(place):", "if False:"),
    "test_a_compiling_process_ends": ("engine/compiled/build.py", "    os._exit(1)\n", "    pass\n"),
}  # fmt: skip


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchEngine, Path]:
    """The first load of a model with layers of two windows: its layers are being compiled."""
    place = tmp_path_factory.mktemp("compiled")
    (place / "shared").mkdir()
    save_tiny(tiny("gemma3_text", **ALTERNATING, query_pre_attn_scalar=16), place / "model")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TMPDIR", "TEMP", "TMP"):
            patch.setenv(name, str(place / "shared"))
        return loaded(place), place


@pytest.fixture(scope="module")
def made(first: tuple[TorchEngine, Path]) -> Path:
    """When they have been."""
    first[0].settle()
    return first[1]


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil; the model's file keeps its times, and is another file: no recipe fits it."""
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def engine_of(place: Path) -> TorchEngine:
    return TorchEngine(place / "model", 4 * 2**30, LIMITS, places=Places(str(place / "recipes"), str(place / "layers")))


def loaded(place: Path) -> TorchEngine:
    engine = engine_of(place)
    engine.load()
    engine.warm()
    return engine


def answer(engine: TorchEngine, name: str = "a") -> tuple[int, ...]:
    prompts = {f"{name}{n}": PROMPT[n:] for n in range(3)}
    answers = run(engine, *(request(each, prompt, 12, ignore_eos=True) for each, prompt in prompts.items()))
    return tuple(token for each in prompts for token in answers[each].tokens)


def plain_answer(place: Path) -> tuple[int, ...]:
    engine = TorchEngine(place / "model", 4 * 2**30, LIMITS)
    engine.load()
    engine.warm()
    return answer(engine)


def compiled_layers(engine: TorchEngine) -> int:
    return sum("forward" in layer.__dict__ for layer in engine._runner.model.model.layers)  # type: ignore[union-attr]


def test_an_engine_answers_while_its_layers_are_compiled_and_takes_them_over_between_steps(
    first: tuple[TorchEngine, Path],
) -> None:
    engine, place = first
    assert engine.stats().layers == "plain, being compiled"
    said = answer(engine)
    assert compiled_layers(engine) == 0
    engine._adoption.wait()
    assert answer(engine, "b") == said == plain_answer(place)
    assert compiled_layers(engine) == 2
    assert (engine.stats().layers, engine.stats().attention) == ("compiled", "compiled")
    engine.sleep()
    engine.wake()
    assert answer(engine, "c") == said


def test_what_was_proven_once_is_taken_over_at_the_next_load_without_asking(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopt, "ASKED", None)
    monkeypatch.setattr(adopt, "_start", None)
    engine = loaded(made)
    assert compiled_layers(engine) == 2
    assert answer(engine) == plain_answer(made)


def test_a_model_loaded_asleep_wakes_with_them(made: Path) -> None:
    engine = engine_of(made)
    engine.load(asleep=True)
    engine.wake()
    assert compiled_layers(engine) == 2
    assert answer(engine) == plain_answer(made)


def test_layers_that_say_otherwise_stay_plain(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = plain_answer(place)
    description = json.loads(next((place / "layers").glob("*/layers.json")).read_text())
    description["codes"][0]["layers"][0]["scale"] *= 3
    next((place / "layers").glob("*/layers.json")).write_text(json.dumps(description))
    engine = loaded(place)
    assert engine.stats().layers == "plain: compiled layers gave other scores"
    assert compiled_layers(engine) == 0
    assert answer(engine) == said


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: d["codes"][0]["layers"][0].update(window=52), "compiled layers gave other scores"),
        (lambda d: d["codes"][0]["layers"][0].update(layer=-1), "compiled are layers"),
        (lambda d: d["codes"].clear(), "compiled are layers"),
        (lambda d: d.update(container="model.embed_tokens"), "has no len"),
        (lambda d: d["codes"][0]["inputs"][0].append("x"), "invalid literal"),
    ],
)
def test_a_description_of_something_else_is_not_gone_by(
    place: Path, spoil: Callable[[dict[str, Any]], object], said: str
) -> None:
    """Neither at a first load nor with a recipe that had proven it."""
    right = plain_answer(place)
    assert compiled_layers(loaded(place)) == 2
    file = next((place / "layers").glob("*/layers.json"))
    description = json.loads(file.read_text())
    spoil(description)
    file.write_text(json.dumps(description))
    for _ in range(2):
        engine = loaded(place)
        assert said in engine.stats().layers
        assert compiled_layers(engine) == 0
        assert answer(engine) == right


def test_a_damaged_library_is_not_loaded(place: Path) -> None:
    (library,) = (place / "layers").glob("*/layer0.so")
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    assert words.read(library.parent) is None
    library.write_bytes(content[: len(content) // 2])
    assert words.read(library.parent) is None


def test_code_that_others_could_have_written_is_not_loaded(place: Path) -> None:
    (directory,) = (each.parent for each in (place / "layers").glob("*/layers.json"))
    assert words.read(directory) is not None
    directory.chmod(0o777)
    assert words.read(directory) is None


def test_without_a_compiler_they_stay_plain_and_say_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(place / "layers")
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = loaded(place)
    assert engine.settle() == f"plain: {code_files.NO_COMPILER}"
    assert answer(engine) == plain_answer(place)


def test_layers_that_cannot_be_compiled_stay_plain_and_are_not_tried_again(tmp_path: Path) -> None:
    """Mixture of experts: which rows an expert gets is only known once it is computed."""
    verdict = check_right("jetmoe", tmp_path, compiled=True)
    assert verdict.good
    assert verdict.layers.startswith("plain: DataDependentOutputException")
    engine = TorchEngine(tmp_path / "model", 2 * 2**30, LIMITS, places=Places(code=str(tmp_path / "layers")))
    engine.load()
    engine.warm()
    assert engine._adoption._process is None
    assert engine.settle() == verdict.layers


def test_what_may_pass_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails today, for a full disk say, is not a reason for ever."""
    save_tiny(tiny("llama"), tmp_path / "model")
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'No space left on device' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    engine = loaded(tmp_path)
    assert "the process that compiled them ended with code 1 InductorError" in engine.settle()
    assert engine.stats().attention == f"torch: {compiler} ended with 1: No space left on device"
    monkeypatch.delenv("CXX")
    engine = loaded(tmp_path)
    assert (engine.stats().layers, engine.stats().attention) == ("plain, being compiled", "compiled")
    engine.close()


def test_nothing_is_compiled_outside_its_own_directory(made: Path) -> None:
    """In a shared one, others could have left code where torch looks for its own."""
    assert list((made / "shared").iterdir()) == []


def test_a_compiling_process_ends_with_its_engine_and_leaves_nothing_usable(tmp_path: Path) -> None:
    save_tiny(tiny("llama"), tmp_path / "model")
    engine = loaded(tmp_path)
    process = engine._adoption._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as when its engine is killed
    assert process.wait(30) == 1
    engine.close()
    assert not list((tmp_path / "layers").glob("*/layers.json"))


def test_an_engine_that_is_closed_ends_its_compiling_process_at_once(tmp_path: Path) -> None:
    save_tiny(tiny("llama"), tmp_path / "model")
    engine = loaded(tmp_path)
    process = engine._adoption._process
    assert process is not None
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 1
    assert process.returncode is not None


def test_an_error_of_attention_comes_out_of_compiled_code_as_one(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(made)

    def fail(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(NativeStep, "attend", fail)
    with pytest.raises(RuntimeError):
        answer(engine)


def test_the_same_scores_means_what_it_says() -> None:
    import torch

    scores = torch.randn(1, 50)
    assert guards.same_scores(scores, scores + 1e-5, torch.float32)
    assert not guards.same_scores(scores, scores + 1, torch.float32)
    assert not guards.same_scores(scores, scores * float("nan"), torch.float32)
