"""A recording fake of the pool's effects: nothing happens until a test delivers an outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass

from model_pool import prepared
from model_pool.effects import (
    HostRef,
    HostReport,
    ModelSpec,
    ModelStatus,
    Placement,
    PoolEvent,
    RoutingTable,
)
from model_pool.pool import Pool
from model_pool.slot import PoolSettings
from policies.errors import OrchestratorError
from policies.residency import Lru
from policies.types import ModelState, Tier

S = ModelState
PREPARED_BYTES = 4
FAR = 1e9  # a deadline nobody reaches


@dataclass(frozen=True, slots=True)
class Call:
    """An effect that is still to be answered."""

    verb: str  # start | load | prepare | drain | sleep | deep_sleep | wake | unload
    ref: HostRef
    tickets: tuple[str, ...] = ()
    device: str = ""
    asleep: bool = False


class FakeEffects:
    """Records every call; ``pending`` are those without an outcome yet."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.forfeited: list[tuple[HostRef, str]] = []
        self.resized: list[tuple[HostRef, bool]] = []
        self.pending: list[Call] = []
        self.resolved: dict[str, list[Placement]] = {}
        self.rejected: dict[str, list[OrchestratorError]] = {}
        self.tables: list[RoutingTable] = []
        self.events: list[PoolEvent] = []

    def _ask(self, call: Call) -> None:
        self.calls.append(call)
        self.pending.append(call)

    def start_host(self, ref: HostRef, device: str, asleep: bool) -> None:
        self._ask(Call("start", ref, device=device, asleep=asleep))

    def load(self, ref: HostRef) -> None:
        self._ask(Call("load", ref))

    def prepare(self, ref: HostRef, device: str) -> None:
        self._ask(Call("prepare", ref, device=device))

    def deep_sleep(self, ref: HostRef) -> None:
        self._ask(Call("deep_sleep", ref))

    def resize_kv(self, ref: HostRef, full: bool) -> None:
        self.resized.append((ref, full))

    def drain(self, ref: HostRef, tickets: tuple[str, ...]) -> None:
        self._ask(Call("drain", ref, tickets))

    def forfeit(self, ref: HostRef, ticket_id: str) -> None:
        self.forfeited.append((ref, ticket_id))

    def sleep(self, ref: HostRef) -> None:
        self._ask(Call("sleep", ref))

    def wake(self, ref: HostRef) -> None:
        self._ask(Call("wake", ref))

    def unload(self, ref: HostRef) -> None:
        self._ask(Call("unload", ref))

    def resolve(self, ticket_id: str, placement: Placement) -> None:
        self.resolved.setdefault(ticket_id, []).append(placement)

    def reject(self, ticket_id: str, error: OrchestratorError) -> None:
        self.rejected.setdefault(ticket_id, []).append(error)

    def publish(self, table: RoutingTable) -> None:
        self.tables.append(table)

    def record(self, event: PoolEvent) -> None:
        self.events.append(event)

    def verbs(self, model: str | None = None) -> list[str]:
        return [call.verb for call in self.calls if model in (None, call.ref.model)]

    def reasons(self, kind: str) -> list[str]:
        return [event.reason for event in self.events if event.kind == kind]


