"""The picture of an engine: who holds what, who waits for what, how long, and how the last ones ended."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import orjson
import pytest

from engine.context import EVENTS_KEPT
from engine.fake import FakeEngine
from engine.protocol import DiskStats, EngineLimits
from engine.snapshot import EARLIER, ENDED_KEPT, ContextSnapshot, EngineSnapshot, seconds_in_states, take_snapshot
from orchestrator.contexts import HostContexts, parse
from policies.errors import HostUnavailable
from policies.types import ContextState, Tier
from tests.engine_helpers import drain, fake_engine, request, run

LIMITS = EngineLimits(max_model_len=256)
BLOCK = LIMITS.block_size
MIB = 2**20


def of(snapshot: EngineSnapshot, name: str) -> ContextSnapshot:
    return next(context for context in snapshot.contexts if context.request_id == name)


def at(engine: FakeEngine, now: float) -> EngineSnapshot:
    """The engine's picture as of a moment of ours."""
    contexts = engine._contexts.values()
    return take_snapshot(
        engine._scheduler, contexts, (), block_bytes=1, disk=DiskStats(), supply=(), awake=True, now=now, wall=0.0
    )


def test_who_runs_is_shown_with_its_tokens_blocks_and_bytes() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=64 * BLOCK, kv_bytes=64 * MIB)
    engine.add(request("r", [1] * 40, 100, ignore_eos=True, tier=Tier.INTERACTIVE))
    for _ in range(3):
        engine.step()
    snapshot = engine.snapshot()
    one = of(snapshot, "r")
    assert (one.state, one.tenant, one.tier, one.session) == (ContextState.RUNNING, "acme", "interactive", None)
    assert (one.prompt_tokens, one.tokens, one.computed_tokens, one.generated_tokens) == (40, 43, 42, 3)
    assert one.max_token_limit == 140
    assert (one.blocks_held, one.memory_bytes) == (3, 3 * MIB)
    assert one.estimated_memory_bytes == 9 * MIB  # 140 tokens in blocks of 16
    assert [(edge.old, edge.new) for edge in one.edges] == [("waiting", "running")]
    assert one.wait is None
    assert snapshot.states == {"running": 1}
    assert (snapshot.pool.held, snapshot.pool.total, snapshot.unfreed_blocks) == (3, 64, 0)
    assert sum(use == (one.context_id,) for use in snapshot.blocks) == 3
    assert snapshot.blocks.count("free") == 61


def test_who_waits_for_a_place_is_shown_in_the_order_in_which_it_will_start() -> None:
    engine = fake_engine(EngineLimits(max_model_len=256, max_running=1))
    engine.add(request("first", [1] * 20, 5, ignore_eos=True))
    engine.step()
    now = time.time()
    engine.add(request("batch", [2] * 20, 5, tier=Tier.BATCH, arrival=now - 2))
    engine.add(request("later", [3] * 20, 5, tier=Tier.INTERACTIVE, arrival=now))
    engine.add(request("sooner", [4] * 20, 5, tier=Tier.INTERACTIVE, arrival=now - 1))
    snapshot = engine.snapshot()
    assert [context.request_id for context in snapshot.contexts] == ["first", "sooner", "later", "batch"]
    waits = [context.wait for context in snapshot.contexts[1:]]
    assert [wait and (wait.position, wait.reason) for wait in waits] == [
        (1, "batch_full"), (2, "behind"), (3, "behind")
    ]  # fmt: skip
    assert waits[0] is not None and waits[0].said == "a place: 1 of 1 run"
    started: list[str] = []
    while engine.has_work():
        engine.step()
        started += [c.request.request_id for c in engine._scheduler.running if c.request.request_id not in started]
    assert started == ["first", "sooner", "later", "batch"]


def test_who_waits_for_blocks_is_shown_with_how_many_and_how_many_are_promised() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=10 * BLOCK)
    engine.add(request("big", [1] * 2 * BLOCK, 6 * BLOCK, ignore_eos=True))
    engine.step()
    engine.add(request("next", [2] * 4 * BLOCK, BLOCK))
    engine.step()
    wait = of(engine.snapshot(), "next").wait
    assert wait is not None
    assert (wait.reason, wait.blocks_free) == ("blocks", 7)
    assert wait.blocks_wanted == 5  # its prompt, and 0.6 of its answer
    assert wait.blocks_promised == 3  # of the expected 6 the other has 3
    assert wait.said == "5 blocks: 7 free, 3 of them promised"


def test_who_was_just_added_waits_for_the_next_step_and_cached_blocks_are_not_wanted() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=64 * BLOCK)
    run(engine, request("before", [5] * 3 * BLOCK, 1))
    engine.add(request("r", [5] * 3 * BLOCK, BLOCK))
    wait = of(engine.snapshot(), "r").wait
    assert wait is not None and wait.reason == "next_step"
    assert wait.blocks_wanted == 2  # 3 + 0.6 of a block, less the two that are found
    engine.step()
    assert of(engine.snapshot(), "r").cached_tokens == 2 * BLOCK


