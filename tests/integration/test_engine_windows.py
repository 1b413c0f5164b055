"""A model none of whose layers sees everything holds no more blocks than it sees, and says what transformers says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.context import NO_BLOCK
from engine.protocol import EngineLimits
from engine.torch_engine import TorchEngine
from tests.engine_helpers import drain, generate, plain_model, request, run, tiny_mistral, torch_engine

SIZE, SEES = 8, 20
LIMITS = EngineLimits(max_model_len=400, block_size=SIZE, step_tokens=48, max_running=4, kv_host_bytes=2**20)
PROMPT = [(n * 37 + 5) % 300 + 2 for n in range(101)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mistral(tmp_path_factory.mktemp("windows"), SEES)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[TorchEngine]:
    import torch

    before = torch.get_num_threads()
    yield torch_engine(path, LIMITS)
    torch.set_num_threads(before)


def test_blocks_before_the_window_are_let_go_and_the_answer_is_transformers_own(
    path: Path, engine: TorchEngine
) -> None:
    assert engine.report.window_tokens == SEES
    expected = generate(plain_model(path), PROMPT, 60)
    engine.add(request("long", PROMPT, 60, ignore_eos=True))
    said: list[int] = []
    most = 0
    while engine.has_work():
        said += [token for output in engine.step() for token in output.token_ids]
        most = max(most, engine.stats().kv_blocks_used)
        engine.check()
    expected.check(said)
    assert most <= -(-(SEES + LIMITS.step_tokens) // SIZE) + 2 < -(-len(PROMPT) // SIZE)


def test_the_next_turn_finds_its_history_though_the_beginning_was_given_to_others(engine: TorchEngine) -> None:
    first = run(engine, request("one", PROMPT, 20, ignore_eos=True))["one"]
    history = [*PROMPT, *first.tokens]
    pool = engine._kv_cache.pool
    keys = [key for key in list(pool._by_key) if pool._by_key[key] in list(pool._free)[:4]]
    engine._kv_cache.forget(keys[:2])  # as eviction does, from the oldest
    turn = [*history, *range(20, 40)]
    again = run(engine, request("two", turn, 10, ignore_eos=True))["two"]
    assert again.last.usage is not None
    assert again.last.usage.cached_tokens >= len(history) - 2 * SIZE
    pool.clear_cache()
    fresh = run(engine, request("fresh", turn, 10, ignore_eos=True))["fresh"]
    assert fresh.tokens == again.tokens


def test_a_checkpoint_carries_the_window_and_nothing_is_computed_twice(engine: TorchEngine, tmp_path: Path) -> None:
    whole = run(engine, request("whole", PROMPT, 30, ignore_eos=True, temperature=0.8, seed=3))["whole"]
    engine._kv_cache.pool.clear_cache()
    engine.add(request("cut", PROMPT, 30, ignore_eos=True, temperature=0.8, seed=3))
    said: list[int] = []
    while len(said) < 12:
        said += [token for output in engine.step() for token in output.token_ids]
    assert NO_BLOCK in engine._contexts["cut", 0].block_table
    engine.save("cut", 0, tmp_path / "cut")
    engine.cancel("cut", 0, "saved")
    engine._kv_cache.pool.clear_cache()
    engine.restore(tmp_path / "cut", "acme")
    said += [token for output in engine.step() for token in output.token_ids]
    assert engine._contexts["cut", 0].cached_tokens == len(PROMPT)
    rest = drain(engine)["cut"]
    assert (*said, *rest.tokens) == whole.tokens
