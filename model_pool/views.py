"""Owns the frozen pictures taken of the pool: what a policy decides on, what ``ps`` shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from model_pool.effects import ModelStatus, Wait
from model_pool.ledger import Ledger
from model_pool.prepared import Prepared
from model_pool.slot import Fleet, PoolSettings, Slot
from model_pool.states import ASLEEP, NEAREST_FIRST, STARTABLE
from model_pool.tickets import TicketDesk
from policies.ordering import tier_then_arrival
from policies.types import DemandView, HostView, ModelState, PoolView, Tier


class Views:
    """Reads slots, ledger and tickets; changes nothing."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, desk: TicketDesk, prepared: Prepared, settings: PoolSettings
    ) -> None:
        self._fleet = fleet
        self._prepared = prepared
        self._ledger = ledger
        self._desk = desk
        self._devices = ledger.devices
        self._settings = settings

    def min_resident_seconds(self, slot: Slot) -> float:
        own = slot.spec.min_resident_seconds
        return self._settings.min_resident_seconds if own is None else own

    def in_flight(self, slot: Slot, now: float) -> int:
        """Generations and tickets not yet redeemed: a host with either is busy."""
        return slot.in_flight + len(self._desk.unredeemed(slot.ref, now))

    def pool(self, device: str, demand: Iterable[DemandView], now: float) -> PoolView:
        hosts = (self._host(slot, now) for slot in self._fleet if self._is_on(slot, device))
        budget = self._ledger.budget_bytes(device)
        return PoolView(
            now=now,
            device=device,
            budget_bytes=budget,
            booked_bytes=budget - self._ledger.free_bytes(device) - self._prepared.bytes_on(device),
            hosts=tuple(hosts),
            demand=tuple(demand),
            min_resident_seconds=self._settings.min_resident_seconds,
        )

    def demand(self, now: float) -> dict[str, list[DemandView]]:
        """Actionable demand by device, each model on one device."""
        wanted = [d for model in self._fleet.models if (d := self._demand(model, now)) is not None]
        wanted.sort(key=lambda d: (not d.committed, self._rank(d, now)))
        claimed_bytes = dict.fromkeys(self._devices, 0)
        by_device: dict[str, list[DemandView]] = {device: [] for device in self._devices}
        for demand in wanted:
            slot = self._fleet.at(demand.host)
            assert slot is not None
            device = self.device_for(slot, claimed_bytes)
            claimed_bytes[device] += self.extra_bytes(slot)
            by_device[device].append(demand)
        return by_device

    def demand_for(self, slot: Slot, now: float) -> DemandView:
        """As if one request for it came now."""
        start = self._start_bytes(slot)
        return DemandView(slot.name, slot.need_bytes, now, Tier.STANDARD, 1, host=slot.ref.name, start_bytes=start)

    def extra_bytes(self, slot: Slot) -> int:
        """What it would take beside what it holds, to be ready."""
        return slot.need_bytes - self._ledger.held_bytes(slot.ref.name)

    def reachable_bytes(self, slot: Slot, device: str) -> int:
        """What this model could ever have on a device while the pinned models stay."""
        pinned = sum(
            self._ledger.held_bytes(other.ref.name)
            for other in self._fleet
            if other is not slot and other.pinned and self._is_on(other, device)
        )
        return self._ledger.budget_bytes(device) - pinned

    def elsewhere(self, slot: Slot) -> str | None:
        """Another device that could hold this model, if one could."""
        others = (d for d in self._devices if d != slot.device)
        return next((d for d in others if self.reachable_bytes(slot, d) >= slot.need_bytes), None)

    def status(self, slot: Slot, now: float) -> ModelStatus:
        return ModelStatus(
            model=slot.name,
            state=slot.state,
            memory_bytes=self._ledger.held_bytes(slot.ref.name),
            residual_bytes=slot.residual_bytes,
            in_flight=self.in_flight(slot, now),
            waiting=self._desk.waiting(slot.name) if slot.ref.number == 0 else 0,  # said once per model
            last_used=slot.last_used,
            cause=slot.cause.message if slot.cause else None,
            host=slot.ref.name,
            epoch=slot.ref.epoch,
            device=slot.device,
            since=slot.since,
            pinned=slot.pinned,
            cooldown_until=slot.cooldown_until,
            keep_alive_seconds=None if math.isinf(slot.keep_alive_seconds) else slot.keep_alive_seconds,
            actor=slot.ref.actor,
            load_seconds=slot.load_seconds,
            wake_seconds=slot.wake_seconds,
        )

    def waiting_for(self, slot: Slot, now: float) -> str:
        """Why a request still waits, for its error message."""
        free = ", ".join(f"{self._ledger.free_bytes(d)} bytes free on {d}" for d in self._devices)
        return (
            f"{slot.name} is {slot.state} for {now - slot.since:.1f} s: needs {slot.need_bytes} bytes, {free}, "
            f"{self._desk.waiting(slot.name)} waiting; {slot.last_decision or 'it goes on without this request'}"
        )

    def waits(self, model: str, now: float) -> dict[str, Wait]:
        """What those may be told who wait for a model, by ticket."""
        slot = min(self._fleet.of(model), key=lambda s: NEAREST_FIRST.index(s.state))
        queue = self._desk.queue(model, now)
        eta = self.eta_seconds(slot, now)
        return {
            ticket.ticket_id: Wait(slot.state, position, len(queue), eta)
            for position, ticket in enumerate(queue, start=1)
        }

    def eta_seconds(self, slot: Slot, now: float) -> float | None:
        """How long until it could be ready, if all takes as long as the last time and room is there at once."""
        match slot.state:
            case ModelState.COLD | ModelState.DEEP_SLEEP:
                return slot.load_seconds
            case ModelState.SLEEPING:
                return slot.wake_seconds
            case ModelState.LOADING | ModelState.WARMING:
                known = slot.load_seconds
            case ModelState.WAKING:
                known = slot.wake_seconds
            case _:
                return None
        left = None if known is None else known - (now - slot.asked_at)
        return left if left is None or left > 0 else None  # it takes longer this time

    def _rank(self, demand: DemandView, now: float) -> tuple[int, float]:
        return tier_then_arrival(demand.best_tier, demand.oldest_arrival, now, self._settings.aging_seconds)

    def _is_on(self, slot: Slot, device: str) -> bool:
        return slot.device == device and self._ledger.has(slot.ref.name)

    @staticmethod
    def _goes_whole(slot: Slot) -> bool:
        return slot.state is ModelState.DRAINING and slot.unload_after

    def _demand(self, model: str, now: float) -> DemandView | None:
        """None when nobody wants it, a host is up or on its way, or nothing can be done for it now."""
        slot = self._next_host(model, now)
        if slot is None or self._fleet.up(model):
            return None
        queue = self._desk.queue(model, now)
        arrivals = [ticket.arrival for ticket in queue]
        if slot.wanted_since is not None:
            arrivals.append(slot.wanted_since)
        if not arrivals and not slot.committed:  # a load is not tied to who asked for it
            return None
        return DemandView(
            model=slot.name,
            need_bytes=slot.need_bytes,
            oldest_arrival=min(arrivals, default=now),
            best_tier=min((ticket.tier for ticket in queue), default=Tier.STANDARD),
            waiting=len(queue),
            committed=slot.committed,
            host=slot.ref.name,
            awaits_others=self._awaits_others(slot),
            start_bytes=self._start_bytes(slot),
        )

    @staticmethod
    def _start_bytes(slot: Slot) -> int | None:
        """For a background load; None where there is no use in one, or the last try found no memory."""
        able = slot.spec.background and slot.state is ModelState.COLD and not slot.climbed
        return slot.residual_bytes if able else None

    def _next_host(self, model: str, now: float) -> Slot | None:
        """The host to start for a model: the one room is being made for, else one asleep, else a cold one."""
        slots = (slot for slot in self._fleet.of(model) if slot.state in STARTABLE and not slot.cooling(now))
        able = [slot for slot in slots if not slot.deepening]
        return min(able, key=lambda s: (not s.committed, NEAREST_FIRST.index(s.state), s.ref.number), default=None)

    def _awaits_others(self, slot: Slot) -> bool:
        """The books have room for it, the device had not: those who give back for it must have done so."""
        giving = (ModelState.DRAINING, ModelState.UNLOADING)
        return slot.climbed and any(o.device == slot.device and o.state in giving for o in self._fleet)

    def device_for(self, slot: Slot, claimed_bytes: Mapping[str, int]) -> str:
        """A living or committed host stays where it is; others go where there is room, or could be."""
        if slot.device is not None and (slot.state is not ModelState.COLD or slot.committed):
            return slot.device

        def worth(device: str) -> tuple[bool, bool, int]:
            free = self._ledger.free_bytes(device) - claimed_bytes.get(device, 0)
            return free >= slot.need_bytes, self.reachable_bytes(slot, device) >= slot.need_bytes, free

        return max(self._devices, key=worth)

    def _host(self, slot: Slot, now: float) -> HostView:
        held = self._ledger.held_bytes(slot.ref.name)
        kept = min(slot.residual_bytes, held)
        state = slot.state
        if slot.deepening:
            state = ModelState.DRAINING
            kept = min(held if slot.process_bytes is None else slot.process_bytes, held)
        elif state in ASLEEP or slot.staging:
            kept = held
        elif state in (ModelState.UNLOADING, ModelState.FAILED) or self._goes_whole(slot):
            kept = 0
        return HostView(
            host=slot.ref.name,
            model=slot.name,
            state=ModelState.UNLOADING if state is ModelState.FAILED else state,
            device=slot.device or "",
            resident_bytes=held - kept,
            residual_bytes=kept,
            in_flight=self.in_flight(slot, now),
            last_used=slot.last_used,
            ready_since=slot.ready_since,
            pinned=slot.pinned,
            waiting=self._desk.waiting(slot.name),
            tier=slot.tier,
            min_resident_seconds=slot.spec.min_resident_seconds if slot.dwells else 0.0,
            process_bytes=slot.process_bytes,
        )