@pytest.fixture
def preempting() -> Iterator[FakeEngine]:
    """Two who outgrow the pool together; the second has been preempted and waits."""
    engine = fake_engine(LIMITS, kv_capacity_tokens=8 * BLOCK, kv_bytes=8 * MIB)
    for name in ("a", "b"):
        engine.add(request(name, list(name.encode()) * 2 * BLOCK, 3 * BLOCK, ignore_eos=True))
    while not engine.stats().preemptions:
        assert engine.has_work()
        engine.step()
    yield engine
    drain(engine)


def test_who_was_preempted_holds_nothing_and_says_why(preempting: FakeEngine) -> None:
    snapshot = preempting.snapshot()
    hurt = of(snapshot, "b")
    assert (hurt.state, hurt.preemptions, hurt.blocks_held, hurt.memory_bytes) == (ContextState.WAITING, 1, 0, 0)
    assert [edge.new for edge in hurt.edges] == ["running", "preempted", "waiting"]
    assert "blocks missing" in hurt.edges[1].reason
    assert hurt.wait is not None and hurt.wait.position == 1
    while of(snapshot := preempting.snapshot(), "b").state is not ContextState.RUNNING:
        preempting.step()
    assert of(snapshot, "b").recomputed_tokens > 0
    assert set(of(snapshot, "b").seconds_in) == {"waiting", "running", "preempted"}


def test_the_seconds_in_each_state_add_up_to_the_age(preempting: FakeEngine) -> None:
    context = next(c for c in preempting._contexts.values() if c.key == ("b", 0))
    running, preempted, _ = context.events
    now = context.events[-1].at + 5.0
    one = of(at(preempting, now), "b")
    assert one.age_seconds == now - context.added
    assert sum(one.seconds_in.values()) == pytest.approx(one.age_seconds)
    assert one.seconds_in["running"] == pytest.approx(preempted.at - running.at)
    assert one.seconds_in["waiting"] == pytest.approx(running.at - context.added + 5.0)
    assert one.state_seconds == pytest.approx(5.0)


def test_more_edges_than_are_kept_still_add_up_to_the_age(preempting: FakeEngine) -> None:
    context = next(c for c in preempting._contexts.values() if c.key == ("b", 0))
    clock = context.events[-1].at
    for _ in range(EVENTS_KEPT):
        for new in (ContextState.RUNNING, ContextState.PREEMPTED, ContextState.WAITING):
            clock += 1.0
            context.move(new, clock, "test")
    found = seconds_in_states(context, clock + 1.0)
    assert sum(found.values()) == pytest.approx(clock + 1.0 - context.added)
    assert found[EARLIER] == pytest.approx(context.events[0].at - context.added)
    assert {state: round(found[state]) for state in ("running", "preempted")} == {"running": 10, "preempted": 11}
    assert len(of(at(preempting, clock), "b").edges) == EVENTS_KEPT


def test_a_shared_block_names_all_who_hold_it() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=64 * BLOCK)
    engine.add(request("a", [7] * 3 * BLOCK, 50, ignore_eos=True))
    engine.step()
    engine.add(request("b", [7] * 3 * BLOCK, 50, ignore_eos=True))
    engine.step()
    snapshot = engine.snapshot()
    a, b = of(snapshot, "a"), of(snapshot, "b")
    assert (a.blocks_shared, b.blocks_shared, b.cached_tokens) == (2, 2, 2 * BLOCK)
    shared = [use for use in snapshot.blocks if not isinstance(use, str) and len(use) > 1]
    assert [set(use) for use in shared] == [{a.context_id, b.context_id}] * 2
    assert a.blocks_held + b.blocks_held - 2 == snapshot.pool.held
    assert snapshot.unfreed_blocks == 0


def test_cached_and_fenced_blocks_are_told_from_free_ones() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=8 * BLOCK)
    run(engine, request("done", [1] * 2 * BLOCK, 1))
    engine.add(request("going", [2] * 3 * BLOCK, 5))
    engine._scheduler.schedule(0.0, 0.0)
    engine._scheduler.kv.launched()
    engine.cancel("going", 0, "test")
    snapshot = engine.snapshot()
    counts = {use: snapshot.blocks.count(use) for use in ("cached", "fenced", "free")}  # type: ignore[arg-type]
    assert counts == {"cached": 2, "fenced": 3, "free": 3}
    assert (snapshot.pool.cached, snapshot.pool.fenced, snapshot.pool.free) == (2, 3, 5)


def test_references_that_no_live_context_explains_are_counted() -> None:
    engine = fake_engine(LIMITS, kv_capacity_tokens=16 * BLOCK)
    engine.add(request("a", [1] * 2 * BLOCK, 5, ignore_eos=True))
    engine.step()
    assert engine.snapshot().unfreed_blocks == 0
    leaked = engine._kv_cache.pool.allocate(2)  # nobody's
    engine._kv_cache.pool.take(of_context(engine, "a")[:1])  # one reference too many on a block that is held
    snapshot = engine.snapshot()
    assert snapshot.unfreed_blocks == 3
    assert [snapshot.blocks[block] for block in leaked] == ["unexplained"] * 2
    drain_without_check(engine)
    assert (engine.snapshot().unfreed_blocks, engine.snapshot().contexts) == (3, ())


