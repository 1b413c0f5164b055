"""The scheduler and the books of KV against simulated memories: device, host and disk.

Every slot remembers for which tenant and which tokens it was written; writes land when the step ends, as on a device.
So a block given to two owners, a hit on unwritten or foreign KV, and a late write all show as wrong content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.context import NO_BLOCK, Context
from engine.disk_tier import Landing
from engine.kv_cache import KVCache
from engine.prefix import KVIdentity
from engine.protocol import EngineLimits
from engine.scheduler import Scheduler, StepPlan
from engine.tiers import Move, Spill, Way
from policies.errors import QueueFull, RequestTooLarge
from policies.types import ContextState, Tier
from tests.engine_helpers import request, scheduler_of

BREAKS = {
    "test_what_has_not_come": ("engine/kv_cache.py", "        if unfilled:", "        if False:"),
    "test_a_step_is_larger": ("engine/scheduler.py", "if decoding else self.limits.largest_step", ""),
}
S = ContextState
SIZE = 4
LIMITS = EngineLimits(max_model_len=64, block_size=SIZE, step_tokens=8, max_running=3, max_waiting=5)
MACHINE_LIMITS = replace(LIMITS, prompt_step_tokens=11)


def context_of(
    name: str,
    prompt: list[int],
    max_tokens: int = 4,
    *,
    tenant: str = "acme",
    tier: Tier = Tier.STANDARD,
    arrival: float = 0.0,
    deadline: float | None = None,
    group: str | None = None,
) -> Context:
    made = request(name, prompt, max_tokens, tenant=tenant, tier=tier, arrival=arrival, deadline=deadline)
    made = replace(made, group=group, session=f"{tenant}/{name}")
    return Context(made, KVIdentity(tenant, "weights", "float32", SIZE).namespace(), 0.0)


class Memory:
    """What each slot's KV was computed from. ``land`` is the end of a step."""

    def __init__(self, blocks: int, host_blocks: int = 0, disk: Disk | None = None, window: int = 10**9) -> None:
        self.slots: list[object] = [None] * (blocks * SIZE)
        self.host: list[object] = [None] * (host_blocks * SIZE)
        self.disk = disk
        self.window = window

    def move(self, moves: Sequence[Move | Spill]) -> None:
        for move in moves:
            if isinstance(move, Spill):
                assert self.disk is not None
                self.disk.put(move, (self.host if move.host else self.slots)[_of(move.place)])
            elif move.way is Way.OUT:
                self.host[_of(move.slot)] = self.slots[_of(move.block)]
            elif move.way is Way.IN:
                self.slots[_of(move.block)] = self.host[_of(move.slot)]
            else:
                self.slots[_of(move.slot)] = self.slots[_of(move.block)]

    def launch(self, plan: StepPlan) -> None:
        self._writes = [
            (c.context, list(c.context.block_table), c.start, tuple(c.context.token_ids[: c.start + c.count]))
            for c in plan.chunks
        ]

    def land(self) -> None:
        for context, table, start, tokens in self._writes:
            for position in range(start, len(tokens)):
                self.slots[self._slot(table, position)] = self._meaning(context, tokens[: position + 1])
        for context, table, start, tokens in self._writes:
            for position in range(max(0, start + 1 - self.window), len(tokens)):
                assert self.slots[self._slot(table, position)] == self._meaning(context, tokens[: position + 1])

    @staticmethod
    def _slot(table: list[int], position: int) -> int:
        assert table[position // SIZE] != NO_BLOCK
        return table[position // SIZE] * SIZE + position % SIZE

    @staticmethod
    def _meaning(context: Context, tokens: tuple[int, ...]) -> object:
        return context.request.tenant, tokens


def _of(block: int) -> slice:
    return slice(block * SIZE, (block + 1) * SIZE)


class Disk:
    """A disk whose reads land when the test says so, or never."""

    def __init__(self, eager: bool) -> None:
        self.eager = eager  # a read is over before anything else happens
        self.kept: dict[bytes, list[object]] = {}
        self.reads: list[tuple[bytes, int]] = []
        self.done: list[Landing] = []
        self.hangs = False
        self.slots: list[object] = []

    def put(self, spill: Spill, content: list[object]) -> None:
        self.kept[spill.key] = content

    def land(self, count: int, fails: bool) -> None:
        for _ in range(min(count, len(self.reads))):
            key, block = self.reads.pop(0)
            content = None if fails else self.kept.get(key)
            if content is None:
                self.kept.pop(key, None)
            else:
                self.slots[_of(block)] = content
            self.done.append(Landing(key, content is not None))

    def has(self, key: bytes) -> bool:
        return key in self.kept

    def fetch(self, key: bytes, token_ids: tuple[int, ...], block: int) -> None:
        self.reads.append((key, block))
        if self.eager:
            self.land(1, fails=False)

    def landed(self) -> list[Landing]:
        done, self.done = self.done, []
        return done

    def stuck(self) -> bool:
        return self.hangs and bool(self.reads)

    def give_up(self) -> None:
        self.reads, self.done = [], []

    def discard(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.kept.pop(key, None)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = 7
        self.flying: StepPlan | None = None
        self.flying_blocks: set[int] = set()
        self.poisoned: list[tuple[Context, list[bytes]]] = []
        self.live: list[Context] = []
        self.clock = 0.0
        self.added = 0

    @initialize(
        host_blocks=st.sampled_from([0, 1, 2, 5, 20]),
        disk=st.sampled_from([None, "lazy", "eager"]),
        window=st.sampled_from([None, None, 5, 8, 11]),
    )
    def start(self, host_blocks: int, disk: str | None, window: int | None) -> None:
        self.disk = Disk(disk == "eager") if disk else None
        kv = KVCache(SIZE, self.blocks, host_blocks, window=window, disk=self.disk)
        self.kv, self.pool = kv, kv.pool
        self.scheduler = Scheduler(MACHINE_LIMITS, kv)
        self.memory = Memory(self.blocks, host_blocks, self.disk, window or 10**9)
        if self.disk is not None:
            self.disk.slots = self.memory.slots

    @rule(
        tenant=st.sampled_from(["a", "b"]),
        prompt=st.one_of(
            st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=22),
            st.sampled_from([[0] * 13, [0] * 9, [0, 0, 1] * 6, [0, 0, 1] * 3 + [2] * 5]),
        ),
        max_tokens=st.integers(1, 12),
        tier=st.sampled_from(Tier),
        patience=st.sampled_from([None, None, 3.0]),
        group=st.sampled_from([None, "g"]),
    )
    def add(
        self, tenant: str, prompt: list[int], max_tokens: int, tier: Tier, patience: float | None, group: str | None
    ) -> None:
        self.added += 1
        deadline = None if patience is None else self.clock + patience
        context = context_of(
            str(self.added), prompt, max_tokens, tenant=tenant, tier=tier, arrival=self.clock, deadline=deadline,
            group=group and tenant + group,
        )  # fmt: skip
        waiting = len(self.scheduler.waiting)
        try:
            self.scheduler.add(context)
        except RequestTooLarge:
            assert len(prompt) + max_tokens > min(64, len(self.pool) * SIZE)
        except QueueFull:
            assert waiting >= LIMITS.max_waiting
        else:
            assert len(prompt) + max_tokens <= len(self.pool) * SIZE
            self.live.append(context)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from(self.live))
        self.end(context, S.CANCELLED)

    @precondition(lambda self: self.flying is None)
    @rule(seconds=st.sampled_from([0.0, 1.0, 70.0]), fails=st.integers(0, 9))
    def launch(self, seconds: float, fails: int = 9) -> None:
        self.clock += seconds
        self.pool.pins_changed(self.kv.sessions.pins_changed(self.clock))
        free = self.pool.num_free
        decoding = [c for c in self.scheduler.running if c.num_tokens - c.num_computed == 1]
        plan = self.scheduler.schedule(self.clock, self.clock)
        failed = fails == 0 and len(plan.moves) > 0
        if failed:
            self.memory.move(plan.moves[: len(plan.moves) // 2])
            plan = self.scheduler.moves_failed(plan, self.clock, "no memory")
        else:
            self.memory.move(plan.moves)
        self.scheduler.kv.launched()
        self.memory.launch(plan)
        for context in plan.expired:
            assert context.state is S.EXPIRED and context.first_token is None
            assert context.request.deadline is not None and context.request.deadline < self.clock
            self.live.remove(context)
        self.flying = plan
        self.flying_blocks = {b for c in plan.chunks for b in c.context.block_table} - {NO_BLOCK}
        waited_for = any(chunk.context in decoding for chunk in plan.chunks)
        most = LIMITS.step_tokens if waited_for else MACHINE_LIMITS.prompt_step_tokens
        assert sum(chunk.count for chunk in plan.chunks) <= most
        assert len({chunk.context.context_id for chunk in plan.chunks}) == len(plan.chunks) <= LIMITS.max_running
        for chunk in plan.chunks:
            assert chunk.context.state is S.RUNNING
            assert chunk.count > 0 and chunk.start == chunk.context.num_computed
        waits = failed or self.kv.arriving
        assert plan.chunks or waits or not self.live, f"nothing to do, {len(self.live)} live, {free} blocks free"

    @precondition(lambda self: self.disk is not None)
    @rule(count=st.integers(1, 4), fails=st.sampled_from([False, False, True]))
    def disk_lands(self, count: int, fails: bool) -> None:
        assert self.disk is not None
        self.disk.land(count, fails)

    @precondition(lambda self: self.flying is None)
    @rule(kind=st.sampled_from(["resize", "resize", "others", "sleep", "hang"]), number=st.integers(1, 7))
    def disturb(self, kind: str, number: int) -> None:
        """One rule for what is rare, so that it stays rare."""
        if kind == "resize":
            self.resize(number)
        elif kind == "others":
            self.others_take_every_free_block()
        elif kind == "sleep" and number == 1:
            self.sleep_and_wake()
        elif kind == "hang" and self.disk is not None:
            self.disk.hangs = number == 1

    def resize(self, blocks: int) -> None:
        now = self.scheduler.resize(blocks)
        self.memory.move(self.kv.planned_moves())
        assert blocks <= now <= self.blocks or now == 2
        for block in range(self.pool.end, self.blocks):  # its memory is given back
            self.memory.slots[_of(block)] = [None] * SIZE

    def others_take_every_free_block(self) -> None:
        blocks = self.pool.allocate(self.pool.num_free)
        self.memory.move(self.scheduler.kv.planned_moves())
        for block in blocks:
            self.memory.slots[block * SIZE : (block + 1) * SIZE] = [None] * SIZE
        self.pool.release(blocks, 0)
        self.pool.complete(0)

    def sleep_and_wake(self) -> None:
        for context in list(self.live):
            self.end(context, S.CANCELLED)
        self.kv.abandon()
        self.memory.move(self.kv.park())
        self.pool.clear_cache()
        self.memory.slots[:] = [None] * len(self.memory.slots)

    @precondition(lambda self: self.flying is None and self.live)
    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.live:
                self.launch(0.0)
                self.finish_step()

    @precondition(lambda self: self.flying is not None)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        plan, self.flying = self.flying, None
        assert plan is not None
        self.memory.land()
        samples = [c.context for c in plan.chunks if c.samples and not c.context.terminal]
        for context in [c for c in samples if data.draw(st.integers(0, 15)) == 0]:
            keys = list(context.block_keys)
            own = set(context.block_table) - {NO_BLOCK}
            self.end(context, S.FAILED)
            assert not own & set(self.pool.match(keys, context.token_ids, SIZE))
        self.scheduler.computed(plan)
        self.flying_blocks = set()
        for context in samples:
            if not context.terminal:
                self.append(context, data.draw(st.sampled_from([0, 0, 1])), data.draw(st.integers(0, 9)) == 0)

    def append(self, context: Context, token: int, stop: bool) -> None:
        context.token_ids.append(token)
        context.first_token = context.first_token or self.clock
        if stop or not context.remaining_tokens:
            self.end(context, S.FINISHED)

    def end(self, context: Context, state: ContextState) -> None:
        self.scheduler.end(context, state, self.clock, "test")
        self.live.remove(context)
        if state is S.FINISHED:
            session = context.request.session
            assert session is not None
            self.kv.sessions.remember(context.request, context.block_keys, self.clock)
            self.kv.sessions.pin(session, self.clock + 60, 3)
            self.pool.pins_changed(self.kv.sessions.pins_changed(self.clock))
        assert context.terminal and context.block_table == []

    @invariant()
    def the_books_balance(self) -> None:
        self.scheduler.check()
        held = {b for c in self.live for b in c.block_table} | self.kv.arriving_blocks
        assert self.pool.books().held == len(held - {NO_BLOCK})
        assert {c.context_id for c in self.scheduler.contexts()} == {c.context_id for c in self.live}
        for context in self.scheduler.waiting:
            assert context.state in (S.WAITING, S.SWAPPED)
            assert context.block_table == [] and context.num_computed == 0
        host = self.scheduler.kv.host
        assert len(host) + len(host._free) == host.books().total and not (host._held and self.flying is None)

    @invariant()
    def a_block_of_the_step_in_flight_is_not_free(self) -> None:
        assert not self.flying_blocks & {*self.pool._free, *self.pool._soft}

    @invariant()
    def pinned_content_is_given_out_last(self) -> None:
        assert all(self.kv.sessions.pinned(self.pool._keys[block] or b"") for block in self.pool._soft)
        assert not any(self.kv.sessions.pinned(self.pool._keys[block] or b"") for block in self.pool._free)

    def teardown(self) -> None:
        """Nobody waits forever: what is left ends within the steps its tokens can take."""
        if self.flying is not None:
            self.finish_step()
        budget = sum(c.max_token_limit for c in self.live) * (1 + len(self.live))
        while self.live and budget:
            budget -= 1
            if self.disk is not None:
                self.disk.land(99, fails=False)
            self.launch(0.0)
            self.finish_step()
        assert not self.live, f"{len(self.live)} contexts never finished"
        self.kv.abandon()
        books = self.pool.books()
        assert books.free == books.total

    def finish_step(self) -> None:
        plan, self.flying = self.flying, None
        assert plan is not None
        self.memory.land()
        self.scheduler.computed(plan)
        self.flying_blocks = set()
        for chunk in plan.chunks:
            if chunk.start + chunk.count == chunk.context.num_tokens and not chunk.context.terminal:
                self.append(chunk.context, 0, False)


SchedulerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=80, deadline=None)
TestScheduler = SchedulerMachine.TestCase


# -- single rules ------------------------------------------------------------------------


def step(scheduler: Scheduler, token: int = 7, now: float = 0.0) -> StepPlan:
    """One whole step in which every sampled token is ``token``."""
    plan = scheduler.schedule(now, now)
    samples = [c.context for c in plan.chunks if c.samples]
    scheduler.kv.launched()
    scheduler.computed(plan)
    for context in samples:
        context.token_ids.append(token)
        context.first_token = now
        if not context.remaining_tokens:
            scheduler.end(context, S.FINISHED, now, "length")
    scheduler.check()
    return plan


def steps_until(scheduler: Scheduler, reached: Callable[[], bool], now: float = 0.0) -> None:
    for _ in range(100):
        if reached():
            return
        step(scheduler, now=now)
    raise AssertionError("not reached in 100 steps")


def test_a_prompt_longer_than_a_step_is_computed_in_chunks_beside_decoding() -> None:
    scheduler = scheduler_of(LIMITS, 20)
    short, long = context_of("s", [1, 2], 8), context_of("l", list(range(20)), 2, arrival=1.0)
    scheduler.add(short)
    step(scheduler)
    scheduler.add(long)
    plans = [step(scheduler) for _ in range(3)]
    assert [[(c.context, c.start, c.count) for c in p.chunks] for p in plans] == [
        [(short, 2, 1), (long, 0, 7)],
        [(short, 3, 1), (long, 7, 7)],
        [(short, 4, 1), (long, 14, 6)],
    ]


def test_a_step_is_larger_while_nobody_decodes() -> None:
    scheduler = scheduler_of(replace(LIMITS, prompt_step_tokens=12), 20)
    first, second = context_of("f", list(range(20)), 8), context_of("s", list(range(20, 40)), 2, arrival=1.0)
    scheduler.add(first)
    scheduler.add(second)
    plans = [step(scheduler) for _ in range(4)]
    assert [[(c.context, c.start, c.count) for c in p.chunks] for p in plans] == [
        [(first, 0, 12)],
        [(first, 12, 8), (second, 0, 4)],
        [(first, 20, 1), (second, 4, 7)],
        [(first, 21, 1), (second, 11, 7)],
    ]


def test_the_last_in_order_is_preempted_and_resumes_from_its_cached_blocks() -> None:
    scheduler = scheduler_of(LIMITS, 7)
    first, second = context_of("1", [1] * 6, 12), context_of("2", [2] * 6, 8, arrival=1.0)
    scheduler.add(first)
    scheduler.add(second)
    steps_until(scheduler, lambda: scheduler.preemptions > 0)
    assert (first.state, second.state) == (S.RUNNING, S.WAITING)
    assert [edge.new for edge in second.events][-2:] == [S.PREEMPTED, S.WAITING]
    steps_until(scheduler, lambda: second.terminal)
    assert first.terminal and second.num_tokens == 14
    assert second.cached_tokens == 0  # what it found again after the preemption is not a cached prompt
    assert second.recomputed_tokens > 0


def test_the_deadline_bounds_the_wait_for_the_first_token_only() -> None:
    scheduler = scheduler_of(LIMITS, 7)
    first = context_of("1", [1] * 6, 12)
    second = context_of("2", [2] * 6, 8, arrival=1.0, deadline=10.0)
    late = context_of("3", [3] * 6, 8, arrival=2.0, deadline=10.0)
    for context in (first, second, late):
        scheduler.add(context)
    steps_until(scheduler, lambda: second.preemptions > 0)
    plan = step(scheduler, now=11.0)
    assert plan.expired == (late,) and late.state is S.EXPIRED
    assert second.state is S.WAITING
    steps_until(scheduler, lambda: second.terminal, now=11.0)
    assert second.state is S.FINISHED


def test_a_failed_context_leaves_nothing_in_the_cache_not_even_shared_blocks() -> None:
    scheduler = scheduler_of(LIMITS, 12)
    one = context_of("1", [1] * 8, 8)
    scheduler.add(one)
    step(scheduler)
    two = context_of("2", [1] * 11, 8, arrival=1.0)
    scheduler.add(two)
    step(scheduler)
    assert two.block_table[:2] == one.block_table[:2]
    scheduler.end(two, S.FAILED, 0.0, "NaN")
    scheduler.check()
    assert scheduler.kv.pool.match(one.block_keys, one.token_ids, SIZE) == []
    steps_until(scheduler, lambda: one.terminal)
    three = context_of("3", [1] * 11, 2, arrival=2.0)
    scheduler.add(three)
    step(scheduler)
    assert three.cached_tokens == 0


def test_order_is_tier_then_arrival_and_waiting_lifts_the_tier() -> None:
    limits = EngineLimits(max_model_len=64, block_size=SIZE, max_running=1)
    scheduler = scheduler_of(limits, 20)
    batch = context_of("b", [1], 1, tier=Tier.BATCH, arrival=0.0)
    person = context_of("p", [2], 1, tier=Tier.INTERACTIVE, arrival=100.0)
    scheduler.add(batch)
    scheduler.add(person)
    assert step(scheduler, now=100.0).chunks[0].context is person  # one minute: batch is standard now
    scheduler.add(context_of("q", [2], 1, tier=Tier.INTERACTIVE, arrival=120.0))
    assert step(scheduler, now=125.0).chunks[0].context is batch  # two minutes: it comes before later persons


def test_a_large_request_at_the_head_is_not_passed_for_ever() -> None:  # E20
    scheduler = scheduler_of(LIMITS, 7)
    scheduler.add(context_of("0", [1] * 8, 8, arrival=0.0))
    large = context_of("large", [2] * 20, 4, arrival=1.0)
    step(scheduler)
    scheduler.add(large)
    passed = 0
    for number in range(40):
        if len(scheduler.waiting) < LIMITS.max_waiting:
            scheduler.add(context_of(f"s{number}", [3], 2, arrival=2.0 + number))
        plan = step(scheduler)
        if large.state is not S.WAITING:
            break
        passed += sum(c.context.request.request_id.startswith("s") for c in plan.chunks)
    assert large.state is S.RUNNING and passed == 0


@pytest.mark.parametrize("tokens", [27, 28, 29])
def test_E17_what_just_fits_runs_and_what_does_not_is_refused_at_the_door(tokens: int) -> None:
    scheduler = scheduler_of(LIMITS, 7)  # 28 tokens
    other = context_of("o", [5] * 4, 8)
    scheduler.add(other)
    step(scheduler)
    near = context_of("n", [1] * (tokens - 3), 3, arrival=1.0)
    if tokens > 28:
        with pytest.raises(RequestTooLarge, match="29 tokens; at most 28"):
            scheduler.add(near)
        return
    scheduler.add(near)
    for _ in range(40):
        step(scheduler)
    assert near.state is S.FINISHED and other.state is S.FINISHED


def test_a_read_from_disk_begins_only_when_its_block_was_copied_away() -> None:
    disk = Disk(eager=False)
    kv = KVCache(SIZE, 4, 8, disk=disk)
    scheduler = Scheduler(LIMITS, kv)
    old = context_of("old", [1] * 13, 1)
    scheduler.add(old)
    steps_until(scheduler, lambda: old.terminal)  # its blocks are cached, and will be given out
    new = context_of("new", [2] * 9, 1)
    kv.extend_keys(new)
    disk.kept = {key: [None] * SIZE for key in new.block_keys}
    scheduler.add(new)
    plan = scheduler.schedule(0.0, 0.0)
    assert [move.way for move in plan.moves if isinstance(move, Move)] and new.state is S.SWAPPING_IN
    assert disk.reads == []
    kv.launched()
    assert [key for key, _ in disk.reads] == new.block_keys


@pytest.mark.parametrize("window", [None, 6])
def test_what_has_not_come_from_disk_is_not_read_for_a_checkpoint(window: int | None) -> None:
    """A checkpoint of such a generation had what its blocks held before, under the keys of what was to come."""
    disk = Disk(eager=False)
    disk.slots = [None] * (8 * SIZE)
    kv = KVCache(SIZE, 8, 0, window=window, disk=disk)
    scheduler = Scheduler(LIMITS, kv)
    new = context_of("new", [2] * 13, 1)
    kv.extend_keys(new)
    disk.kept = {key: [key] * SIZE for key in new.block_keys}
    scheduler.add(new)
    scheduler.schedule(0.0, 0.0)
    kv.launched()
    first, reads = kv.unseen(12), len(disk.reads)
    assert new.state is S.SWAPPING_IN and reads == 3 - first
    assert kv.readable(new) == (first, [], [])
    disk.land(1, fails=False)
    kv.arrived()
    assert kv.readable(new) == (first, [new.block_table[first]], [])
    disk.land(1, fails=True)
    kv.arrived()
    assert kv.readable(new) == (first, [new.block_table[first]], []) if reads > 2 else new.block_table == []
