"""A deleted session's KV is gone from every tier, and nobody else's is."""

from __future__ import annotations

from dataclasses import replace

from engine.core import EngineCore
from engine.protocol import EngineLimits, GenerationRequest
from engine.sessions import MOST_SESSIONS, Sessions
from tests.engine_helpers import fake_engine, request, run

SIZE = 4
LIMITS = EngineLimits(max_model_len=256, block_size=SIZE, kv_host_bytes=2**20)
COMMON = list(range(1, 13))  # three blocks


def turn(name: str, prompt: list[int], session: str) -> GenerationRequest:
    return replace(request(name, prompt, 4), session=session)


def cached(engine: EngineCore, prompt: list[int]) -> int:
    usage = run(engine, request("probe", prompt, 1))["probe"].last.usage
    assert usage is not None
    return usage.cached_tokens


def two_sessions() -> EngineCore:
    engine = fake_engine(LIMITS, kv_capacity_tokens=512, kv_bytes=2**20)
    run(engine, turn("1", [*COMMON, *range(20, 29)], "acme/one"))
    run(engine, turn("2", [*COMMON, *range(30, 39)], "acme/two"))
    return engine


def test_what_only_the_deleted_session_used_is_forgotten() -> None:
    engine = two_sessions()
    assert engine.forget_session("acme/one") == 3
    assert cached(engine, [*COMMON, *range(20, 29)]) == 12  # the shared beginning is the other's too
    engine.check()


def test_in_host_memory_too_and_the_last_user_takes_what_was_shared() -> None:
    engine = two_sessions()
    engine.sleep()
    assert engine.stats().kv_host_blocks_used > 6
    engine.forget_session("acme/one")
    engine.forget_session("acme/two")
    engine.wake()
    assert engine.stats().kv_host_blocks_used == 0
    assert cached(engine, [*COMMON, *range(30, 39)]) == 0


def test_a_turn_that_runs_goes_on_and_what_it_leaves_is_dropped_at_its_end() -> None:
    engine = two_sessions()
    engine.add(turn("3", [*COMMON, *range(20, 29), *range(50, 60)], "acme/one"))
    engine.step()
    engine.forget_session("acme/one")
    while engine.has_work():
        engine.step()
    engine.check()
    assert cached(engine, [*COMMON, *range(20, 29)]) == 12  # what it left at its end is gone, without being asked again


def test_turns_that_broke_off_are_known_too() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=512, kv_bytes=2**20)
    engine.add(turn("1", COMMON, "acme/one"))
    engine.step()
    engine.cancel("1", 0, "the client went away")
    assert engine.forget_session("acme/one") == 3
    assert engine.stats().kv_blocks_cached == 0


def test_the_number_of_sessions_is_bounded() -> None:
    keys = Sessions()
    for number in range(MOST_SESSIONS + 10):
        keys.remember(turn("t", COMMON, f"s{number}"), [b"common", str(number).encode()], float(number))
    assert keys.whole(lambda _: True) == MOST_SESSIONS
    assert keys.forget("s0") == []
    assert keys.forget("s4000") == [b"4000"]
