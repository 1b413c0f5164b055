"""Random demand, outcomes, deaths, silence and time against the pool; the truth is kept beside it, not asked of it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model_pool import prepared
from model_pool.effects import HostRef
from model_pool.states import MODEL_EDGES
from policies.errors import LoadFailed, ModelLoading, OutOfMemory
from policies.types import ModelState, Tier
from tests.unit.fake_effects import FAR, PREPARED_BYTES, Call, World

S = ModelState
SIZES = {"a": 40, "b": 60, "c": 80, "d": 96, "pin": 30, "small": 12}
PROCESS_BYTES = 3
MAY_FAIL = ("start", "load", "sleep", "deep_sleep", "wake")
REPLICAS = {"small": 3, "a": 2}
HOSTS = st.sampled_from([(model, number) for model in sorted(SIZES) for number in range(REPLICAS.get(model, 1))])
BUDGETS = {"d0": 100, "d1": 64}
MODELS = st.sampled_from(sorted(SIZES))
INDEX = st.integers(0, 50)


@dataclass(slots=True)
class Asked:
    """What a client knows of its request."""

    deadline: float
    owed: bool = True  # an answer is due
    may_be_answered: bool = False  # its host died with it: the pool may answer again
    gone: bool = False  # abandoned or redeemed


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            SIZES, BUDGETS, residual=5, pinned=("pin",), max_waiting=6, replicas=REPLICAS,
            min_resident_seconds=5.0, cooldown_seconds=4.0, preload=("a", "d"), keep_alive={"b": 8.0, "small": 0.0},
            min_resident={"c": 9.0}, reclaim_after_seconds=20.0,
            background=True, process=PROCESS_BYTES, prepared_hosts=1,
        )  # fmt: skip
        self.pool, self.effects = self.world.pool, self.world.effects
        self.asked: dict[str, Asked] = {}
        self.answered: dict[str, int] = {}
        self.states: dict[str, ModelState] = {}  # by host
        self.seen_events = self.seen_calls = 0
        self.physical: dict[str, tuple[str, int]] = {}  # host → device, bytes its process really holds
        self.home: dict[HostRef, str] = {}
        self.drifted = False

    # --- clients

    @rule(model=MODELS, tier=st.sampled_from(Tier), patience=st.sampled_from([1.0, 20.0, 150.0, FAR]))
    def demand(self, model: str, tier: Tier, patience: float) -> None:
        ticket_id = f"t{len(self.asked)}"
        self.asked[ticket_id] = Asked(self.world.now + patience)
        self.world.demand(ticket_id, model, tier, self.world.now + patience)

    @precondition(lambda self: self.asked)
    @rule(index=INDEX, model=MODELS)
    def ask_again(self, index: int, model: str) -> None:
        ticket_id = self._ticket(index)
        asked = self.asked[ticket_id]
        if asked.owed and not asked.gone:
            self.world.demand(ticket_id, model)

    @precondition(lambda self: self.asked)
    @rule(index=INDEX)
    def abandon(self, index: int) -> None:
        ticket_id = self._ticket(index)
        self.pool.on_abandoned(ticket_id, self.world.now)
        self.asked[ticket_id].gone = True

    @precondition(lambda self: self.effects.resolved)
    @rule(index=INDEX)
    def redeem(self, index: int) -> None:
        ticket_id = sorted(self.effects.resolved)[index % len(self.effects.resolved)]
        self.pool.on_redeemed(ticket_id, self.world.now)
        if not self.asked[ticket_id].may_be_answered:
            self.asked[ticket_id].gone = True

    # --- hosts

    @precondition(lambda self: self.effects.pending)
    @rule(index=INDEX)
    def succeed(self, index: int) -> None:
        self._deliver(self.effects.pending[index % len(self.effects.pending)])

    @precondition(lambda self: any(c.verb in MAY_FAIL for c in self.effects.pending))
    @rule(index=INDEX, how=st.sampled_from(["rolled back", "quarantined", "broken", "out of memory"]))
    def fail(self, index: int, how: str) -> None:
        calls = [c for c in self.effects.pending if c.verb in MAY_FAIL]
        call = calls[index % len(calls)]
        self.effects.pending.remove(call)
        error = OutOfMemory("the device has less") if how == "out of memory" else LoadFailed("broken")
        if call.verb == "wake" and how == "quarantined":
            self.pool.on_quarantined(call.ref, "its canary said something else", self.world.now)
        elif call.verb == "wake" and how != "broken":
            self._shrink(call)
            self.pool.on_wake_failed(call.ref, error, self.world.now)
        else:
            self.pool.on_failed(call.ref, error, self.world.now)

    @rule(model=MODELS)
    def forget_recipe(self, model: str) -> None:
        """A background load of it can only end in deep sleep, or again asleep."""
        self.world.known ^= {model}

    @precondition(lambda self: self.effects.calls)
    @rule(index=INDEX)
    def say_again(self, index: int) -> None:
        """An outcome comes twice, or late: it must not be believed unless it is awaited."""
        call = self.effects.calls[index % len(self.effects.calls)]
        if call.ref.model == prepared.MODEL or call in self.effects.pending:
            return
        if call.ref != self.world.ref(call.ref.model, call.ref.number):
            self.effects.pending.append(call)
            self.world.deliver(call)

    @precondition(lambda self: self.physical)
    @rule(index=INDEX)
    def die(self, index: int) -> None:
        name = sorted(self.physical)[index % len(self.physical)]
        _, model, number = name.split(":")
        ref = HostRef(model, int(number), 0)
        if model != prepared.MODEL:
            ref = self.world.ref(model, int(number))
        for ticket_id, placements in self.effects.resolved.items():
            asked = self.asked[ticket_id]
            asked.may_be_answered |= placements[-1].host == ref and not asked.gone
        del self.physical[name]
        self.world.lose(model, int(number))

    @rule(host=HOSTS, in_flight=st.integers(0, 3), drift=st.sampled_from([0, 0, 0, 3, -3, 60]))
    def report(self, host: tuple[str, int], in_flight: int, drift: int) -> None:
        model, number = host
        state = self.world.state(model, number)
        if state in (S.READY, S.DRAINING):
            self.drifted |= drift != 0
            size = SIZES[model] + drift
            report = self.world.report(model, state, in_flight, memory_bytes=size)
            self.pool.on_report(self.world.ref(model, number), report, self.world.now)

    # --- time and admin

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 25.0, 130.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)
        self._absorb()
        late = [t for t, a in self.asked.items() if a.owed and not a.gone and a.deadline <= self.world.now]
        assert not late, f"no answer by the deadline: {late}"

    @rule(model=MODELS, what=st.sampled_from(["ask_sleep", "ask_load", "ask_unload"]))
    def admin(self, model: str, what: str) -> None:
        getattr(self.pool, what)(model, self.world.now)

    # --- the truth beside the pool

    def _ticket(self, index: int) -> str:
        return sorted(self.asked)[index % len(self.asked)]

    def _deliver(self, call: Call) -> None:
        self._absorb_calls()
        self._shrink(call)
        if call.asleep and call.ref.model not in self.world.known and call.ref.name in self.physical:
            self.physical[call.ref.name] = (self.home[call.ref], PROCESS_BYTES)
        self.world.deliver(call)
        self._absorb_calls()

    def _shrink(self, call: Call) -> None:
        name, model = call.ref.name, call.ref.model
        if model != prepared.MODEL and call.ref != self.world.ref(model, call.ref.number):
            return
        if call.verb == "unload":
            self.physical.pop(name, None)
        elif call.verb in ("sleep", "wake") and name in self.physical:
            self.physical[name] = (self.physical[name][0], self.world.residuals[model])
        elif call.verb == "deep_sleep" and name in self.physical:
            self.physical[name] = (self.physical[name][0], PROCESS_BYTES)

    def _absorb(self) -> None:
        self._absorb_calls()
        self._absorb_answers()
        for event in self.effects.events[self.seen_events :]:
            if event.kind == "transition":
                assert event.new in MODEL_EDGES[event.old], event
                assert event.old is self.states.get(event.host, S.COLD), event
                self.states[event.host] = event.new
                assert any(char.isdigit() for char in event.reason), event
        self.seen_events = len(self.effects.events)

    def _absorb_calls(self) -> None:
        for call in self.effects.calls[self.seen_calls :]:
            if call.verb in ("start", "prepare"):
                self.home[call.ref] = call.device
            if call.verb == "prepare":
                self.physical[call.ref.name] = (call.device, PREPARED_BYTES)
            elif call.verb in ("start", "load", "wake"):
                self.physical.pop(call.ref.process, None)  # it is that process now
                size = self.world.residuals[call.ref.model] if call.asleep else SIZES[call.ref.model]
                self.physical[call.ref.name] = (self.home[call.ref], size)
        self.seen_calls = len(self.effects.calls)

    def _absorb_answers(self) -> None:
        for ticket_id, asked in self.asked.items():
            count = len(self.effects.resolved.get(ticket_id, ())) + len(self.effects.rejected.get(ticket_id, ()))
            new = count - self.answered.get(ticket_id, 0)
            self.answered[ticket_id] = count
            if new:
                assert asked.owed or asked.may_be_answered, f"{ticket_id} was answered already"
                assert new == 1 or asked.may_be_answered, f"{ticket_id} was answered {new} times at once"
                asked.owed = asked.may_be_answered = False

    @invariant()
    def truth_holds(self) -> None:
        self._absorb()
        for books in self.pool.books():
            held = sum(entry.held_bytes for entry in books.entries)
            assert held == books.held_bytes <= books.budget_bytes, books
            real = sum(size for device, size in self.physical.values() if device == books.device)
            assert self.drifted or real <= books.budget_bytes, f"{books.device}: {real} really held"
        statuses = self.pool.status(self.world.now)
        ready = {s.host for s in statuses if s.state is S.READY}
        table = self.pool.routing_table()
        assert {entry.host.name for entries in table.entries.values() for entry in entries} == ready
        up = {s.model for s in statuses if s.state is S.READY}
        for status in statuses:
            assert status.state is self.states.get(status.host, S.COLD)
            assert status.model not in up or status.waiting == 0, status

    def teardown(self) -> None:
        """When outcomes come and time passes, nobody is left waiting and everything comes to rest."""
        for _ in range(300):
            for call in list(self.effects.pending):
                self._deliver(call)
            self.world.tick(3.0)
            self.truth_holds()
            owed = any(a.owed and not a.gone for a in self.asked.values())
            if not owed and not self.effects.pending and S.FAILED not in self.states.values():
                break
        stuck = [t for t, a in self.asked.items() if a.owed and not a.gone]
        assert not stuck, (stuck, self.effects.events[-3:])
        patient = [t for t, a in self.asked.items() if a.deadline >= FAR]
        waited_out = [t for t in patient for e in self.effects.rejected.get(t, ()) if isinstance(e, ModelLoading)]
        assert not waited_out
        assert not self.effects.pending
        assert set(self.states.values()) <= {S.COLD, S.SLEEPING, S.DEEP_SLEEP, S.READY}


PoolMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolMachine = PoolMachine.TestCase
