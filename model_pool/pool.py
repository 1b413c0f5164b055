"""Owns residency: which model holds device memory, and who waits for what. The event-driven core, pure.

One event loop calls it; it has no locks, never sleeps and knows no clock: every event brings ``now`` (seconds). It acts
only through Effects, whose outcomes come back as events. Events of an old epoch, and events that do not belong to the
state a host is in, are recorded and ignored: outcomes may come late, twice or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from model_pool.effects import Effects, HostRef, HostReport, ModelSpec, ModelStatus, RoutingTable
from model_pool.idling import Idling
from model_pool.ledger import DeviceBooks, Ledger
from model_pool.lifecycle import Lifecycle
from model_pool.slot import Fleet, PoolSettings, Slot
from model_pool.states import NEAREST_FIRST, ON_THE_WAY, STARTABLE
from model_pool.tickets import Ticket, TicketDesk
from model_pool.views import Views
from policies.errors import (
    CapacityPinned,
    ConfigError,
    DoesNotFit,
    ModelDoesNotFit,
    ModelLoading,
    ModelNotFound,
    OrchestratorError,
    QueueFull,
)
from policies.residency import Action, ActionKind, Plan, ResidencyPolicy
from policies.types import DemandView, ModelState, Tier

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
        self._policy = policy
        self._effects = effects
        self._fleet = Fleet(specs, self._settings.first_epoch)
        self._strangers: set[HostRef] = set()
        self._ledger = Ledger(devices)
        self._desk = TicketDesk(self._fleet.models, self._settings.aging_seconds)
        self._life = Lifecycle(self._fleet, self._ledger, self._desk, effects, self._settings)
        self._views = Views(self._fleet, self._ledger, self._desk, self._settings)
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
        if refusal is not None:
            self._life.reject(slots[0], ticket_id, refusal, now)
        elif ready:
            self._life.place(min(ready, key=lambda slot: self._views.in_flight(slot, now)), ticket, now)
        else:
            self._desk.add(ticket)
            if any(slot.state in STARTABLE for slot in slots):
                self._replan(now)

    def on_abandoned(self, ticket_id: str, now: float) -> None:
        """The caller gave up. No answer; a load it caused goes on."""
        self._desk.drop(ticket_id)

    def on_redeemed(self, ticket_id: str, now: float) -> None:
        """The request has arrived at its host."""
        placement = self._desk.redeem(ticket_id)
        slot = self._at(placement.host) if placement else None
        if slot is not None:
            slot.in_flight += 1
            slot.last_used = max(slot.last_used, now)

    # --- outcomes

    def on_warming(self, ref: HostRef, now: float) -> None:
        if slot := self._expect(ref, "warming", now, _S.LOADING):
            self._life.warming(slot, now)

    def on_loaded(self, ref: HostRef, report: HostReport, now: float) -> None:
        if slot := self._expect(ref, "loaded", now, _S.LOADING, _S.WARMING):
            self._life.ready(slot, report, now)
            self._replan(now)

    def on_failed(self, ref: HostRef, error: object, now: float) -> None:
        """A load, a sleep or a wake (without rollback) failed. ``error``: an exception or a text."""
        slot = self._expect(ref, f"failed: {error}", now, _S.LOADING, _S.WARMING, _S.DRAINING, _S.WAKING)
        if slot is None:
            return
        if slot.state is _S.DRAINING:
            self._desk.forget_host(ref)
            self._life.unload(slot, f"sleeping failed after {now - slot.since:.1f} s: {error}", now)
        else:
            self._life.fail(slot, error, now, gone=True)
        self._replan(now)

    def on_lost(self, ref: HostRef, cause: object, now: float) -> None:
        """The process died. Known losses and old epochs change nothing."""
        if ref in self._strangers:
            self.on_unloaded(ref, now)
        living = set(_S) - {_S.COLD, _S.LOST}
        if slot := self._expect(ref, f"lost: {cause}", now, *living):
            self._life.lose(slot, cause, now)
            self._replan(now)

    def on_drained(self, ref: HostRef, now: float) -> None:
        slot = self._expect(ref, "drained", now, _S.DRAINING)
        if slot is not None and not slot.sleep_asked:
            self._life.drained(slot, now)

    def on_slept(self, ref: HostRef, report: HostReport, now: float) -> None:
        slot = self._expect(ref, "slept", now, _S.DRAINING)
        if slot is not None and slot.sleep_asked:
            self._life.slept(slot, report, now)
            self._replan(now)

    def on_woken(self, ref: HostRef, report: HostReport, now: float) -> None:
        if slot := self._expect(ref, "woken", now, _S.WAKING):
            self._life.ready(slot, report, now)
            self._replan(now)

    def on_wake_failed(self, ref: HostRef, error: object, now: float) -> None:
        """Rolled back: it is asleep again."""
        if slot := self._expect(ref, f"wake failed: {error}", now, _S.WAKING):
            self._life.fail(slot, error, now)
            self._replan(now)

    def on_quarantined(self, ref: HostRef, error: object, now: float) -> None:
        """It woke up as something else; the process answers nobody and ends."""
        if slot := self._expect(ref, f"quarantined: {error}", now, _S.WAKING):
            self._life.quarantine(slot, error, now)
            self._replan(now)

    def on_unloaded(self, ref: HostRef, now: float) -> None:
        if ref in self._strangers:
            self._strangers.discard(ref)
            self._ledger.release(ref.name)
            self._replan(now)
        elif slot := self._expect(ref, "unloaded", now, _S.UNLOADING, _S.FAILED):
            self._life.unloaded(slot, now)
            self._replan(now)

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
        self._replan(now)

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
        self._replan(now)
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
        """End the process of a READY or SLEEPING model. The state it is in then."""
        return self._put_down(model, now, (_S.READY, _S.SLEEPING), "unload")

    def ask_load(self, model: str, now: float) -> ModelState:
        """Make a model READY without a request; cuts a cooldown short. The state it is in then."""
        slots = self._named(model)
        for slot in slots:
            slot.cooldown_until = min(slot.cooldown_until, now)
            self._life.thaw(slot, now)
        if not self._fleet.up(model):
            for slot in slots:
                slot.wanted_since = now if slot.wanted_since is None else slot.wanted_since
            self._replan(now)
        return self._best_state(slots)

    def ask_pin(self, model: str, pinned: bool, now: float) -> ModelState:
        """Keep a model from being evicted for another, or no longer; lasts as long as this pool. Its state."""
        slots = self._named(model)
        for slot in slots:
            if slot.pinned != pinned:
                slot.pinned = pinned
                self._life.note(slot, "decision", f"{'pinned' if pinned else 'unpinned'} by admin", now)
        self._replan(now)
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
        slots = self._named(model)
        slot = min(slots, key=lambda s: NEAREST_FIRST.index(s.state))
        device = self._views.device_for(slot, {})
        demand = DemandView(model, slot.need_bytes, now, Tier.STANDARD, 1, host=slot.ref.name)
        return self._policy.plan(self._views.pool(device, [demand], now))

    # --- planning

    def _replan(self, now: float) -> None:
        """Ask the policy for each device and do what it says."""
        for device, demand in self._views.demand(now).items():
            plan = self._policy.plan(self._views.pool(device, demand, now))
            hosts = {wanted.model: wanted.host for wanted in demand}
            for action in plan.actions:
                slot = self._fleet.at(hosts[action.model])
                assert slot is not None
                self._do(action, slot, device, now)
            # Nobody may be kept waiting by a model that only comes back because a load failed, or by a second host.
            if all(action.kind in (ActionKind.START, ActionKind.REFUSE) for action in plan.actions):
                self._restore(device, now)
                self._spread(device, now)

    def _do(self, action: Action, slot: Slot, device: str, now: float) -> None:
        if action.kind is ActionKind.START:
            self._life.start(slot, device, action.reason, now)
        elif action.kind is ActionKind.WAIT:
            self._life.decide(slot, action.reason, now)
        elif action.kind is ActionKind.REFUSE:
            self._refuse(slot, action.reason, now)
        else:
            slot.committed, slot.device = True, device
            victim = self._fleet.at(action.host or "")
            assert victim is not None
            unload = action.kind is ActionKind.UNLOAD
            self._life.evict(victim, action.reason, now, unload=unload, target=slot.name)

    def _refuse(self, slot: Slot, reason: str, now: float) -> None:
        elsewhere = self._views.elsewhere(slot)
        slot.committed = False
        if elsewhere is not None:  # the next planning sends a cold model there
            if slot.state is _S.SLEEPING:
                self._life.unload(slot, f"{reason}; moves to {elsewhere}", now)
            return
        slot.wanted_since = None
        self._life.decide(slot, reason, now)
        retry = self._settings.retry_after_seconds
        self._life.reject_all(slot, CapacityPinned(reason, retry_after_seconds=retry), now)

    def _restore(self, device: str, now: float) -> None:
        """Bring back what was evicted for a model that then failed, as far as it fits."""
        for slot in self._fleet:
            if not (slot.restore and slot.device == device and slot.state in STARTABLE) or slot.cooling(now):
                continue
            extra = slot.need_bytes - self._ledger.held_bytes(slot.ref.name)
            free = self._ledger.free_bytes(device)
            if extra <= free:
                reason = f"restored: needs {extra} more bytes, {free} free on {device}"
                self._life.start(slot, device, reason, now)

    def _spread(self, device: str, now: float) -> None:
        """Start further hosts of models that are up, as far as bytes are to spare: they evict nobody."""
        for slot in self._fleet:
            if slot.ref.number == 0 or slot.state not in STARTABLE or slot.cooling(now):
                continue
            siblings = self._fleet.of(slot.name)
            if not any(s.state is _S.READY for s in siblings) or self._views.device_for(slot, {}) != device:
                continue
            extra = slot.need_bytes - self._ledger.held_bytes(slot.ref.name)
            free = self._ledger.free_bytes(device)
            if extra <= free:
                reason = f"host {slot.ref.number + 1} of {len(siblings)}: needs {extra} more bytes, {free} free"
                self._life.start(slot, device, reason, now)

    def _refusal(self, slots: Sequence[Slot], now: float) -> OrchestratorError | None:
        """Why a new request cannot even wait."""
        slot = slots[0]
        if self._fleet.up(slot.name):
            return self._queue_full(slot) if all(s.state is not _S.READY for s in slots) else None
        if all(s.cooling(now) or s.state is _S.FAILED for s in slots):
            return self._life.cached_cause(slot, now)
        largest = max(self._devices.values())
        if slot.need_bytes > largest:
            return ModelDoesNotFit(
                f"{slot.name} needs {slot.need_bytes} bytes, the largest device has a budget of {largest}: "
                f"raise it or configure a smaller model"
            )
        return self._queue_full(slot)

    def _queue_full(self, slot: Slot) -> QueueFull | None:
        waiting = self._desk.waiting(slot.name)
        if waiting >= slot.spec.max_waiting:
            retry = self._settings.retry_after_seconds
            said = f"{waiting} requests wait for {slot.name} ({slot.state}), the limit is {slot.spec.max_waiting}"
            return QueueFull(said, retry_after_seconds=retry)
        return None

    # --- helpers

    def _put_down(self, model: str, now: float, states: tuple[ModelState, ...], verb: str) -> ModelState:
        """Evict every host of a model that is in one of these states, and forget why it should come back."""
        slots = self._named(model)
        for slot in slots:
            slot.restore, slot.wanted_since, slot.displaced = False, None, False
            if slot.state in states:
                reason = f"{verb} asked by admin, {slot.in_flight} in flight"
                self._life.evict(slot, reason, now, unload=verb == "unload")
        self._replan(now)
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
        try:
            self._ledger.settle(slot.ref.name, report.memory_bytes)
        except DoesNotFit as error:
            if not slot.drifted:
                self._life.note(slot, "drift", f"{error}; restarted when idle", now)
            slot.drifted = True
            return
        slot.memory_bytes = report.memory_bytes

    def _outcome_of_adopted(self, slot: Slot, report: HostReport, now: float) -> None:
        if report.state is _S.READY:
            self._life.ready(slot, report, now)
        elif report.state is _S.FAILED or (slot.state is _S.WAKING and report.state is _S.SLEEPING):
            self._life.fail(slot, f"found {report.state} after a restart", now)
        elif slot.state is _S.LOADING and report.state is _S.WARMING:
            self._life.warming(slot, now)
        self._replan(now)

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
        elif slot.state is _S.DRAINING and slot.sleep_asked:
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
