"""Equal prompts, shared blocks, pins, prices, and a pool that changes its size: each rule by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.context import Context
from engine.kv_cache import KVCache
from engine.protocol import EngineLimits, GenerationRequest
from engine.scheduler import Scheduler
from engine.sessions import Sessions
from engine.tiers import Way
from policies.errors import HostUnavailable
from policies.pricing import BUCKETS, NOBODYS_CHANCE, SessionUse, bucket, chance, supply_curve, worth_seconds
from policies.types import Tier
from tests.engine_helpers import drain, fake_engine, request, run

SIZE = 4
LONG = list(range(10, 110))  # 25 whole blocks
LIMITS = EngineLimits(max_model_len=256, block_size=SIZE, step_tokens=64, max_running=8)


def in_group(name: str, prompt: list[int], max_tokens: int = 8, group: str | None = "g") -> GenerationRequest:
    return replace(request(name, prompt, max_tokens), group=group)


# -- equal prompts ---------------------------------------------------------------------------


def test_a_burst_of_equal_prompts_is_computed_once() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=1024)
    for name in "abcdef":
        engine.add(request(name, LONG, 2, ignore_eos=True))
    said = drain(engine)
    assert {one.tokens for one in said.values()} == {said["a"].tokens}
    cached = sorted(one.last.usage.cached_tokens for one in said.values() if one.last.usage is not None)
    assert (cached[0], cached[2:]) == (0, [96] * 4) and cached[1] >= 64  # the last 32 are not worth a step of waiting


def test_who_waits_for_another_s_prompt_lets_the_others_pass_and_goes_on_when_that_one_leaves() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=1024)
    for name in "ab":
        engine.add(request(name, LONG, 2, arrival=0.0))
    engine.add(request("c", [1, 2, 3], 2, arrival=1.0))
    engine.step()
    scheduler = engine._scheduler
    assert [context.request.request_id for context in scheduler.running] == ["a"]  # its budget is used up
    engine.cancel("a", 0, "the client went away")
    engine.step()
    assert {context.request.request_id for context in scheduler.running} == {"b", "c"}
    assert {one.last.finish_reason for one in drain(engine).values()} == {"length"}


def test_a_short_common_beginning_is_not_worth_a_step_of_waiting() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=1024)
    for name in "ab":
        engine.add(request(name, LONG[:20], 2))
    engine.step()
    assert len(engine._scheduler.running) == 2
    drain(engine)


# -- shared blocks -----------------------------------------------------------------------------


def test_generations_of_one_prompt_share_its_last_block_until_one_writes_to_it() -> None:
    scheduler = Scheduler(LIMITS, KVCache(SIZE, 64))
    prompt = LONG[:26]  # six blocks and two tokens
    one, two = (Context(in_group(name, prompt), b"root", 0.0) for name in "ab")
    scheduler.add(one)
    scheduler.kv.launched()
    plan = scheduler.schedule(0.0, 0.0)
    scheduler.computed(plan)
    one.token_ids.append(7)
    scheduler.add(two)
    plan = scheduler.schedule(0.0, 0.0)
    (copy,) = [move for move in plan.moves if move.way is Way.COPY]  # type: ignore[union-attr]
    assert (copy.block, copy.slot) == (one.block_table[6], two.block_table[6])  # type: ignore[union-attr]
    assert one.block_table[:6] == two.block_table[:6]
    (chunk,) = [chunk for chunk in plan.chunks if chunk.context is two]
    assert (chunk.start, chunk.count) == (25, 1)  # not the two tokens of its last block, one
    scheduler.kv.launched()
    scheduler.computed(plan)
    scheduler.check()


def test_other_tokens_or_another_group_share_no_last_block() -> None:
    for prompt, group in (([*LONG[:25], 3], "g"), (LONG[:26], "h"), (LONG[:26], None)):
        engine = fake_engine(LIMITS, kv_capacity_tokens=256)
        engine.add(in_group("a", LONG[:26]))
        engine.step()
        engine.add(in_group("b", prompt, group=group))
        engine.step()
        tables = [set(context.block_table) for context in engine._scheduler.running]
        assert len(tables[0] & tables[1]) == 6
        drain(engine)


# -- a pool that changes its size ----------------------------------------------------------------


def test_a_smaller_pool_keeps_who_runs_and_refuses_what_no_longer_fits() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=256, kv_bytes=64 * 10)
    engine.add(request("runs", LONG[:40], 20, ignore_eos=True))
    engine.step()
    assert engine.resize_kv(10) == 15 * 10  # what the one that runs may come to need
    assert engine.stats().kv_blocks_total == 15
    drain(engine)
    engine.resize_kv(80)
    books = engine._kv_cache.pool.books()
    assert (books.total, books.free, books.retired, books.made) == (8, 8, 56, 64)
    with pytest.raises(Exception, match="at most 32"):
        engine.add(request("large", LONG[:40], 4))
    assert engine.resize_kv(10**9) == 640  # up to what the load gave it
    run(engine, request("large", LONG[:40], 4))


def test_what_is_cached_in_blocks_that_go_moves_to_host_memory() -> None:
    engine = fake_engine(replace(LIMITS, kv_host_bytes=10 * 64), kv_capacity_tokens=256, kv_bytes=64 * 10)
    run(engine, request("a", LONG[:40], 1))
    engine.resize_kv(2 * 10)
    assert engine.stats().kv_host_blocks_used >= 8
    engine.resize_kv(64 * 10)
    said = run(engine, request("b", LONG[:40], 1))["b"]
    assert said.last.usage is not None and said.last.usage.cached_tokens == 36


def test_an_engine_that_sleeps_has_no_pool_to_resize() -> None:
    engine = fake_engine(LIMITS)
    engine.sleep()
    with pytest.raises(HostUnavailable, match="asleep"):
        engine.resize_kv(10)


# -- pins -------------------------------------------------------------------------------------------


def pinning(name: str, prompt: list[int], seconds: float = 60.0, blocks: int = 10) -> GenerationRequest:
    return replace(request(name, prompt, 1), session=f"acme/{name}", pin_seconds=seconds, pin_bytes=blocks * 2**20)


def test_pinned_kv_is_evicted_last_and_only_for_want_of_other_blocks() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=40 * SIZE, kv_bytes=40 * 2**20)
    run(engine, pinning("kept", LONG[:40]))
    for number in range(5):  # three pools full of other content
        run(engine, request(f"other{number}", [number + 1] * 90, 1))
    assert engine.stats().kv_blocks_pinned == 10
    said = run(engine, request("again", LONG[:40], 1))["again"]
    assert said.last.usage is not None and said.last.usage.cached_tokens == 36
    run(engine, request("all", [99] * (39 * SIZE), 1))  # a floor, not a lock
    assert engine.stats().kv_blocks_pinned < 10


def test_a_tenant_s_pins_have_a_budget_and_the_oldest_makes_room() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=200 * SIZE, kv_bytes=200 * 2**20)
    run(engine, pinning("first", LONG[:40]))
    run(engine, pinning("second", [7, *LONG[:23]]))
    assert engine.stats().kv_blocks_pinned == 6
    run(engine, pinning("third", [8, *LONG[:99]]))  # 25 blocks: its first ten are pinned
    assert engine.stats().kv_blocks_pinned == 10


def test_a_pin_ends_with_its_time_and_with_its_session() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=200 * SIZE, kv_bytes=200 * 2**20)
    run(engine, pinning("brief", LONG[:40], seconds=1e-6))
    run(engine, request("next", [1, 2, 3], 1))
    assert engine.stats().kv_blocks_pinned == 0
    run(engine, pinning("gone", LONG[:40]))
    assert engine.stats().kv_blocks_pinned == 10
    engine.forget_session("acme/gone")
    assert engine.stats().kv_blocks_pinned == 0


# -- prices -------------------------------------------------------------------------------------------


def use(tier: Tier = Tier.STANDARD, turns: int = 3, gap: float | None = 60.0, last: float = 0.0) -> SessionUse:
    return SessionUse(tier, turns, gap, last)


def test_a_session_is_wanted_sooner_the_livelier_it_is_and_less_the_longer_it_is_silent() -> None:
    assert chance(use(gap=10.0), 0.0) > chance(use(gap=1000.0), 0.0)
    assert chance(use(), 0.0) > chance(use(), 3600.0) > chance(use(), 86_400.0)
    assert chance(use(turns=9), 0.0) > chance(use(turns=1), 0.0)
    assert 0.0 < chance(use(gap=None, turns=1), 0.0) <= 0.5


def test_a_block_is_worth_the_sum_of_its_users_by_tier() -> None:
    alone = worth_seconds([use()], 0.0, 2.0)
    assert worth_seconds([use(), use()], 0.0, 2.0) == pytest.approx(2 * alone)
    assert worth_seconds([use(Tier.INTERACTIVE)], 0.0, 2.0) == pytest.approx(2 * alone)
    assert worth_seconds([], 0.0, 2.0) == pytest.approx(2.0 * NOBODYS_CHANCE)


def test_the_supply_curve_never_falls_and_ends_with_everything() -> None:
    priced = [(0.0, 5), (1e-9, 1), (3.0, 10), (3e9, 100)]
    curve = supply_curve(priced)
    assert len(curve) == BUCKETS and list(curve) == sorted(curve)
    assert (curve[0], curve[-1]) == (6, 116)
    assert [bucket(price) for price in (0.0, 1e-3, 1e4, 1e9)] == [0, 0, BUCKETS - 1, BUCKETS - 1]


def test_an_engine_reports_what_it_could_free_at_which_price() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=64 * SIZE, kv_bytes=64 * 2**20)
    run(engine, pinning("a", LONG[:40]), request("b", [7] * 20, 1))
    curve = engine.stats().kv_supply
    assert curve[0] == (64 - 15) * 2**20  # nobody's blocks without content cost nothing
    assert curve[-1] == 64 * 2**20


def test_what_is_worth_most_is_parked_in_host_memory_when_there_is_not_room_for_all() -> None:
    engine = fake_engine(replace(LIMITS, kv_host_bytes=10 * 2**20), kv_capacity_tokens=64 * SIZE, kv_bytes=64 * 2**20)
    lively = replace(request("s", LONG[:40], 1), session="acme/s", tier=Tier.INTERACTIVE)
    run(engine, lively)
    run(engine, request("later", [7] * 40, 1))
    engine.sleep()
    engine.wake()
    said = run(engine, replace(lively, request_id="t"))["t"]
    assert said.last.usage is not None and said.last.usage.cached_tokens == 36


def test_the_pace_of_a_session_is_the_running_mean_of_its_gaps() -> None:
    sessions = Sessions()
    turn = replace(request("t", [1], 1), session="acme/s")
    for at in (0.0, 10.0, 30.0):
        sessions.remember(turn, [b"key"], at)
    (seen,) = sessions.uses(b"key")
    assert (seen.turns, seen.last_used, seen.gap_seconds) == (3, 30.0, pytest.approx(13.0))
