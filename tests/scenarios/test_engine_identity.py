"""Engine entries of the scenario bank: KV of other weights, of another tenant, and memory that nobody has written.

An engine that starts has no KV, so that finding none proves nothing. Here the tests hand it the books and the bytes of
an earlier one (``inherit``), as a tier that outlives a process does.
"""

from __future__ import annotations

import random
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from engine.blocks import Place
from engine.core import EngineCore
from engine.prefix import KVIdentity, chain
from engine.protocol import EngineLimits, GenerationRequest
from engine.scheduler import Chunk
from engine.torch_engine import TorchEngine
from engine.weights import fingerprint
from policies.errors import CheckpointRefused, EngineError, HostUnavailable
from tests.engine_helpers import (
    Said,
    collect,
    fake_engine,
    request,
    run,
    save_tiny,
    scale_values,
    torch_engine,
    with_pool,
)

BLOCK = 4
LIMITS = EngineLimits(max_model_len=128, block_size=BLOCK, step_tokens=32, max_running=16, kv_host_bytes=2**20)
PROMPT = [2 + (7 * n * n + 3 * n) % 240 for n in range(42)]
WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK  # what a second request for it finds
TIERS = ("device", "host")  # "disk", once there is one: `inherit` starts the heir on what `old` left there

BREAKS = {
    "test_E02": ("engine/prefix.py", "            self.adapter,\n", ""),
    "test_E04_base": ("engine/weights.py", "digest.update(file.digest())", "digest.update(str(file.path).encode())"),
    "test_E04_weights": ("engine/weights.py", "if found != self.stamp:", "if False:"),
    "test_E05_the_keys": ("engine/prefix.py", "            self.fingerprint,\n", ""),
    "test_E05_a_checkpoint": ("engine/checkpoint.py", "if found.get(name) != expected:", "if False:"),
    "test_E08": ("engine/core.py", "return KVIdentity(tenant,", 'return KVIdentity("",'),
    "test_E32": (
        "engine/attention/torch_blocks.py",
        "length - inside].transpose(0, 1)",
        "length - inside + 1].transpose(0, 1)",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tiny(path: Path, family: str = "llama", seed: int = 0) -> Path:
    """A small model; of one family all have the same config and tokenizer, and each seed other weights."""
    from transformers import AutoConfig

    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    window = {"sliding_window": 8} if family == "gemma3_text" else {}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return save_tiny(AutoConfig.for_model(family, **sizes, **heads, **window, **ends), path, seed=seed)


def inherit(heir: EngineCore, old: EngineCore, tier: str) -> None:
    """Give ``heir`` all KV that ``old`` has kept: the books, and where there are any, the bytes."""
    if tier == "host":
        old._park()
        old._kv_cache.pool.clear_cache()
    heir._scheduler, heir._kv_cache = old._scheduler, old._kv_cache
    if isinstance(heir, TorchEngine) and isinstance(old, TorchEngine):
        heir._kv, heir._host_kv = old._kv, old._host_kv


def asked(engine: EngineCore, name: str, prompt: Sequence[int] = PROMPT, **more: object) -> tuple[Said, int]:
    """What the engine says to the prompt, and how many tokens of it were found."""
    said = run(engine, request(name, prompt, 8, ignore_eos=True, **more))[name]  # type: ignore[arg-type]
    assert said.last.usage is not None
    return said, said.last.usage.cached_tokens


def checkpoint(engine: EngineCore, path: Path) -> Path:
    engine.add(request("cut", PROMPT, 20, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.save("cut", 0, path)
    engine.cancel("cut", 0, "saved")
    return path


def refused(engine: EngineCore, path: Path) -> None:
    """A checkpoint of other weights, before anything of it is used."""
    before = engine._kv_cache.pool.books(), engine._kv_cache.host.books()
    with pytest.raises(CheckpointRefused, match="fingerprint"):
        engine.restore(path, "acme")
    assert not engine.has_work()
    assert (engine._kv_cache.pool.books(), engine._kv_cache.host.books()) == before


# -- other weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_E02_an_adapter_reloaded_under_its_name_finds_no_kv_of_the_weights_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    def loaded(seed: int) -> str:
        """The adapter, always under one path; its content digest is what the engine knows it by."""
        weights = np.random.default_rng(seed).normal(size=(4, 64)).astype(np.float32)
        save_file({"lora_A": weights}, tmp_path / "adapter_model.safetensors")
        return fingerprint(tmp_path)

    first, second = loaded(1), loaded(2)
    again = loaded(1)
    assert again == first != second
    engine = fake_engine(LIMITS, kv_capacity_tokens=512, kv_bytes=2**20)
    plain = engine._identity("acme")

    def wear(adapter: str) -> KVIdentity:  # engines have no adapters yet: this is the place where theirs will come in
        worn = replace(plain, adapter=adapter)
        monkeypatch.setattr(engine, "_identity", lambda tenant: replace(worn, tenant=tenant))
        return worn

    keys = set(chain(wear(first).namespace(), PROMPT, BLOCK))
    assert asked(engine, "first")[1] == 0
    inherit(engine, engine, tier)
    assert not keys & set(chain(wear(second).namespace(), PROMPT, BLOCK))
    assert asked(engine, "reloaded")[1] == 0
    wear("")
    assert asked(engine, "without one")[1] == 0
    wear(again)
    assert asked(engine, "as it was")[1] == WHOLE


@pytest.mark.parametrize("tier", TIERS)
def test_E04_base_weights_changed_under_the_same_path_find_none_of_the_old_blocks(tmp_path: Path, tier: str) -> None:
    path, aside, kept = (tmp_path / name for name in ("model", "aside", "kept"))
    old = torch_engine(tiny(path, seed=0), LIMITS)
    with_pool(old, 256, 64)  # the load may have found that host memory does not pay
    before, _ = asked(old, "before")
    saved = checkpoint(old, tmp_path / "cut")

    path.rename(aside)
    new = torch_engine(tiny(path, seed=1), LIMITS)
    assert new.report.fingerprint != old.report.fingerprint
    alone, _ = asked(new, "alone")
    assert alone.tokens != before.tokens  # the KV of the one is no use to the other
    inherit(new, old, tier)
    after, found = asked(new, "after")
    assert (found, after.tokens) == (0, alone.tokens)
    refused(new, saved)

    path.rename(kept)
    aside.rename(path)
    back = torch_engine(path, LIMITS)
    assert back.report.fingerprint == old.report.fingerprint
    inherit(back, old, tier)
    again, found = asked(back, "again")
    assert (found, again.tokens) == (WHOLE, before.tokens)
    assert back.restore(saved, "acme").prompt_token_ids == tuple(PROMPT)


@pytest.mark.parametrize("how", ["written over", "replaced", "gone"])
def test_E04_weights_that_change_while_the_model_sleeps_are_not_taken_for_those_it_had(
    tmp_path: Path, how: str
) -> None:
    engine = torch_engine(tiny(tmp_path / "model"), LIMITS)
    with_pool(engine, 256, 64)
    first, _ = asked(engine, "before")
    engine.sleep()
    engine.wake()
    again, found = asked(engine, "woken")
    assert (found, again.tokens) == (WHOLE, first.tokens)  # while they are what they were, its KV is found

    engine.sleep()
    path = tmp_path / "model" / "model.safetensors"
    if how == "gone":
        path.rename(tmp_path / "aside")
    else:
        target = path if how == "written over" else shutil.copy2(path, tmp_path / "new")
        scale_values(target)
        target.replace(path)
        assert fingerprint(path.parent) != engine.report.fingerprint
    with pytest.raises(EngineError, match=r"model\.safetensors"):
        engine.wake()  # upon this its host ends, and the model is loaded anew
    with pytest.raises(HostUnavailable, match="asleep"):
        engine.add(request("after", PROMPT))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchEngine, TorchEngine]:
    """Two models with one config and one tokenizer, served under one directory name; only their weights differ."""
    places = (tmp_path_factory.mktemp(name) / "model" for name in "ab")
    one, two = (torch_engine(tiny(path, seed=seed), LIMITS) for seed, path in enumerate(places, 1))
    assert (one.path / "config.json").read_bytes() == (two.path / "config.json").read_bytes()
    return one, two


@pytest.mark.parametrize("tier", TIERS)
def test_E05_the_keys_of_two_models_with_one_config_all_differ(
    twins: tuple[TorchEngine, TorchEngine], tier: str
) -> None:
    one, two = twins
    mine, theirs = (set(chain(engine._identity("acme").namespace(), PROMPT, BLOCK)) for engine in twins)
    assert len(mine) == len(theirs) == len(PROMPT) // BLOCK and not mine & theirs
    for engine in twins:
        with_pool(engine, 256, 64)
    first, _ = asked(one, "one")
    alone, _ = asked(two, "alone")
    books = two._scheduler, two._kv_cache, two._kv, two._host_kv
    inherit(two, one, tier)
    second, found = asked(two, "two")
    assert (found, second.tokens) == (0, alone.tokens)
    again, found = asked(one, "one again")
    assert (found, again.tokens) == (WHOLE, first.tokens)
    two._scheduler, two._kv_cache, two._kv, two._host_kv = books


def test_E05_a_checkpoint_of_the_one_is_refused_by_the_other(
    twins: tuple[TorchEngine, TorchEngine], tmp_path: Path
) -> None:
    one, two = twins
    saved = checkpoint(one, tmp_path / "cut")
    refused(two, saved)
    assert one.restore(saved, "acme").prompt_token_ids == tuple(PROMPT)
    run(one)


# -- another tenant --------------------------------------------------------------------------


def test_E08_fifty_probes_of_a_secret_cost_what_a_prompt_costs_that_nobody_ever_had(
    twins: tuple[TorchEngine, TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is counted, not time: tokens computed, step by step, are all that a prefix hit could make shorter."""
    engine, _ = twins
    with_pool(engine, 256, 64)
    steps: list[tuple[int, ...]] = []
    compute = engine._compute

    def counting(chunks: Sequence[Chunk]) -> object:
        steps.append(tuple(chunk.count for chunk in chunks))
        return compute(chunks)

    monkeypatch.setattr(engine, "_compute", counting)

    def work(tenant: str, prompt: Sequence[int]) -> tuple[int, list[tuple[int, ...]]]:
        """(tokens found, tokens computed in each step) of one request; what it leaves is dropped again."""
        begin = len(steps)
        probe = replace(request("probe", prompt, 2, ignore_eos=True, tenant=tenant), session=f"{tenant}/probe")
        usage = run(engine, probe)["probe"].last.usage
        assert usage is not None
        engine.forget_session(f"{tenant}/probe")
        return usage.cached_tokens, steps[begin:]

    secret, nobodys = PROMPT, PROMPT[::-1]
    run(engine, replace(request("secret", secret, 2, ignore_eos=True), session="acme/1"))
    unknown = work("globex", nobodys)
    assert sum(map(sum, unknown[1])) == len(nobodys) + 1  # all of it, and the first of the two tokens said
    for number in range(50):
        right = 1 + number * len(secret) // 50
        guess = [*secret[:right], *nobodys[right:]] if number % 2 else secret
        assert work("globex", guess) == unknown, f"probe {number}"
    found, computed = work("acme", secret)
    assert found == WHOLE and len(computed) < len(unknown[1])
    assert sum(map(sum, computed)) == len(secret) - WHOLE + 1


# -- memory that nobody has written ------------------------------------------------------------

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 31, 32, 33, 63, 64, 65)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], TorchEngine]:
    """(family, dtype) → engine; the second family has a sliding window."""
    found = {}
    for family in ("llama", "gemma3_text"):
        path = tiny(tmp_path_factory.mktemp(family), family)
        for dtype in ("float16", "bfloat16"):
            engine = TorchEngine(path, 4 * 2**30, LIMITS, dtype)
            engine.load()
            torch.set_num_threads(2)
            engine.warm()
            found[family, dtype] = engine
    return found


def in_memory_of(value: float, engine: TorchEngine, requests: Sequence[GenerationRequest], scattered: bool) -> str:
    """All that is said when every block that is not in use holds ``value``, at the start and after each step."""
    scheduler = with_pool(engine, 400)
    if scattered:
        order = list(scheduler.kv.pool._free)
        random.Random(5).shuffle(order)
        scheduler.kv.pool._free = OrderedDict.fromkeys(order)
    for one in requests:
        engine.add(one)
    said: dict[str, Said] = {}
    together = 0
    while engine.has_work():
        unused = [block for block, place in enumerate(scheduler.kv.pool.places()) if place is Place.FREE]
        for rows in engine._kv._rows(BLOCK):
            rows[unused] = value
        collect(said, engine.step())
        together = max(together, len(scheduler.running))
        engine.check()
    assert together > len(requests) // 2 and len(said) == len(requests)
    assert [one.last.error for one in said.values()] == [None] * len(requests)
    return "\n".join(f"{name} {one.tokens} {[o.logprobs for o in one.outputs]}" for name, one in sorted(said.items()))


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_E32_not_a_number_in_unused_blocks_reaches_nobody(
    halves: dict[tuple[str, str], TorchEngine], family: str, dtype: str, scattered: bool
) -> None:
    engine = halves[family, dtype]
    assert engine._kv._flat.dtype == getattr(torch, dtype)
    requests = []
    for number, length in enumerate(LENGTHS):
        one = request(str(length), [2 + (number + 5 * n) % 300 for n in range(length)], 2 * BLOCK + 1, ignore_eos=True)
        requests.append(replace(one, sampling=replace(one.sampling, logprobs=1)))
    clean = in_memory_of(0.0, engine, requests, scattered)
    assert "nan" not in clean
    assert in_memory_of(float("nan"), engine, requests, scattered) == clean
