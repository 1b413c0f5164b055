"""KV that leaves the device: what host memory keeps, what comes back, and what happens when copying fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.context import Context
from engine.core import EngineCore
from engine.prefix import KVIdentity
from engine.protocol import EngineLimits
from engine.scheduler import Scheduler, StepPlan
from engine.tiers import HostTier, Move, Way
from policies.preemption import KVCosts, choose_victim, keep
from policies.types import ContextState
from tests.engine_helpers import drain, fake_engine, request, run, scheduler_of, with_pool

SIZE = 4
LIMITS = EngineLimits(max_model_len=64, block_size=SIZE, step_tokens=64, max_running=4)
PROMPT = list(range(1, 14))  # three whole blocks and a token


def context_of(name: str, prompt: Sequence[int], max_tokens: int = 4) -> Context:
    return Context(request(name, prompt, max_tokens), KVIdentity("acme", "weights", "float32", SIZE).namespace(), 0.0)


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0, 0.0)
    scheduler.kv.launched()
    scheduler.computed(plan)
    for chunk in plan.chunks:
        if chunk.start + chunk.count == chunk.context.num_tokens:
            chunk.context.token_ids.append(7)
            if not chunk.context.remaining_tokens:
                scheduler.end(chunk.context, ContextState.FINISHED, 0.0, "length")
    scheduler.check()
    return plan


def run_to_end(scheduler: Scheduler, context: Context) -> list[StepPlan]:
    scheduler.add(context)
    plans = []
    while not context.terminal:
        plans.append(step(scheduler))
    return plans


# -- the books of host memory -----------------------------------------------------------------


def test_the_least_recently_used_content_is_dropped_and_other_tokens_under_a_key_are_not_a_hit() -> None:
    tier = HostTier(2)
    slots = [tier.put(key, (n,)) for n, key in enumerate((b"a", b"b"))]
    assert sorted(slot for slot in slots if slot is not None) == [0, 1]
    assert tier.put(b"a", (0,)) is None  # there already: nothing to copy, but used again
    assert tier.put(b"c", (2,)) == slots[1]
    assert not tier.holds(b"b")
    assert tier.find(b"a", [0]) == slots[0]
    assert tier.find(b"a", [1]) is None


def test_a_slot_that_is_about_to_be_read_is_not_given_out() -> None:
    tier = HostTier(2)
    tier.put(b"a", (0,))
    tier.put(b"b", (1,))
    first, second = tier.take(b"a"), tier.take(b"b")
    assert tier.put(b"c", (2,)) is None
    tier.settle()
    assert tier.put(b"c", (2,)) == first != second


# -- what the scheduler does with them ----------------------------------------------------------


def test_what_the_cache_evicts_is_copied_out_and_found_again() -> None:
    scheduler = scheduler_of(LIMITS, 5, host_blocks=8)
    run_to_end(scheduler, context_of("first", PROMPT))
    plans = run_to_end(scheduler, context_of("other", range(30, 45)))
    out = [move for plan in plans for move in plan.moves]
    assert out and all(move.way is Way.OUT for move in out)
    again = context_of("again", PROMPT)
    plan = run_to_end(scheduler, again)[0]
    assert again.cached_tokens == 12
    assert {move.slot for move in plan.moves if move.way is Way.IN} <= {move.slot for move in out}
    assert [str(edge.new) for edge in again.events][:3] == ["swapped", "swapping_in", "running"]
    assert scheduler.kv.host.books().moved_in > 0


def test_without_room_in_host_memory_everything_is_computed_again() -> None:
    scheduler = scheduler_of(LIMITS, 5)
    run_to_end(scheduler, context_of("first", PROMPT))
    plans = run_to_end(scheduler, context_of("other", range(30, 45)))
    again = context_of("again", PROMPT)
    plans += run_to_end(scheduler, again)
    assert not any(plan.moves for plan in plans)
    assert again.cached_tokens == 0


def test_a_copy_that_fails_costs_time_and_the_state_says_why() -> None:
    scheduler = scheduler_of(LIMITS, 5, host_blocks=8)
    run_to_end(scheduler, context_of("first", PROMPT))
    run_to_end(scheduler, context_of("other", range(30, 45)))
    again = context_of("again", PROMPT)
    scheduler.add(again)
    plan = scheduler.moves_failed(scheduler.schedule(0.0, 0.0), 0.0, "no memory")
    assert plan.chunks == () and plan.moves == ()
    assert again.state is ContextState.WAITING and "no memory" in again.events[-2].reason
    assert len(scheduler.kv.host) == 0
    assert not any(scheduler.kv.pool.holds(key) for key in again.block_keys[1:])
    run_to_end_added(scheduler, again)
    assert again.recomputed_tokens == 12 and again.state is ContextState.FINISHED


def run_to_end_added(scheduler: Scheduler, context: Context) -> None:
    for _ in range(20):
        if not context.terminal:
            step(scheduler)


def test_E29_a_host_memory_too_small_for_the_swap_falls_back_to_computing_again() -> None:
    limits = EngineLimits(max_model_len=64, block_size=SIZE, step_tokens=64, max_running=4)
    engine = fake_engine(limits, kv_capacity_tokens=64, reply_words=30)
    with_pool(engine, 14, 1)
    expected = {name: run(fake_engine(limits, reply_words=30), request(name, prompt, 20))[name].text for name, prompt in
                (("a", PROMPT), ("b", list(range(20, 33))), ("c", list(range(40, 53))))}  # fmt: skip
    for name, prompt in (("a", PROMPT), ("b", list(range(20, 33))), ("c", list(range(40, 53)))):
        engine.add(request(name, prompt, 20))
    said = drain(engine)
    assert {name: one.text for name, one in said.items()} == expected
    assert engine.stats().preemptions > 0
    assert engine.stats().kv_host_blocks_used <= 1


def test_E31_a_generation_whose_blocks_are_all_shared_is_not_preempted_for_nothing() -> None:
    assert choose_victim([3, 2, 0]) == 1
    assert choose_victim([0, 0]) is None
    scheduler = scheduler_of(LIMITS, 20)
    first, second = (context_of(name, PROMPT[:9], 8) for name in "ab")
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    step(scheduler)
    assert scheduler._victim(first, 0.0) is second
    scheduler.kv.release(second)  # all that is left of it is what it shares
    scheduler.kv.pool.take(first.block_table[:2])
    second.block_table = first.block_table[:2]
    assert scheduler._victim(first, 0.0) is first


# -- through an engine ---------------------------------------------------------------------------


def test_sleeping_parks_the_most_recent_kv_and_waking_finds_it() -> None:
    moved: list[Move] = []
    engine = fake_engine(EngineLimits(256, SIZE, kv_host_bytes=2**20), kv_capacity_tokens=256, kv_bytes=2**20)
    engine._carrier._move = moved.extend
    run(engine, request("old", list(range(50, 63))), request("new", PROMPT))
    engine.sleep()
    assert engine.stats().kv_blocks_cached == 0
    assert engine.stats().kv_host_blocks_used == len(moved) > 3
    engine.wake()
    usage = run(engine, request("again", PROMPT))["again"].last.usage
    assert usage is not None and usage.cached_tokens == 12
    assert sum(move.way is Way.IN for move in moved) == 3


@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError(), OSError("disk")])
def test_copies_that_fail_change_no_answer(error: Exception) -> None:
    limits = EngineLimits(256, SIZE, kv_host_bytes=2**20)
    engine = fake_engine(limits, kv_capacity_tokens=64, kv_bytes=2**20)
    expected = run(engine, request("a", PROMPT, 30))["a"].text

    def fails(moves: Sequence[Move]) -> None:
        if moves:
            raise error

    engine._carrier._move = fails
    for number in range(4):
        said = run(engine, request("a", PROMPT, 30), request("b", list(range(60 + number, 90)), 30))
        assert said["a"].text == expected
    engine.sleep()
    engine.wake()
    assert run(engine, request("a", PROMPT, 30))["a"].text == expected
    assert engine.stats().kv_moves_failed > 0


def test_kv_of_a_failed_generation_is_kept_nowhere() -> None:
    engine: EngineCore = fake_engine(
        EngineLimits(256, SIZE, kv_host_bytes=2**20), kv_capacity_tokens=64, kv_bytes=2**20
    )
    run(engine, request("a", PROMPT, 3))
    engine.sleep()
    engine.wake()
    assert len(engine._kv_cache.host) > 0
    engine.settings = engine.settings.__class__(nan_at_token=2)  # type: ignore[attr-defined]
    assert run(engine, request("b", PROMPT, 3))["b"].last.error is not None
    engine.settings = engine.settings.__class__()  # type: ignore[attr-defined]
    usage = run(engine, request("c", PROMPT, 3))["c"].last.usage
    assert usage is not None and usage.cached_tokens == 0


def test_blocks_that_are_cheaper_to_compute_again_are_not_kept() -> None:
    assert keep(KVCosts(0.001, 0.001), 16)
    assert not keep(KVCosts(0.01, 0.001), 16)
    assert keep(KVCosts(), 16)