class World:
    """A pool, its fake effects, the true bytes of its models, and a clock moved by hand."""

    def __init__(
        self,
        sizes: dict[str, int],
        budgets: dict[str, int] | int = 100,
        *,
        residual: int = 10,
        pinned: tuple[str, ...] = (),
        max_waiting: int = 1000,
        replicas: dict[str, int] | None = None,
        problems: dict[str, str] | None = None,
        preload: tuple[str, ...] = (),
        keep_alive: dict[str, float] | None = None,
        min_resident: dict[str, float] | None = None,
        background: bool = False,
        process: int | None = None,
        **settings: float,
    ) -> None:
        devices = {"d0": budgets} if isinstance(budgets, int) else budgets
        specs = [
            ModelSpec(
                name,
                size,
                residual,
                pinned=name in pinned,
                load_timeout_seconds=100.0,
                max_waiting=max_waiting,
                replicas=(replicas or {}).get(name, 1),
                problem=(problems or {}).get(name, ""),
                preload=name in preload,
                keep_alive_seconds=(keep_alive or {}).get(name, math.inf),
                min_resident_seconds=(min_resident or {}).get(name),
                background=background,
                preparable=True,
            )
            for name, size in sizes.items()
        ]
        self.now = 0.0
        self.sizes = dict(sizes)
        self.residuals = dict.fromkeys(sizes, residual)
        self.promised = residual
        self.process = process  # what is left in deep sleep
        self.known = set(sizes)  # models that have been loaded on this machine before
        self.effects = FakeEffects()
        usual = {
            "min_resident_seconds": 0.0,
            "cooldown_seconds": 8.0,
            "prepared_bytes": PREPARED_BYTES,
            "drift_bytes": 2,
        }
        chosen = PoolSettings(**{**usual, **settings})  # type: ignore[arg-type]
        self.pool = Pool(specs, devices, Lru(chosen.aging_seconds), self.effects, chosen)

    # --- time and demand

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.pool.on_tick(self.now)

    def demand(
        self,
        ticket_id: str,
        model: str,
        tier: Tier = Tier.STANDARD,
        deadline: float = FAR,
        arrival: float | None = None,
    ) -> None:
        arrived = self.now if arrival is None else arrival
        self.pool.on_demand(ticket_id, model, arrived, deadline, tier, self.now)

    # --- outcomes

    def report(self, model: str, state: ModelState, in_flight: int = 0, **changes: object) -> HostReport:
        fields: dict[str, object] = {
            "memory_bytes": self.sizes[model],
            "residual_bytes": self.residuals[model],
            "process_bytes": self.process,
            "promised_residual_bytes": self.promised,
            "in_flight": in_flight,
            "last_used": self.now,
        }
        if state is S.SLEEPING:
            fields["memory_bytes"] = self.residuals[model]
        elif state is S.DEEP_SLEEP:
            fields["memory_bytes"] = fields["residual_bytes"] = self.process or self.residuals[model]
        return HostReport(state, **{**fields, **changes})  # type: ignore[arg-type]

    def call(self, verb: str, model: str) -> Call:
        """The oldest unanswered call of this kind."""
        for call in self.effects.pending:
            if (call.verb, call.ref.model) == (verb, model):
                return call
        raise AssertionError(f"no pending {verb} of {model}: {self.effects.pending}")

    def answer(self, verb: str, model: str, *, seconds: float = 0.0) -> None:
        """Deliver the good outcome of a pending call."""
        self.now += seconds
        self.deliver(self.call(verb, model))

    def deliver(self, call: Call) -> None:
        self.effects.pending.remove(call)
        model, ref, now, pool = call.ref.model, call.ref, self.now, self.pool
        if call.verb == "start" and call.asleep:
            pool.on_loaded(ref, self.report(model, S.SLEEPING if model in self.known else S.DEEP_SLEEP), now)
        elif call.verb in ("start", "load"):
            pool.on_warming(ref, now)
            pool.on_loaded(ref, self.report(model, S.READY), now)
        elif call.verb == "prepare":
            pool.on_prepared(ref, PREPARED_BYTES, now)
        elif call.verb == "deep_sleep":
            pool.on_deep_slept(ref, self.report(model, S.DEEP_SLEEP), now)
        elif call.verb == "drain":
            pool.on_drained(ref, now)
        elif call.verb == "sleep":
            pool.on_slept(ref, self.report(model, S.SLEEPING), now)
        elif call.verb == "wake":
            pool.on_woken(ref, self.report(model, S.READY), now)
        else:
            pool.on_unloaded(ref, now)

    def fail(self, verb: str, model: str, error: str = "boom") -> None:
        """Deliver the bad outcome of a pending start, sleep or wake."""
        call = self.call(verb, model)
        self.effects.pending.remove(call)
        if verb == "wake":
            self.pool.on_wake_failed(call.ref, error, self.now)
        else:
            self.pool.on_failed(call.ref, error, self.now)

    def quarantine(self, model: str, error: str = "the canary said something else") -> None:
        """A pending wake ends in a process that is not what it was."""
        call = self.call("wake", model)
        self.effects.pending.remove(call)
        self.pool.on_quarantined(call.ref, error, self.now)

    def lose(self, model: str, number: int = 0, cause: str = "killed") -> None:
        ref = HostRef(model, number, 0) if model == prepared.MODEL else self.ref(model, number)
        self.effects.pending = [call for call in self.effects.pending if call.ref != ref]
        self.pool.on_lost(ref, cause, self.now)

    def run(self, rounds: int = 100) -> None:
        """Deliver good outcomes, oldest first, until nothing is pending."""
        for _ in range(rounds):
            if not self.effects.pending:
                return
            self.deliver(self.effects.pending[0])
        raise AssertionError(f"still busy: {self.effects.pending}")

    def run_until_pending(self, verb: str, model: str) -> None:
        """Deliver good outcomes until this one would be next."""
        while not any((call.verb, call.ref.model) == (verb, model) for call in self.effects.pending):
            self.deliver(self.effects.pending[0])

    def bring_up(self, model: str) -> None:
        """Make a model ready, its first request served and gone."""
        self.demand(f"up-{model}-{self.now}", model)
        self.run()
        self.pool.on_redeemed(f"up-{model}-{self.now}", self.now)
        self.pool.on_report(self.ref(model), self.report(model, S.READY), self.now)
        assert self.state(model) is S.READY

    def put_asleep(self, model: str) -> None:
        self.bring_up(model)
        self.pool.ask_sleep(model, self.now)
        self.run()
        assert self.state(model) is S.SLEEPING

    # --- reads

    def status(self, model: str, number: int = 0) -> ModelStatus:
        return next(status for status in self.pool.status(self.now) if status.host == f"host:{model}:{number}")

    def state(self, model: str, number: int = 0) -> ModelState:
        return self.status(model, number).state

    def ref(self, model: str, number: int = 0) -> HostRef:
        return HostRef(model, number, self.status(model, number).epoch)

    def placed_on(self, ticket_id: str) -> HostRef:
        (placement,) = self.effects.resolved[ticket_id]
        return placement.host

    def error(self, ticket_id: str) -> OrchestratorError:
        (error,) = self.effects.rejected[ticket_id]
        return error

    def held(self, device: str = "d0") -> int:
        return next(books.held_bytes for books in self.pool.books() if books.device == device)
