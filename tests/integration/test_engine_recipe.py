"""What a first load finds out, and the loads that go by it."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine import loader, recipe
from engine.memory import held_bytes, trim
from engine.protocol import EngineLimits, Places
from engine.torch_engine import TorchEngine
from policies.errors import EngineError, NotKnownYet
from tests.engine_helpers import request, run, save_tiny, scale_values, tiny_llama

LIMITS = EngineLimits(max_model_len=128, block_size=4, step_tokens=32, max_running=4, kv_host_bytes=2**20)
PROMPT = tuple(range(10, 40))
BREAKS = {
    "test_the_second_load": ("engine/torch_engine.py", "recipe.read(self._recipe_file) if", "None if"),
    "test_a_load_can_end_asleep": ("engine/loader.py", "    loaded.kv.give_back()\n", "    weights.wake()\n"),
    "test_other_files_limits_or_versions": ("engine/recipe.py", "stamps, limiting, dtype", "dtype"),
    "test_loaded_asleep_by_a_wrong_recipe": (
        "engine/torch_engine.py",
        "self._recipe_file.unlink(missing_ok=True)",
        "            raise",
    ),
    "test_a_peak_of_native": ("engine/loader.py", "if recipe.native and", "if False and"),
    "test_shapes_seen": ("engine/torch_engine.py", "self.limits, self._recipe.rows)", "self.limits)"),
    "test_weights_that_the_files_name": ("engine/torch_engine.py", "and not self._weights.private_bytes", ""),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def engine_of(model: Path, limits: EngineLimits = LIMITS) -> TorchEngine:
    return TorchEngine(model, 4 * 2**30, limits, places=Places(recipes=str(model.parent / "recipes")))


def answer(engine: TorchEngine) -> tuple[int, ...]:
    return run(engine, request("a", PROMPT, 8, ignore_eos=True))["a"].tokens


def first(model: Path) -> tuple[int, ...]:
    """Load for the first time; its answer."""
    engine = engine_of(model)
    engine.load()
    engine.warm()
    return answer(engine)


def kept(model: Path) -> Path:
    (file,) = (model.parent / "recipes").glob("*.json")
    return file


def test_the_second_load_finds_nothing_out_and_answers_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = first(model)
    monkeypatch.setattr(loader, "_measure", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(loader, "fingerprint", lambda *_: pytest.fail("read all files again"))
    engine = engine_of(model)
    report = engine.load()
    engine.warm()
    assert answer(engine) == said
    assert report.fingerprint == recipe.read(kept(model)).fingerprint  # type: ignore[union-attr]


def test_a_load_can_end_asleep_and_holds_no_weights_until_it_wakes(tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    big = AutoConfig.for_model(
        "llama", **sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1
    )
    model = save_tiny(big, tmp_path / "model")
    said = first(model)
    engine = engine_of(model)
    gc.collect()  # the first engine, and those of other tests: their end is not to be measured
    trim()
    before = held_bytes()
    report = engine.load(asleep=True)
    assert report.weight_bytes > 200e6
    asleep = held_bytes()
    assert asleep - before < 0.1 * report.weight_bytes
    engine.wake()
    assert held_bytes() - asleep > 0.9 * report.weight_bytes
    assert answer(engine) == said
    engine.sleep()
    engine.wake()
    assert answer(engine) == said


def test_a_first_load_cannot_end_asleep(model: Path) -> None:
    with pytest.raises(NotKnownYet, match="not been loaded here before"):
        engine_of(model).load(asleep=True)


def test_other_files_limits_or_versions_have_a_recipe_of_their_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first(model)
    with pytest.raises(NotKnownYet):
        engine_of(model, replace(LIMITS, step_tokens=64)).load(asleep=True)
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "machine", lambda: ["torch 99"])
        with pytest.raises(NotKnownYet):
            engine_of(model).load(asleep=True)
    scale_values(model / "model.safetensors")
    with pytest.raises(NotKnownYet):
        engine_of(model).load(asleep=True)


@pytest.mark.parametrize("damage", ["cut", "wrong layer", "wrong canary", "no such module", "empty"])
def test_a_recipe_that_is_no_good_is_thrown_away_and_the_load_finds_out_again(damage: str, model: Path) -> None:
    said = first(model)
    file = kept(model)
    good = file.read_bytes()
    told = json.loads(good)
    match damage:
        case "cut":
            file.write_bytes(good[: len(good) // 2])
        case "empty":
            file.write_bytes(b"")
        case _:
            if damage == "wrong layer":
                told["layers"][0]["head_dim"] += 1
            elif damage == "wrong canary":
                told["canary"] = [(token + 1) % 320 for token in told["canary"]]
            else:
                told["packed"] = {"model.layers.7.mlp.gate_proj": "reordered"}
            file.write_text(json.dumps(told))
    engine = engine_of(model)
    engine.load()
    engine.warm()
    assert answer(engine) == said
    again = json.loads(file.read_bytes())
    assert (again["canary"], again["layers"]) == (json.loads(good)["canary"], json.loads(good)["layers"])


def test_loaded_asleep_by_a_wrong_recipe_it_does_not_wake_and_is_loaded_anew(model: Path) -> None:
    said = first(model)
    file = kept(model)
    told = json.loads(file.read_bytes())
    file.write_text(json.dumps({**told, "canary": [(token + 1) % 320 for token in told["canary"]]}))
    engine = engine_of(model)
    engine.load(asleep=True)
    with pytest.raises(EngineError, match="canary"):
        engine.wake()
    assert not file.exists()
    assert first(model) == said


def test_loaded_asleep_by_a_recipe_with_wrong_numbers_it_is_loaded_anew_too(model: Path) -> None:
    said = first(model)
    file = kept(model)
    told = json.loads(file.read_bytes())
    for layer in told["layers"]:
        layer.update(kv_heads=1, head_dim=layer["head_dim"] // 2)
    file.write_text(json.dumps(told))
    engine = engine_of(model)
    engine.load(asleep=True)
    with pytest.raises(EngineError, match="does not wake: RuntimeError"):
        engine.wake()
    assert not file.exists() and not engine._awake
    assert first(model) == said


def test_shapes_seen_in_traffic_are_warmed_up_at_the_next_load(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    engine.load()
    engine.warm()
    for _ in range(3):
        run(engine, request("a", PROMPT[:23], 2, ignore_eos=True))
        engine.sleep()
        engine.wake()
    assert 23 in recipe.read(kept(model)).rows  # type: ignore[union-attr]
    engine = engine_of(model)
    engine.load()
    widths: list[int] = []
    forward = engine._runner._forward

    def noted(state: object, ids: list[int], *rest: list[int]) -> torch.Tensor:
        widths.append(len(ids))
        return forward(state, ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._runner, "_forward", noted)
    engine.warm()
    assert 23 in widths


def test_a_directory_that_cannot_be_written_costs_time_only(model: Path) -> None:
    (model.parent / "recipes").write_text("a file")
    assert len(first(model)) == 8


def test_nothing_of_the_skeleton_is_left_in_the_model(model: Path) -> None:
    first(model)
    engine = engine_of(model)
    engine.load()
    for name, buffer in engine._runner.model.named_buffers():
        assert not buffer.is_meta and torch.isfinite(buffer).all(), name
    for name, parameter in engine._runner.model.named_parameters():
        assert not parameter.is_meta, name


def test_weights_that_the_files_name_otherwise_are_computed_by_a_whole_load_each_time(model: Path) -> None:
    file = model / "model.safetensors"
    unprefixed = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(unprefixed, file, {"format": "pt"})
    assert len(first(model)) == 8
    assert not list((model.parent / "recipes").glob("*"))


def test_a_peak_of_native_attention_is_not_gone_by_where_torch_attends(model: Path) -> None:
    """Torch needs masks, which may be far larger than what was measured."""
    places = Places(recipes=str(model.parent / "recipes"), code=str(model.parent / "code"))
    engine = TorchEngine(model, 4 * 2**30, LIMITS, places=places)
    engine.load()
    assert engine.stats().attention == "compiled"
    engine.warm()
    engine.close()
    assert json.loads(kept(model).read_text())["native"]
    first(model)
    assert not json.loads(kept(model).read_text())["native"]
