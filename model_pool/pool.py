"""Owns residency: which model holds device memory, and who waits for what. The event-driven core, pure.

One event loop calls it; it has no locks, never sleeps and knows no clock: every event brings ``now`` (seconds). It acts
only through Effects, whose outcomes come back as events. Events of an old epoch, and events that do not belong to the
state a host is in, are recorded and ignored: outcomes may come late, twice or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from model_pool import prepared
from model_pool.effects import Effects, HostRef, HostReport, ModelSpec, ModelStatus, RoutingTable, Wait
from model_pool.idling import Idling
from model_pool.ladder import Ladder
from model_pool.ledger import DeviceBooks, Ledger
from model_pool.lifecycle import Lifecycle
from model_pool.planning import Planner
from model_pool.prepared import Prepared
from model_pool.slot import Fleet, PoolSettings, Slot
from model_pool.states import ASLEEP, NEAREST_FIRST, ON_THE_WAY, STARTABLE
from model_pool.tickets import Ticket, TicketDesk
from model_pool.views import Views
from policies.errors import (
    ConfigError,
    DoesNotFit,
    ModelDoesNotFit,
    ModelLoading,
    ModelNotFound,
    OrchestratorError,
    QueueFull,
    SwapBudgetExceeded,
)
from policies.residency import Plan, ResidencyPolicy
from policies.types import ModelState, Tier

_S = ModelState


class Pool:
    """The single writer of residency.

    Args:
        specs: the configured models, each with its number of hosts.
        devices: device → budget, bytes.
        policy: decides per device (policies.residency).
        effects: how the pool acts; see model_pool.effects.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        devices: Mapping[str, int],
        policy: ResidencyPolicy,
        effects: Effects,
        settings: PoolSettings | None = None,
    ) -> None:
        if not devices:
            raise ConfigError("the pool has 0 devices: give at least one with a budget in bytes")
        self._settings = settings or PoolSettings()
        self._devices = dict(devices)
        self._effects = effects
        self._fleet = Fleet(specs, self._settings.first_epoch)
        self._strangers: set[HostRef] = set()
        self._ledger = Ledger(devices)
        self._desk = TicketDesk(self._fleet.models, self._settings.aging_seconds)
        self._life = Lifecycle(self._fleet, self._ledger, self._desk, effects, self._settings)
        self._prepared = Prepared(self._fleet, self._ledger, effects, self._settings)
        self._views = Views(self._fleet, self._ledger, self._desk, self._prepared, self._settings)
        self._ladder = Ladder(self._fleet, self._views, self._life, self._prepared)
        self._planner = Planner(
            self._fleet, self._ledger, self._views, self._life, self._prepared, policy, self._settings
        )
        self._idling = Idling(self._fleet, self._ledger, self._views, self._life, self._settings)

    # --- requests

    def on_demand(self, ticket_id: str, model: str, arrival: float, deadline: float, tier: Tier, now: float) -> None:
        """A request wants this model. Answered by one resolve or reject; a known ticket id changes nothing."""
        if self._desk.knows(ticket_id):
            return
        slots = self._fleet.of(model)
        if not slots:
            self._effects.reject(ticket_id, self._unknown(model))
            return
        for slot in slots:
            self._life.thaw(slot, now)
        ticket = Ticket(ticket_id, model, arrival, deadline, tier)
        refusal = self._refusal(slots, now)
        ready = [slot for slot in slots if slot.state is _S.READY]
        late = None if ready or refusal else self._too_late(slots, deadline, now)
        if late is not None:
            self._life.reject(slots[0], ticket_id, late, now)
            self._want(slots, now)
        elif refusal is not None:
            self._life.reject(slots[0], ticket_id, refusal, now)
        elif ready:
            self._life.place(min(ready, key=lambda slot: self._views.in_flight(slot, now)), ticket, now)
        else:
            self._desk.add(ticket)
            if any(slot.state in STARTABLE for slot in slots):
                self._planner.replan(now)

    def on_abandoned(self, ticket_id: str, now: float) -> None:
        """The caller gave up. No answer; a load it caused goes on."""
        placement = self._desk.drop(ticket_id)
        slot = self._at(placement.host) if placement else None
        if slot is not None and slot.state is _S.DRAINING:
            self._effects.forfeit(slot.ref, ticket_id)

    def on_redeemed(self, ticket_id: str, now: float) -> None:
        """The request has arrived at its host."""
        placement = self._desk.redeem(ticket_id)
        slot = self._at(placement.host) if placement else None
        if slot is not None:
            slot.in_flight += 1
            slot.last_used = max(slot.last_used, now)

    # --- outcomes

    def on_warming(self, ref: HostRef, now: float) -> None:
        slot = self._at(ref)
        if slot is not None and slot.state is _S.WARMING:  # said with every report
            return
        if slot := self._expect(ref, "warming", now, _S.LOADING):
            self._life.warming(slot, now)

    def on_loaded(self, ref: HostRef, report: HostReport, now: float) -> None:
        """A load came to its end: ready, or asleep where that was asked for."""
        if slot := self._expect(ref, "loaded", now, _S.LOADING, _S.WARMING):
            if report.state in ASLEEP:
                self._life.staged(slot, report, now)
            else:
                self._life.ready(slot, report, now)
            self._planner.replan(now)

    def on_failed(self, ref: HostRef, error: object, now: float) -> None:
        """A load, a sleep or a wake (without rollback) failed. ``error``: an exception or a text."""
        slot = self._expect(ref, f"failed: {error}", now, _S.LOADING, _S.WARMING, _S.DRAINING, _S.WAKING, _S.SLEEPING)
        if slot is None:
            return
        if slot.state is _S.SLEEPING:
            if slot.deepening:
                self._life.unload(slot, f"no deep sleep after {now - slot.asked_at:.1f} s: {error}", now)
        elif slot.state is not _S.DRAINING and self._ladder.climb(slot, error, now):
            pass
        elif slot.state is _S.DRAINING:
            self._desk.forget_host(ref)
            self._life.unload(slot, f"sleeping failed after {now - slot.since:.1f} s: {error}", now)
        else:
            self._life.fail(slot, error, now, gone=True)
        self._planner.replan(now)

    def on_lost(self, ref: HostRef, cause: object, now: float) -> None:
        """The process died. Known losses and old epochs change nothing."""
        if ref in self._strangers or ref.model == prepared.MODEL:
            self.on_unloaded(ref, now)
            return
        living = set(_S) - {_S.COLD, _S.LOST}
        if slot := self._expect(ref, f"lost: {cause}", now, *living):
            self._life.lose(slot, cause, now)
            self._planner.replan(now)

    def on_drained(self, ref: HostRef, now: float) -> None:
        slot = self._expect(ref, "drained", now, _S.DRAINING)
        if slot is not None and not slot.sleep_asked:
            self._life.drained(slot, now)

    def on_slept(self, ref: HostRef, report: HostReport, now: float) -> None:
        slot = self._expect(ref, "slept", now, _S.DRAINING)
        if slot is not None and slot.sleep_asked:
            self._life.slept(slot, report, now)
            self._planner.replan(now)

    def on_deep_slept(self, ref: HostRef, report: HostReport, now: float) -> None:
        slot = self._expect(ref, "deep asleep", now, _S.SLEEPING)
        if slot is not None and slot.deepening:
            self._life.deepened(slot, report, now)
            self._planner.replan(now)

    def on_prepared(self, ref: HostRef, measured_bytes: int, now: float) -> None:
        """A prepared process waits for a model."""
        self._prepared.ready(ref, measured_bytes)

    def on_woken(self, ref: HostRef, report: HostReport, now: float) -> None:
        if slot := self._expect(ref, "woken", now, _S.WAKING):
            self._life.ready(slot, report, now)
            self._planner.replan(now)

    def on_wake_failed(self, ref: HostRef, error: object, now: float) -> None:
        """Rolled back: it is asleep again."""
        if slot := self._expect(ref, f"wake failed: {error}", now, _S.WAKING):
            if not self._ladder.climb(slot, error, now):
                self._life.fail(slot, error, now)
            self._planner.replan(now)

    def on_quarantined(self, ref: HostRef, error: object, now: float) -> None:
        """It woke up as something else; the process answers nobody and ends."""
        if slot := self._expect(ref, f"quarantined: {error}", now, _S.WAKING):
            self._life.quarantine(slot, error, now)
            self._planner.replan(now)

    def on_unloaded(self, ref: HostRef, now: float) -> None:
        if self._prepared.gone(ref, now):
            self._planner.replan(now)
        elif ref in self._strangers:
            self._strangers.discard(ref)
            self._ledger.release(ref.name)
            self._planner.replan(now)
        elif slot := self._expect(ref, "unloaded", now, _S.UNLOADING, _S.FAILED):
            self._life.unloaded(slot, now)
            self._planner.replan(now)

    def on_report(self, ref: HostRef, report: HostReport, now: float) -> None:
        """A host's periodic word about itself. For an adopted host on its way it is also the outcome."""
        slot = self._at(ref)
        if slot is None:
            return
        slot.heard = True
        for ticket_id in report.redeemed:
            self._desk.redeem(ticket_id)
        slot.last_used = max(slot.last_used, report.last_used)
        if slot.state is _S.READY:
            slot.in_flight = report.in_flight
            slot.asked_keep_alive_seconds = report.keep_alive_seconds
            if report.memory_bytes:
                self._measure(slot, report, now)
        elif slot.state is _S.DRAINING:
            slot.in_flight = report.in_flight
        elif slot.state is _S.SLEEPING and report.state is _S.DEEP_SLEEP:  # a controller before us had asked
            self._life.deepened(slot, report, now)
        elif slot.adopted and slot.state in ON_THE_WAY:
            self._outcome_of_adopted(slot, report, now)

    def on_adopted(self, ref: HostRef, report: HostReport, now: float, device: str | None = None) -> None:
        """A restarted controller found a living host. ``device``: where it runs; may be omitted if there is one."""
        slot = self._fleet.at(ref.name)
        device = device or next(iter(self._devices))
        if slot is not None and slot.state is _S.COLD and not self._ledger.has(ref.name):
            self._life.adopt(slot, ref, report, device, now)
        elif slot is None or slot.ref != ref:
            self._end_stranger(ref, report, device)
        self._planner.replan(now)

    # --- time

    def on_tick(self, now: float) -> None:
        """Deadlines, expired placements, stuck steps, cooldowns, idle restarts; then plan again."""
        self._desk.expire(now)
        for slot in self._fleet:
            self._check_stuck(slot, now)
            self._life.thaw(slot, now)
            idle = slot.state is _S.READY and self._views.in_flight(slot, now) == 0
            if slot.drifted and idle:
                self._life.evict(
                    slot, f"0 in flight, restarted: drifted past the {slot.memory_bytes} bytes it had", now, unload=True
                )
                slot.restore = True
        self._idling.tick(now)
        wanted = self._planner.replan(now)
        if not wanted:
            self._idling.promote(now)
        self._prepared.refill(now, idle=not wanted)
        retry = self._settings.retry_after_seconds
        for ticket in self._desk.overdue(now):
            slot = self._fleet.of(ticket.model)[0]
            waited = f"waited {now - ticket.arrival:.1f} s; {self._views.waiting_for(slot, now)}"
            self._life.reject(slot, ticket.ticket_id, ModelLoading(waited, retry_after_seconds=retry), now)

    # --- admin

    def ask_sleep(self, model: str, now: float) -> ModelState:
        """Put a READY model to sleep, dwell or not; others stay as they are. The state it is in then."""
        return self._put_down(model, now, (_S.READY,), "sleep")

    def ask_unload(self, model: str, now: float) -> ModelState:
        """End the process of a model that is READY or asleep. The state it is in then."""
        return self._put_down(model, now, (_S.READY, *ASLEEP), "unload")

    def ask_load(self, model: str, now: float) -> ModelState:
        """Make a model READY without a request; cuts a cooldown short. The state it is in then."""
        slots = self._named(model)
        for slot in slots:
            slot.cooldown_until = min(slot.cooldown_until, now)
            self._life.thaw(slot, now)
        if not self._fleet.up(model):
            self._want(slots, now)
        return self._best_state(slots)

    def ask_pin(self, model: str, pinned: bool, now: float) -> ModelState:
        """Keep a model from being evicted for another, or no longer; lasts as long as this pool. Its state."""
        slots = self._named(model)
        for slot in slots:
            if slot.pinned != pinned:
                slot.pinned = pinned
                self._life.note(slot, "decision", f"{'pinned' if pinned else 'unpinned'} by admin", now)
        self._planner.replan(now)
        return self._best_state(slots)

    # --- reads

    def status(self, now: float) -> tuple[ModelStatus, ...]:
        return tuple(self._views.status(slot, now) for slot in self._fleet)

    def routing_table(self) -> RoutingTable:
        return self._life.table

    def books(self) -> tuple[DeviceBooks, ...]:
        return self._ledger.books()

    def dry_run(self, model: str, now: float) -> Plan:
        """What would be done if a request for this model came now, and it is not up. Nothing is done."""
        return self._planner.dry_run(self._named(model), now)

    def waits(self, model: str, now: float) -> dict[str, Wait]:
        """What those may be told who wait for a model, by ticket."""
        self._named(model)
        return self._views.waits(model, now)

    # --- helpers

    def _refusal(self, slots: Sequence[Slot], now: float) -> OrchestratorError | None:
        """Why a new request cannot even wait."""
        slot = slots[0]
        if self._fleet.up(slot.name):
            return self._queue_full(slot) if all(s.state is not _S.READY for s in slots) else None
        if all(s.cooling(now) or (s.state is _S.FAILED and not s.climbed) for s in slots):
            return self._life.cached_cause(slot, now)
        largest = max(self._devices.values())
        if slot.need_bytes > largest:
            return ModelDoesNotFit(
                f"{slot.name} needs {slot.need_bytes} bytes, the largest device has a budget of {largest}: "
                f"raise it or configure a smaller model"
            )
        return self._queue_full(slot)

    def _too_late(self, slots: Sequence[Slot], deadline: float, now: float) -> SwapBudgetExceeded | None:
        """A request whose patience is shorter than the model took to come up the last time."""
        known = [eta for slot in slots if (eta := self._views.eta_seconds(slot, now)) is not None]
        left = deadline - now
        if not known or min(known) <= left:
            return None
        eta = min(known)
        state = self._best_state(slots)
        said = f"{slots[0].name} is {state}: {eta:.1f} s until it is ready, as the last time; {left:.1f} s are left"
        return SwapBudgetExceeded(f"{said}. It is being made ready", retry_after_seconds=max(eta, 0.1))

    def _want(self, slots: Sequence[Slot], now: float) -> None:
        """Bring a model up though nobody waits for it."""
        if not self._fleet.up(slots[0].name):
            for slot in slots:
                slot.wanted_since = now if slot.wanted_since is None else slot.wanted_since
            self._planner.replan(now)

    def _queue_full(self, slot: Slot) -> QueueFull | None:
        waiting = self._desk.waiting(slot.name)
        if waiting >= slot.spec.max_waiting:
            retry = self._settings.retry_after_seconds
            said = f"{waiting} requests wait for {slot.name} ({slot.state}), the limit is {slot.spec.max_waiting}"
            return QueueFull(said, retry_after_seconds=retry)
        return None

    def _put_down(self, model: str, now: float, states: tuple[ModelState, ...], verb: str) -> ModelState:
        """Evict every host of a model that is in one of these states, and forget why it should come back."""
        slots = self._named(model)
        for slot in slots:
            slot.restore, slot.wanted_since, slot.displaced, slot.pushed_out = False, None, False, False
            if slot.state in states:
                reason = f"{verb} asked by admin, {slot.in_flight} in flight"
                self._life.evict(slot, reason, now, unload=verb == "unload")
        self._planner.replan(now)
        for slot in slots:
            slot.evicted_for = None
        return self._best_state(slots)

    @staticmethod
    def _best_state(slots: Sequence[Slot]) -> ModelState:
        """A model's state: that of its host which is nearest to serving."""
        return min((slot.state for slot in slots), key=NEAREST_FIRST.index)

    def _unknown(self, model: str) -> ModelNotFound:
        known = ", ".join(sorted(self._fleet.models)) or "none"
        return ModelNotFound(f"model {model!r} is not one of {known}", param="model")

    def _named(self, model: str) -> tuple[Slot, ...]:
        slots = self._fleet.of(model)
        if not slots:
            raise self._unknown(model)
        return slots

    def _at(self, ref: HostRef) -> Slot | None:
        slot = self._fleet.at(ref.name)
        return slot if slot is not None and slot.ref == ref else None

    def _expect(self, ref: HostRef, event: str, now: float, *states: ModelState) -> Slot | None:
        """The slot an event is about, if it is of this epoch and belongs to the state."""
        slot = self._at(ref)
        if slot is not None and slot.state in states:
            return slot
        if (slot := self._fleet.at(ref.name)) is not None:
            reason = f"{event}, epoch {ref.epoch}; now {slot.state}, epoch {slot.ref.epoch}"
            self._life.note(slot, "ignored", reason, now)
        return None

    def _measure(self, slot: Slot, report: HostReport, now: float) -> None:
        """Book what it may come to hold; what it holds beyond that has drifted."""
        try:
            self._ledger.settle(slot.ref.name, report.memory_bytes)
        except DoesNotFit as error:
            self._drifted(slot, error.message, now)
            return
        slot.memory_bytes = report.memory_bytes
        self._ledger.saw(slot.ref.name, report.measured_bytes)
        if report.measured_bytes > self._settings.allowed_bytes(report.memory_bytes):
            self._drifted(slot, f"holds {report.measured_bytes} bytes, promised {report.memory_bytes}", now)

    def _drifted(self, slot: Slot, said: str, now: float) -> None:
        if not slot.drifted:
            slot.drifted = True
            self._life.note(slot, "drift", f"{said}; restarted when idle", now)

    def _outcome_of_adopted(self, slot: Slot, report: HostReport, now: float) -> None:
        if report.state is _S.READY:
            self._life.ready(slot, report, now)
        elif slot.staging and report.state in ASLEEP:
            self._life.staged(slot, report, now)
        elif report.state is _S.FAILED or (slot.state is _S.WAKING and report.state is _S.SLEEPING):
            self._life.fail(slot, f"found {report.state} after a restart", now)
        elif slot.state is _S.LOADING and report.state is _S.WARMING:
            self._life.warming(slot, now)
        self._planner.replan(now)

    def _check_stuck(self, slot: Slot, now: float) -> None:
        """A step that was asked for and never answered."""
        waited = now - slot.asked_at
        if slot.state in ON_THE_WAY:
            limit = slot.spec.load_timeout_seconds
            if waited >= limit:
                silent = slot.state is _S.LOADING and not slot.heard
                why = "; no process came up: has the Ray cluster a place for it?" if silent else ""
                self._life.fail(slot, f"no answer, limit {limit} s{why}", now, gone=True)
        elif waited < self._settings.answer_timeout_seconds:
            return
        elif slot.deepening or (slot.state is _S.DRAINING and slot.sleep_asked):
            self._life.unload(slot, f"sleep not answered in {waited:.1f} s", now)
        elif slot.state is _S.UNLOADING or (slot.state is _S.FAILED and self._ledger.has(slot.ref.name)):
            self._life.note(slot, "decision", f"unload not answered in {waited:.1f} s: asked again", now)
            self._life.ask_unload(slot, now)

    def _end_stranger(self, ref: HostRef, report: HostReport, device: str) -> None:
        """A living host nobody configured, or a second one: ended, its bytes booked until it is gone."""
        if not self._ledger.has(ref.name):
            try:
                self._ledger.book(ref.name, device, report.memory_bytes)
                self._strangers.add(ref)
            except DoesNotFit:
                pass  # the books are full: it is ended all the same
        self._effects.unload(ref)
