"""Engine entries of the scenario bank: the pool's bounds and books, generations taken up elsewhere, and waking."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.loop import EngineLoop
from engine.protocol import EngineLimits, Output, WakeReport
from engine.torch_engine import TorchEngine
from policies.errors import EngineError, HostUnavailable, RequestTooLarge
from tests.engine_helpers import drain, fake_engine, request, run, tiny_llama, torch_engine, with_pool

BLOCK = 4
PROMPT = [5, 9, 200, 31, 77, 12, 45]

BREAKS = {
    "test_R41": ("engine/core.py", "self._kv_cache.pool.clear_cache()", "pass"),
    "test_R43": ("engine/core.py", "        if self._awake:\n            return WakeReport(0.0, 0.0)\n", ""),
    "test_E20": ("engine/scheduler.py", "other.bypassed += other.request.arrival < context.request.arrival", "pass"),
    "test_E17": ("engine/scheduler.py", "return len(self.kv.pool) * self.limits.block_size", "return 10**9"),
    "test_E35": ("engine/loop.py", "self._engine.check()", "pass"),
    "test_E44": (
        "engine/context.py",
        "[*self.request.prompt_token_ids, *self.request.delivered_token_ids]",
        "[*self.request.prompt_token_ids, *self.request.delivered_token_ids[1:]]",
    ),
}


@pytest.mark.parametrize("ordering", ["fcfs", "sjf", "priority"])
def test_E20_a_large_request_among_a_stream_of_small_ones_is_bypassed_a_bounded_number_of_times(ordering: str) -> None:
    limits = EngineLimits(max_model_len=256, block_size=BLOCK, step_tokens=64, max_running=2, ordering=ordering)
    engine = fake_engine(limits, kv_capacity_tokens=256, reply_words=40)
    engine.add(request("small", PROMPT, 4, arrival=0.0))
    engine.add(request("large", PROMPT * 20, 60, arrival=1.0))
    for number in range(60):
        engine.add(request(f"small{number}", PROMPT, 4, arrival=2.0 + number))
    began: list[str] = []
    while "large" not in began:
        began += [output.request_id for output in engine.step() if output.request_id not in began]
    assert len(began) <= (20 if ordering == "sjf" else 3)
    assert ordering != "sjf" or len(began) > 10  # the short ones do go first
    drain(engine)


@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("over", [-BLOCK, -1, 0, 1, BLOCK])
def test_E17_around_the_pool_s_capacity_a_request_runs_or_is_refused_and_none_waits_for_ever(
    over: int, beside: int
) -> None:
    capacity = 16 * BLOCK
    limits = EngineLimits(max_model_len=4096, block_size=BLOCK, step_tokens=32, max_running=8)
    engine = fake_engine(limits, kv_capacity_tokens=capacity, reply_words=100)
    for number in range(beside):
        engine.add(request(f"small{number}", [number + 1] * 5, 11))
    near = request("near", PROMPT, capacity + over - len(PROMPT), arrival=1.0)
    if over > 0:
        with pytest.raises(RequestTooLarge, match=f"at most {capacity}"):
            engine.add(near)
    else:
        engine.add(near)
    engine.add(request("after", PROMPT[:3], 5, arrival=2.0))
    said = drain(engine, most_steps=600)
    assert len(said) == beside + (over <= 0) + 1
    assert all(one.last.finish_reason == "length" for one in said.values())


def test_E17_cancelling_the_one_that_fills_the_pool_lets_the_queue_go_on() -> None:
    limits = EngineLimits(max_model_len=4096, block_size=BLOCK, step_tokens=64, max_running=8)
    engine = fake_engine(limits, kv_capacity_tokens=64, reply_words=100)
    engine.add(request("near", PROMPT * 8, 64 - len(PROMPT) * 8))
    engine.step()
    engine.add(request("next", PROMPT * 4, 4, arrival=1.0))
    engine.step()
    assert [context.request.request_id for context in engine._scheduler.waiting] == ["next"]
    assert engine.cancel("near", 0, "the client went away")
    assert drain(engine, most_steps=20)["next"].last.finish_reason == "length"


def test_E35_an_engine_that_has_become_idle_checks_its_books() -> None:
    engine = fake_engine(EngineLimits(max_model_len=256, block_size=BLOCK), kv_capacity_tokens=256)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    loop = EngineLoop(engine, lambda outputs: [events.put(o) for o in outputs if o.final], events.put)
    loop.start()
    for name in "ab":
        loop.call(lambda engine, name=name: engine.add(request(name, PROMPT, 8))).result(5)  # type: ignore[misc]
        assert isinstance(events.get(timeout=5), Output)
    loop.call(lambda engine: engine.check()).result(5)
    books = engine._kv_cache.pool.books()
    assert (books.free, books.held, books.fenced) == (books.total, 0, 0)
    assert 0 < books.cached < books.total
    pool = engine._kv_cache.pool
    pool._refs[next(reversed(pool._free))] += 1  # as a lost release would leave it
    loop.call(lambda engine: engine.add(request("c", PROMPT, 8))).result(5)
    assert isinstance(events.get(timeout=5), Output)  # the answer first
    crash = events.get(timeout=5)
    assert isinstance(crash, EngineError) and "books" in crash.message


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    import torch

    path: Path = tiny_llama(tmp_path_factory.mktemp("tiny"))
    before = torch.get_num_threads()
    yield torch_engine(path, EngineLimits(128, BLOCK, step_tokens=64, max_running=8, kv_host_bytes=2**20))
    torch.set_num_threads(before)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("tokens", [len(PROMPT), 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 1])
def test_E44_taken_up_around_a_block_s_edge_and_with_nothing_said_yet(
    tiny: TorchEngine, tokens: int, cached: bool
) -> None:
    whole = run(tiny, request("whole", PROMPT, 16, temperature=0.7, seed=5, ignore_eos=True))["whole"]
    if not cached:
        tiny._kv_cache.pool.clear_cache()
    delivered = whole.tokens[: tokens - len(PROMPT)]
    rest = run(tiny, request("rest", PROMPT, 16, temperature=0.7, seed=5, ignore_eos=True, delivered=delivered))["rest"]
    assert delivered + rest.tokens == whole.tokens
    assert rest.last.usage is not None and whole.last.usage is not None
    assert rest.last.usage.completion_tokens == whole.last.usage.completion_tokens == 16


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_R41_after_sleep_and_wake_the_same_prompt_gets_the_same_answer_and_no_kv_that_is_gone(
    tiny: TorchEngine, host_blocks: int
) -> None:
    with_pool(tiny, 32, host_blocks)
    prompt = [*PROMPT, *range(30, 50)]
    before = run(tiny, request("before", prompt, 16, ignore_eos=True))["before"]
    tiny.sleep()
    tiny.wake()
    tiny._kv._flat.fill_(float("nan"))  # what waking allocates is anybody's
    after = run(tiny, request("after", prompt, 16, ignore_eos=True))["after"]
    assert after.tokens == before.tokens
    assert after.last.usage is not None
    assert after.last.usage.cached_tokens == (24 if host_blocks else 0)


def test_R43_waking_twice_is_waking_once_and_asleep_nothing_is_taken(tiny: TorchEngine) -> None:
    tiny.sleep()
    tiny.sleep()
    with pytest.raises(HostUnavailable, match="asleep"):
        tiny.add(request("early", PROMPT, 4))
    assert tiny.wake().copy_seconds > 0
    woken = tiny.stats()
    assert tiny.wake() == WakeReport(0.0, 0.0)
    assert tiny.stats() == woken
    assert run(tiny, request("now", PROMPT, 4, ignore_eos=True))["now"].last.finish_reason == "length"