def of_context(engine: FakeEngine, name: str) -> list[int]:
    return next(c.block_table for c in engine._contexts.values() if c.request.request_id == name)


def drain_without_check(engine: FakeEngine) -> None:
    while engine.has_work():
        engine.step()


def ends(engine: FakeEngine, how: str) -> None:
    """Make one generation end this way."""
    prompt = list(b"tell me")
    whole = run(fake_engine(LIMITS), request("x", prompt, 200))["x"].text
    if how == "cancelled":
        engine.add(request("r", prompt, 50))
        engine.step()
        assert engine.cancel("r", 0, "the client went away")
    elif how == "expired":
        run(engine, request("r", prompt, 50, arrival=1.0, deadline=1.0))
    elif how == "stop string":
        run(engine, request("r", prompt, 200, stop=(whole[5:8],)))
    else:
        run(engine, request("r", prompt, 3 if how == "length" else 200))


@pytest.mark.parametrize(
    ("how", "tokens", "settings"),
    [
        ("eos", None, {}),
        ("stop string", 8, {}),
        ("length", 3, {}),
        ("cancelled", 1, {}),
        ("failed", 3, {"nan_at_token": 4}),
        ("expired", 0, {}),
    ],
)
def test_how_a_generation_ended_is_remembered(how: str, tokens: int | None, settings: dict[str, Any]) -> None:
    engine = fake_engine(LIMITS, **settings)
    ends(engine, how)
    (one,) = engine.snapshot().ended
    assert (one.how, one.request_id, one.tenant, one.prompt_tokens) == (how, "r", "acme", 7)
    assert tokens in (None, one.generated_tokens)
    assert one.reason and one.at > 0


def test_an_end_token_that_is_ignored_ends_by_length() -> None:
    engine = fake_engine(LIMITS, reply_words=0)  # its every token is the end token
    run(engine, request("r", [1], 4, ignore_eos=True))
    assert [one.how for one in engine.snapshot().ended] == ["length"]


def test_the_last_ones_only_are_remembered() -> None:
    engine = fake_engine(LIMITS)
    for number in range(ENDED_KEPT + 3):
        run(engine, request(f"r{number}", [1], 1))
    ended = engine.snapshot().ended
    assert len(ended) == ENDED_KEPT and (ended[0].request_id, ended[-1].request_id) == ("r3", f"r{ENDED_KEPT + 2}")


def test_a_sleeping_engine_has_a_picture_and_one_that_was_never_loaded_has_none() -> None:
    limits = EngineLimits(max_model_len=256, kv_host_bytes=32 * MIB)
    engine = fake_engine(limits, kv_capacity_tokens=64 * BLOCK, kv_bytes=64 * MIB)
    run(engine, request("r", [1] * 3 * BLOCK, 1))
    assert (engine.snapshot().awake, engine.snapshot().host.used) == (True, 0)
    engine.sleep()
    asleep = engine.snapshot()
    assert (asleep.awake, asleep.contexts, asleep.pool.cached) == (False, (), 0)
    assert (asleep.host.total, asleep.host.used) == (32, 3)
    with pytest.raises(HostUnavailable, match="not loaded"):
        FakeEngine(LIMITS).snapshot()


def test_a_picture_does_not_change_and_survives_both_borders(preempting: FakeEngine) -> None:
    snapshot = preempting.snapshot()
    before = asdict(snapshot)
    drain(preempting)
    assert asdict(snapshot) == before
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    host = HostContexts("m", "host:m:0", "ready", snapshot, None)
    gone = HostContexts("m", "host:m:1", "cold", None, "it holds nothing")
    assert parse(orjson.loads(orjson.dumps({"hosts": [host, gone]}))) == [host, gone]


def test_the_picture_needs_no_torch() -> None:
    code = "import sys, engine.snapshot, orchestrator.diagnosis; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def fastest_ms(work: Callable[[], object]) -> float:
    def once() -> float:
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1000

    return min(once() for _ in range(5))


def test_a_thousand_contexts_and_four_thousand_blocks_take_less_than_50_ms() -> None:
    limits = EngineLimits(max_model_len=4096, max_waiting=2000, max_running=64, step_tokens=512)
    engine = fake_engine(limits, kv_capacity_tokens=4096 * BLOCK)
    for number in range(1000):
        engine.add(request(f"r{number}", list(f"{number} story ".encode()) * 20, 300, ignore_eos=True))
    for _ in range(30):
        engine.step()
    snapshot = engine.snapshot()
    assert (len(snapshot.contexts), len(snapshot.blocks)) == (1000, 4096)
    assert fastest_ms(engine.snapshot) < 50
