"""Small random models of many families: our greedy tokens are those of transformers' own ``generate``.

Prompts and steps are sized so that chunk borders, block borders and the edge of the window (12 tokens) all meet.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.attention import reference
from engine.protocol import EngineLimits, GenerationRequest, Places
from engine.torch_engine import TorchEngine
from policies.errors import DoesNotFit, LoadFailed
from tests.engine_helpers import (
    Expected,
    generate,
    plain_model,
    request,
    run,
    run_preempting,
    save_tiny,
    torch_engine,
    with_pool,
)

WINDOW = 12
NEW = 10

BREAKS = {
    "test_E61_rotary": ("engine/guards.py", "if frozen is None or fitted.max_model_len > frozen:", "if False:"),
    "test_a_window_that_lives_in_a_mask": ("engine/guards.py", "    if blind:\n", "    if False:\n"),
    "test_what_its_config_says": ("engine/guards.py", "if _alibi(config):", "if False:"),
    "test_a_word_that_its_family": ("engine/guards.py", 'hasattr(type(config), "use_sliding_window") and', ""),
    "test_a_model_that_counts": ("engine/guards.py", "if not same_scores(pieces, whole, dtype):", "if False:"),
    "test_model_code_that_fails": (
        "engine/loader.py",
        "except (AttributeError, RuntimeError) as error:",
        "except ZeroDivisionError as error:",
    ),
    "test_attention_that_is_scaled": ("engine/guards.py", "fitted.max_model_len > config.floor_scale", "False"),
    "test_scores_that_are_not": ("engine/guards.py", "if not same_scores(ours, theirs, dtype):", "if False:"),
}
LENGTHS = (1, 5, 11, 12, 13, 30, 41)
LIMITS = EngineLimits(max_model_len=128, block_size=4, step_tokens=16, max_running=8, kv_host_bytes=2**22)
BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MIXED = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {**MIXED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": WINDOW},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    name: str
    engine: TorchEngine
    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[Expected, ...]

    def requests(self, suffix: str = "") -> list[GenerationRequest]:
        return [request(f"{i}{suffix}", p, NEW, ignore_eos=True) for i, p in enumerate(self.prompts)]

    def check(self, said: dict[str, Any], suffix: str = "") -> None:
        for i, expected in enumerate(self.expected):
            expected.check(said[f"{i}{suffix}"].tokens)

    def fresh(self, blocks: int = 128, host_blocks: int = 0, **options: Any) -> TorchEngine:
        """The engine with an empty pool of ``blocks``."""
        assert host_blocks * self.engine.limits.block_size <= self.engine._host_kv.num_slots
        with_pool(self.engine, blocks, host_blocks, **options)
        return self.engine


def config_of(name: str, **more: Any) -> Any:
    return AutoConfig.for_model(name, **{**BASE, **FAMILIES.get(name, {}), **more})


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    name = request.param
    path = save_tiny(config_of(name), tmp_path_factory.mktemp(name))
    generator = torch.Generator().manual_seed(1)
    prompts = tuple(tuple(torch.randint(2, 320, (n,), generator=generator).tolist()) for n in LENGTHS)
    before = torch.get_num_threads()
    engine = torch_engine(path, LIMITS)
    torch.set_num_threads(1)
    plain = plain_model(path)
    yield Family(name, engine, prompts, tuple(generate(plain, prompt, NEW) for prompt in prompts))
    torch.set_num_threads(before)


def test_the_oracle_is_clear_enough_to_compare_with(family: Family) -> None:
    assert sum(e.clear() for e in family.expected) > 0.8 * NEW * len(LENGTHS)
    assert len({e.tokens for e in family.expected}) == len(LENGTHS)


def test_alone(family: Family) -> None:
    engine = family.fresh()
    for i, (one, expected) in enumerate(zip(family.requests(), family.expected, strict=True)):
        said = run(engine, one)
        expected.check(said[str(i)].tokens)


def test_E62_in_a_batch_whose_chunks_are_cut_around_the_window(family: Family) -> None:
    family.check(run(family.fresh(), *family.requests()))


def test_after_prefix_hits(family: Family) -> None:
    engine = family.fresh()
    run(engine, *family.requests())
    said = run(engine, *family.requests("again"))
    family.check(said, "again")
    cached = [said[f"{i}again"].last.usage.cached_tokens for i in range(len(LENGTHS))]  # type: ignore[union-attr]
    assert cached == [(n - 1) // 4 * 4 for n in LENGTHS]


def test_after_preemptions_in_a_tiny_pool(family: Family) -> None:
    engine = family.fresh(blocks=20, window=None)  # that the blocks before a window are not let go is wanted here
    hungry = [request(f"hungry{i}", [2 + i], 60, ignore_eos=True, arrival=-1.0) for i in range(2)]
    said = run(engine, *hungry, *family.requests())
    family.check(said)
    assert any(said[str(i)].last.usage.recomputed_tokens > 0 for i in range(len(LENGTHS)))  # type: ignore[union-attr]


def test_after_forced_preemptions_with_nothing_left_in_the_cache(family: Family) -> None:
    engine = family.fresh()
    for one in family.requests():
        engine.add(one)
    said = run_preempting(engine, every=5, forget=True)
    family.check(said)
    assert engine.stats().preemptions > 3


def test_E19_swapped_out_and_in_again_little_is_computed_twice(family: Family) -> None:
    engine = family.fresh(blocks=20, host_blocks=64, window=None)
    engine._host_kv._flat.fill_(float("nan"))  # what is read must have been written
    hungry = [request(f"hungry{i}", [2 + i], 60, ignore_eos=True, arrival=-1.0) for i in range(2)]
    said = run(engine, *hungry, *family.requests())
    family.check(said)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.kv_blocks_moved_in > 0
    recomputed = sum(one.last.usage.recomputed_tokens for one in said.values())  # type: ignore[union-attr]
    assert recomputed < stats.preemptions * engine.limits.block_size


def test_parked_in_host_memory_while_the_model_sleeps(family: Family) -> None:
    engine = family.fresh(host_blocks=128)
    run(engine, *family.requests())
    engine.sleep()
    engine.wake()
    said = run(engine, *family.requests("again"))
    family.check(said, "again")
    cached = [said[f"{i}again"].last.usage.cached_tokens for i in range(len(LENGTHS))]  # type: ignore[union-attr]
    assert cached == [(n - 1) // 4 * 4 for n in LENGTHS]
    assert engine.stats().kv_blocks_moved_in > 0


def test_after_sleep_and_wake(family: Family) -> None:
    engine = family.fresh()
    run(engine, *family.requests())
    engine.sleep()
    engine.wake()
    said = run(engine, *family.requests("woken"))
    family.check(said, "woken")
    assert said["6woken"].last.usage.cached_tokens == 0  # type: ignore[union-attr]


def test_loaded_by_the_findings_of_an_earlier_load(family: Family, tmp_path: Path) -> None:
    """Every family comes out the same of a skeleton and its files."""
    for asleep in (False, True):
        engine = TorchEngine(family.engine.path, 4 * 2**30, LIMITS, places=Places(recipes=str(tmp_path)))
        engine.load(asleep=asleep)
        (engine.wake if asleep else engine.warm)()
        torch.set_num_threads(1)
        family.check(run(engine, *family.requests()))


# -- refused at load --------------------------------------------------------------------------


def load(path: Path, memory_bytes: int = 4 * 2**30, limits: EngineLimits = LIMITS) -> TorchEngine:
    engine = TorchEngine(path, memory_bytes, limits)
    engine.load()
    return engine


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("falcon", {"num_kv_heads": 4, "alibi": False}),
        ("diffllama", {}),
    ],
)
def test_a_family_that_ignores_our_attention_is_refused(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    path = save_tiny(config_of(name, **more), tmp_path)
    with pytest.raises(LoadFailed, match=r"layers \[0, 1\] of 2 do not dispatch") as raised:
        load(path)
    assert name in raised.value.message


def test_layers_whose_pattern_lives_in_the_mask_are_refused(tmp_path: Path) -> None:
    config = config_of("llama4_text", layer_types=["chunked_attention", "full_attention"], attention_chunk_size=8)
    config.save_pretrained(tmp_path)
    with pytest.raises(LoadFailed, match="chunked_attention"):
        load(tmp_path)


def test_too_little_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path = save_tiny(config_of("llama"), tmp_path)
    with pytest.raises(DoesNotFit, match=r"memory_bytes 1000 − weights \d+ .* Raise memory_bytes"):
        load(path, memory_bytes=1000)


def test_a_step_wider_than_the_models_window_can_still_be_measured(tmp_path: Path) -> None:
    path = save_tiny(config_of("gpt2"), tmp_path)  # learned positions: there is no 129th
    engine = load(path, limits=EngineLimits(max_model_len=4096, step_tokens=512, max_running=4))
    assert engine.limits.max_model_len == 128


def test_no_directory_or_no_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"no config\.json"):
        load(tmp_path)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
LONGER_THAN_IT_KNEW = {
    "phi3": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


def test_E61_rotary_embeddings_that_depend_on_the_longest_neighbour_are_refused(tmp_path: Path) -> None:
    path = save_tiny(config_of("phi3", **LONGER_THAN_IT_KNEW["phi3"]), tmp_path)
    with pytest.raises(LoadFailed, match=r"longrope rotary .* beyond 64 tokens; refused with max_model_len 128"):
        load(path)


@pytest.mark.parametrize(("name", "frozen"), [("phi3", 64), ("llama", 128)])
def test_E61_within_the_length_from_which_they_depend_they_are_served(name: str, frozen: int, tmp_path: Path) -> None:
    path = save_tiny(config_of(name, **LONGER_THAN_IT_KNEW[name]), tmp_path)
    engine = torch_engine(path, dataclasses.replace(LIMITS, max_model_len=64 if name == "phi3" else 4096))
    assert engine.limits.max_model_len == frozen
    prompt = [2 + (7 * n * n + 3 * n) % 300 for n in range(frozen - NEW)]
    short = request("short", prompt[:9], NEW, ignore_eos=True)
    said = run(engine, request("long", prompt, NEW, ignore_eos=True), short)
    generate(plain_model(path), prompt, NEW).check(said["long"].tokens)
    generate(plain_model(path), prompt[:9], NEW).check(said["short"].tokens)


# -- found out at the load ----------------------------------------------------------------------


def test_a_window_that_lives_in_a_mask_is_refused_where_it_would_be_crossed(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": WINDOW}
    path = save_tiny(config_of("phimoe", **sizes), tmp_path)
    with pytest.raises(LoadFailed, match=r"layers \[0, 1\] do not tell paged attention their window of 12 tokens"):
        load(path)
    assert load(path, limits=dataclasses.replace(LIMITS, max_model_len=WINDOW)).limits.max_model_len == WINDOW


def test_a_word_that_its_family_does_not_know_switches_no_window_off(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": WINDOW}
    path = save_tiny(config_of("phimoe", **sizes), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "use_sliding_window": False}))
    with pytest.raises(LoadFailed, match="do not tell paged attention their window"):
        load(path)


@pytest.mark.parametrize("name", ["bart", "pegasus"])
def test_a_model_that_counts_positions_by_itself_is_refused(name: str, tmp_path: Path) -> None:
    """A decoder alone, which takes a later piece of a prompt for its beginning."""
    sizes = {"d_model": 64, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4}
    path = save_tiny(AutoConfig.for_model(name, **{**BASE, **sizes, "decoder_ffn_dim": 96}), tmp_path)
    with pytest.raises(LoadFailed, match="in two pieces differ by"):
        load(path)


def test_attention_that_is_scaled_by_a_position_of_its_own_is_refused_where_that_begins(tmp_path: Path) -> None:
    layers = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 1], "head_dim": 16, "num_local_experts": 2}
    sizes = {**layers, "intermediate_size_mlp": 96, "attn_temperature_tuning": True, "floor_scale": 40}
    path = save_tiny(config_of("llama4_text", **sizes), tmp_path)
    with pytest.raises(LoadFailed, match=r"beyond 40 tokens .* set it to 40 at most"):
        load(path)
    assert load(path, limits=dataclasses.replace(LIMITS, max_model_len=40)).limits.max_model_len == 40


def test_model_code_that_fails_is_a_refusal_with_its_words(tmp_path: Path) -> None:
    path = save_tiny(config_of("llama"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "head_dim": 24}))
    with pytest.raises(LoadFailed, match="its model code fails: RuntimeError"):
        load(path)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
        ("falcon", {"num_kv_heads": 4, "alibi": True}, "ALiBi"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            "m-rope",
        ),
    ],
)
def test_what_its_config_says_we_cannot_do_is_refused(
    name: str, more: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config_of(name, **more).save_pretrained(tmp_path)
    with pytest.raises(LoadFailed, match=reason):
        load(tmp_path)


def test_scores_that_are_not_the_models_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a family does beside the attention that we replace."""
    path = save_tiny(config_of("llama"), tmp_path)
    attend = reference.attend
    monkeypatch.setattr(reference, "attend", lambda *args, **how: attend(*args, **how | {"scale": how["scale"] * 1.1}))
    with pytest.raises(LoadFailed, match=r"llama: scores through paged attention differ by .* from those of its own"):
        load(path)
