"""Owns the moves of a host through its states: table checked, bytes booked, effect asked, event recorded."""

from __future__ import annotations

import math

from model_pool.effects import (
    Effects,
    HostRef,
    HostReport,
    Placement,
    PoolEvent,
    RoutingEntry,
    RoutingTable,
)
from model_pool.ledger import Ledger
from model_pool.slot import Fleet, PoolSettings, Slot
from model_pool.states import ASLEEP, MODEL_EDGES, ON_THE_WAY
from model_pool.tickets import Ticket, TicketDesk
from policies.errors import DoesNotFit, LoadFailed, OrchestratorError
from policies.types import ModelState, check_edge

_S = ModelState
_HALF_DEAD = (_S.COLD, _S.FAILED, _S.LOST, _S.QUARANTINED)
_WAKE_FAILURES_LIMIT = 2  # then the process is ended and the next try is a cold load


class Lifecycle:
    """Moves slots. Says how; when and why is the pool's business."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, desk: TicketDesk, effects: Effects, settings: PoolSettings
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._desk = desk
        self._effects = effects
        self._settings = settings
        self.table = RoutingTable(0)

    # --- recording

    def note(self, slot: Slot, kind: str, reason: str, now: float, old: ModelState | None = None) -> None:
        """Record an event of this slot; ``old`` and the seconds in it are given by a move."""
        self._effects.record(
            PoolEvent(
                at=now,
                model=slot.name,
                host=slot.ref.name,
                kind=kind,
                old=old or slot.state,
                new=slot.state,
                reason=reason,
                bytes=self._ledger.held_bytes(slot.ref.name),
                seconds=now - slot.since if slot.since else 0.0,  # never moved: no time to tell
                waiting=self._desk.waiting(slot.name),
            )
        )

    def decide(self, slot: Slot, reason: str, now: float) -> None:
        """Record a decision once, not at every replanning."""
        if reason != slot.last_decision:
            slot.last_decision = reason
            self.note(slot, "decision", reason, now)

    def _move(self, slot: Slot, new: ModelState, reason: str, now: float) -> None:
        check_edge(MODEL_EDGES, slot.state, new, slot.ref.name)
        self.enter(slot, new, "transition", reason, now)

    def enter(self, slot: Slot, new: ModelState, kind: str, reason: str, now: float) -> None:
        """Set a state without asking the table: the end of a move, or an adoption."""
        old = slot.state
        slot.state = new
        slot.adopted = False
        slot.last_decision = ""
        self.note(slot, kind, reason, now, old)
        slot.since = now
        if _S.READY in (old, new):
            self._publish()

    def _publish(self) -> None:
        entries: dict[str, tuple[RoutingEntry, ...]] = {}
        for slot in self._fleet:
            if slot.state is _S.READY:
                entries[slot.name] = (*entries.get(slot.name, ()), RoutingEntry(slot.ref, slot.state))
        self.table = RoutingTable(self.table.version + 1, entries)
        self._effects.publish(self.table)

    # --- up

    def start(self, slot: Slot, device: str, reason: str, now: float, process: str = "") -> None:
        """Load or wake. Books first: DoesNotFit and nothing done if the bytes are not there.

        ``process``: a prepared one that becomes the host of a COLD model.
        """
        name = slot.ref.name
        self._ledger.book(name, device, max(slot.need_bytes, self._ledger.held_bytes(name)))
        slot.committed = slot.restore = False
        slot.wanted_since = slot.evicted_for = slot.asked_keep_alive_seconds = None
        slot.displaced = slot.pushed_out = False
        if slot.state is _S.SLEEPING:
            self._asked(slot, now)
            self._move(slot, _S.WAKING, reason, now)
            self._effects.wake(slot.ref)
        elif slot.state is _S.DEEP_SLEEP:
            self._asked(slot, now)
            self._move(slot, _S.LOADING, reason, now)
            self._effects.load(slot.ref)
        else:
            self._begin_process(slot, device, reason, now, process, asleep=False)

    def stage(self, slot: Slot, device: str, reason: str, now: float, process: str = "") -> None:
        """Load a COLD model asleep, beside those that hold the memory it will need. Who waits for it waits on."""
        self._ledger.book(slot.ref.name, device, slot.residual_bytes)
        self._begin_process(slot, device, reason, now, process, asleep=True)

    def _begin_process(self, slot: Slot, device: str, reason: str, now: float, process: str, *, asleep: bool) -> None:
        self._asked(slot, now)
        slot.ref = HostRef(slot.name, slot.ref.number, slot.ref.epoch + 1, process)
        slot.device = device
        slot.staging = asleep
        slot.drifted = False
        self._move(slot, _S.LOADING, reason, now)
        self._effects.start_host(slot.ref, device, asleep)

    @staticmethod
    def _asked(slot: Slot, now: float) -> None:
        slot.asked_at = now
        slot.heard = slot.staging = False
        slot.in_flight = 0

    def staged(self, slot: Slot, report: HostReport, now: float) -> None:
        """Loaded asleep, or as far as a first load can be: from here it is started like any other that sleeps."""
        slot.staging = False
        slot.process_bytes = report.process_bytes
        if report.state is _S.SLEEPING:
            slot.residual_bytes = report.residual_bytes
            slot.load_seconds = now - slot.asked_at
        said = f"loaded in the background in {now - slot.asked_at:.1f} s, keeps {report.residual_bytes} bytes"
        try:
            self._ledger.settle(slot.ref.name, report.residual_bytes, residual=True)
        except DoesNotFit as error:
            self._move(slot, report.state, said, now)
            self.unload(slot, f"asleep it keeps more than there is: {error}", now)
            return
        self._move(slot, report.state, said, now)

    def warming(self, slot: Slot, now: float) -> None:
        adopted = slot.adopted
        self._move(slot, _S.WARMING, f"weights in place after {now - slot.since:.1f} s", now)
        slot.adopted = adopted  # half way: the outcome of an adopted load is still learned from reports

    def ready(self, slot: Slot, report: HostReport, now: float) -> None:
        """A load or wake came to its good end: settle the bytes, serve the waiters."""
        measured = report.memory_bytes or self._ledger.held_bytes(slot.ref.name)
        try:
            self._ledger.settle(slot.ref.name, measured)
        except DoesNotFit as error:
            self.fail(slot, error, now, gone=True)
            return
        if slot.state is _S.LOADING:
            self.warming(slot, now)
        slot.memory_bytes = measured
        slot.residual_bytes = report.residual_bytes or slot.residual_bytes
        slot.process_bytes = report.process_bytes
        if slot.state is _S.WAKING:
            slot.wake_seconds = now - slot.asked_at
        else:
            slot.load_seconds = now - slot.asked_at
        slot.in_flight = report.in_flight
        slot.last_used = max(slot.last_used, report.last_used, 0.0 if slot.promoted else now)
        slot.promoted = False
        slot.dwells = self._desk.waiting(slot.name) > 0
        slot.ready_since = now
        slot.failures, slot.cooldown_until, slot.cause = 0, 0.0, None
        self._end_climb(slot)
        reason = f"up after {now - slot.asked_at:.1f} s, holds {measured} bytes"
        self._move(slot, _S.READY, reason, now)
        for other in self._fleet:
            if other.evicted_for == slot.name:
                other.evicted_for = None
        self.serve(slot, now)

    def serve(self, slot: Slot, now: float) -> None:
        """Place all that wait for a READY model."""
        for ticket in self._desk.queue(slot.name, now):
            self.place(slot, ticket, now)

    def place(self, slot: Slot, ticket: Ticket, now: float) -> None:
        placement = Placement(ticket.ticket_id, slot.ref, now + self._settings.ticket_ttl_seconds)
        self._desk.place(ticket, placement)
        slot.last_used = max(slot.last_used, now)
        slot.tier = ticket.tier
        self._effects.resolve(ticket.ticket_id, placement)

    # --- down

    def evict(self, slot: Slot, reason: str, now: float, *, unload: bool, target: str | None = None) -> None:
        """READY: drain, then sleep or unload. Asleep: unload."""
        if slot.state in ASLEEP:
            self.unload(slot, reason, now)
            return
        slot.evicted_for = target
        slot.displaced = slot.displaced or (target is not None and slot.spec.preload)
        slot.pushed_out = target is not None
        slot.unload_after = unload
        slot.sleep_asked = False
        self._move(slot, _S.DRAINING, reason, now)
        self._effects.drain(slot.ref, self._desk.unredeemed(slot.ref, now))

    def drained(self, slot: Slot, now: float) -> None:
        """Nothing runs on it any more: its placements are served or too late."""
        self._desk.forget_host(slot.ref)
        slot.in_flight = 0
        if slot.unload_after:
            self.unload(slot, f"drained in {now - slot.since:.1f} s; its residual must go too", now)
            return
        slot.sleep_asked = True
        slot.asked_at = now
        self._effects.sleep(slot.ref)

    def quarantine(self, slot: Slot, error: object, now: float) -> None:
        """It woke, and its canary's answer is wrong: whatever it is now, it ends. Who waits for it gets a cold load."""
        self._move(slot, _S.QUARANTINED, f"woke after {now - slot.asked_at:.1f} s, but {_message(error)}", now)
        held = self._ledger.held_bytes(slot.ref.name)
        self.unload(slot, f"quarantined, its {held} bytes go: the next start is a cold load", now)

    def deepen(self, slot: Slot, reason: str, now: float) -> None:
        """SLEEPING: let go of what it keeps besides its process."""
        slot.deepening = True
        slot.asked_at = now
        self.note(slot, "decision", reason, now)
        self._effects.deep_sleep(slot.ref)

    def deepened(self, slot: Slot, report: HostReport, now: float) -> None:
        before = self._ledger.held_bytes(slot.ref.name)
        slot.process_bytes = report.residual_bytes
        self._ledger.settle(slot.ref.name, min(before, report.residual_bytes), residual=True)
        slot.deepening = False
        freed = before - self._ledger.held_bytes(slot.ref.name)
        self._move(slot, _S.DEEP_SLEEP, f"freed {freed} bytes, its process keeps {report.residual_bytes}", now)

    def slept(self, slot: Slot, report: HostReport, now: float) -> None:
        before = self._ledger.held_bytes(slot.ref.name)
        promised = report.promised_residual_bytes
        if promised is not None and report.residual_bytes > self._settings.allowed_bytes(promised):
            said = f"asleep it keeps {report.residual_bytes} bytes, its load promised {promised}"
            self.note(slot, "drift", said, now)
            self.unload(slot, f"recycled: {said}", now)
            return
        try:
            self._ledger.settle(slot.ref.name, report.residual_bytes, residual=True)
        except DoesNotFit as error:
            self.unload(slot, f"asleep it keeps more than it had: {error}", now)
            return
        slot.residual_bytes, slot.process_bytes = report.residual_bytes, report.process_bytes
        freed = before - report.residual_bytes
        self._move(slot, _S.SLEEPING, f"freed {freed} bytes, keeps {report.residual_bytes}", now)

    def unload(self, slot: Slot, reason: str, now: float) -> None:
        """End the process. Its bytes stay booked until that is confirmed."""
        slot.committed = slot.deepening = False
        slot.in_flight = 0
        self._end_climb(slot)
        self._move(slot, _S.UNLOADING, reason, now)
        self.ask_unload(slot, now)

    def ask_unload(self, slot: Slot, now: float) -> None:
        slot.asked_at = now
        self._effects.unload(slot.ref)

    def unloaded(self, slot: Slot, now: float) -> None:
        freed = self._ledger.release(slot.ref.name)
        if slot.state is _S.UNLOADING:
            self._move(slot, _S.COLD, f"process ended, freed {freed} bytes", now)
        else:
            self.thaw(slot, now)

    # --- failures

    def fail(self, slot: Slot, error: object, now: float, *, gone: bool = False) -> None:
        """A load or wake failed: one cause for all waiters, a cooldown, the victims come back.

        ``gone``: a failed wake was not rolled back, or its process cannot be trusted.
        """
        waking = slot.state is _S.WAKING
        verb = "waking" if waking else "loading"
        said = f"{verb} {slot.name} failed after {now - slot.asked_at:.1f} s: {_message(error)}"
        self._move(slot, _S.SLEEPING if waking else _S.FAILED, said, now)
        self.cool(slot, said, now)
        if not waking:
            self.ask_unload(slot, now)
        elif gone or slot.failures >= _WAKE_FAILURES_LIMIT:
            self.unload(slot, f"{slot.failures} failed wakes in a row: the next try is a cold load", now)
        else:
            held = self._ledger.held_bytes(slot.ref.name)
            self._ledger.settle(slot.ref.name, min(slot.residual_bytes, held), residual=True)

    def try_again(self, slot: Slot, error: object, given: str, now: float) -> None:
        """Memory was short, and others give theirs back: no cooldown, its waiters wait on."""
        waking = slot.state is _S.WAKING
        said = f"{_message(error)}; {given}, then it is tried once more"
        self._move(slot, _S.SLEEPING if waking else _S.FAILED, said, now)
        slot.climbed = slot.committed = True
        slot.staging = False
        if waking:
            held = self._ledger.held_bytes(slot.ref.name)
            self._ledger.settle(slot.ref.name, min(slot.residual_bytes, held), residual=True)
        else:
            slot.cooldown_until = now
            self.ask_unload(slot, now)

    def shrink(self, slot: Slot) -> None:
        """READY: its KV pool gives back what it does not need now."""
        slot.shrunk = True
        self._effects.resize_kv(slot.ref, False)

    def _end_climb(self, slot: Slot) -> None:
        """It came up, or failed for good: what others gave back for it they may take again."""
        if slot.climbed:
            slot.climbed = False
            for other in self._fleet:
                if other.shrunk:
                    other.shrunk = False
                    self._effects.resize_kv(other.ref, True)

    def cool(self, slot: Slot, said: str, now: float) -> None:
        """Start a cooldown with one cached cause; reject the waiters with it; let the victims come back."""
        settings = self._settings
        slot.failures += 1
        seconds = min(settings.cooldown_cap_seconds, settings.cooldown_seconds * 2.0 ** min(slot.failures - 1, 60))
        slot.cooldown_until = now + seconds
        slot.cause = LoadFailed(f"{said} (failure {slot.failures}, next try in {seconds:.1f} s)")
        slot.committed = slot.staging = False
        slot.wanted_since = None
        self._end_climb(slot)
        if not self._fleet.up(slot.name):  # else another host of the model serves them
            self.reject_all(slot, self.cached_cause(slot, now), now)
        for other in self._fleet:
            if other.evicted_for == slot.name:
                other.evicted_for = None
                other.restore = True

    def cached_cause(self, slot: Slot, now: float) -> OrchestratorError:
        """What a request gets during the cooldown: the same cause, the time that remains."""
        if slot.cause is not None and math.isinf(slot.cooldown_until):  # asking again does not help
            return LoadFailed(slot.cause.message)
        remaining = slot.cooldown_until - now
        if remaining <= 0:  # only its process still has to go
            remaining = self._settings.retry_after_seconds
        said = slot.cause.message if slot.cause else f"{slot.name} is {slot.state}"
        return LoadFailed(said, retry_after_seconds=remaining)

    def thaw(self, slot: Slot, now: float) -> None:
        """FAILED → COLD once the cooldown is over and the process is gone."""
        if slot.state is _S.FAILED and not slot.cooling(now) and not self._ledger.has(slot.ref.name):
            self._move(slot, _S.COLD, f"cooldown over after {slot.failures} failures", now)

    def lose(self, slot: Slot, cause: object, now: float) -> None:
        """The process died: requeue what it was given, load again at once if it was in use."""
        was = slot.state
        if was is _S.LOADING:
            self.fail(slot, cause, now)
            return
        if was in (_S.UNLOADING, _S.FAILED):
            self.unloaded(slot, now)
            return
        freed = self._ledger.release(slot.ref.name)
        self._desk.expire(now)
        for ticket in self._desk.forget_host(slot.ref):
            self._desk.add(ticket)
        settings = self._settings
        slot.losses = [at for at in slot.losses if now - at < settings.losses_window_seconds] + [now]
        slot.in_flight = 0
        slot.deepening = False
        count = f"{len(slot.losses)} losses in {settings.losses_window_seconds:.0f} s"
        self._move(slot, _S.LOST, f"process died: {_message(cause)}; freed {freed} bytes; {count}", now)
        if len(slot.losses) >= settings.losses_limit:
            said = f"{slot.name} died too often: {count}, the last while {was}: {_message(cause)}"
            self._move(slot, _S.FAILED, said, now)
            self.cool(slot, said, now)
        elif was is _S.READY or was in ON_THE_WAY:
            assert slot.device is not None
            self.start(slot, slot.device, f"lost while {was} ({count}): load again", now)
        else:
            self._move(slot, _S.COLD, f"lost while {was} ({count}), not needed now", now)
        for sibling in self._fleet.of(slot.name):
            if sibling.state is _S.READY:
                self.serve(sibling, now)

    def reject_all(self, slot: Slot, error: OrchestratorError, now: float) -> None:
        for ticket in self._desk.queue(slot.name, now):
            self.reject(slot, ticket.ticket_id, error, now)

    def reject(self, slot: Slot, ticket_id: str, error: OrchestratorError, now: float) -> None:
        self._desk.drop(ticket_id)
        self._effects.reject(ticket_id, error)
        self.note(slot, "rejected", f"{ticket_id}: {error.message}", now)

    # --- a living host found by a restarted controller

    def adopt(self, slot: Slot, ref: HostRef, report: HostReport, device: str, now: float) -> None:
        slot.ref, slot.device, slot.asked_at = ref, device, now
        slot.in_flight, slot.last_used, slot.ready_since = report.in_flight, report.last_used, now
        slot.sleep_asked = slot.unload_after = False
        slot.residual_bytes = report.residual_bytes or slot.residual_bytes
        measured = report.memory_bytes or slot.spec.memory_bytes
        held = {_S.READY: measured, _S.DRAINING: measured}
        held |= dict.fromkeys(ASLEEP, report.residual_bytes)
        state = report.state
        slot.staging = state is _S.LOADING and report.asleep
        slot.process_bytes = report.process_bytes
        if slot.staging:
            held[state] = slot.residual_bytes
        if state in _HALF_DEAD:  # it ends; what its process may hold is booked until it is gone, if there is room
            held[state] = min(slot.residual_bytes, self._ledger.free_bytes(device))
        try:
            self._ledger.book(ref.name, device, held.get(state, max(measured, slot.spec.memory_bytes)))
            reason = f"found {state} with {self._ledger.held_bytes(ref.name)} bytes on {device}"
        except DoesNotFit as error:
            self._ledger.book(ref.name, device, self._ledger.free_bytes(device))  # nobody else gets what it holds
            state, reason = _S.UNLOADING, f"found {state}, but {error}"
        if state in _HALF_DEAD:
            state = _S.UNLOADING
        if state in (_S.READY, _S.DRAINING):
            slot.memory_bytes = measured
        self.enter(slot, state, "adopted", reason, now)
        slot.adopted = True
        if state is _S.READY:
            self.serve(slot, now)
        elif state is _S.DRAINING:
            self._effects.drain(ref, ())
        elif state is _S.UNLOADING:
            self.ask_unload(slot, now)


def _message(error: object) -> str:
    return error.message if isinstance(error, OrchestratorError) else str(error) or type(error).__name__
