"""Owns the prepared processes: started, everything imported, no model yet. A cold model's host begins in one.

They are made when nobody waits, and end as soon as anybody wants their bytes. Pure: the pool's effects do both.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_pool.effects import Effects, HostRef
from model_pool.ledger import Ledger
from model_pool.slot import Fleet, PoolSettings
from model_pool.states import ON_THE_WAY
from policies.types import ModelState

MODEL = "(prepared)"  # no model can be called so


@dataclass(slots=True)
class _Process:
    ref: HostRef
    device: str
    asked_at: float
    ready: bool = False
    ending: bool = False


class Prepared:
    """At most ``prepared_hosts`` on each device, and no more than there are cold models to use them."""

    def __init__(self, fleet: Fleet, ledger: Ledger, effects: Effects, settings: PoolSettings) -> None:
        self._fleet, self._ledger, self._effects, self._settings = fleet, ledger, effects, settings
        self._processes: dict[HostRef, _Process] = {}
        self._number = settings.first_epoch
        self._failures = 0
        self._not_before = 0.0

    def refill(self, now: float, *, idle: bool) -> None:
        """One more where there is room and, ``idle``, nobody wants a model; what is too many ends."""
        useful = sum(s.state is ModelState.COLD and s.spec.preparable and not s.cooling(now) for s in self._fleet)
        wanted = min(self._settings.prepared_hosts, useful)
        for device in self._ledger.devices:
            mine = [p for p in self._processes.values() if p.device == device and not p.ending]
            for process in mine[wanted:]:
                self._end(process, now)
            starting = any(not p.ready for p in mine) or any(s.state in ON_THE_WAY for s in self._fleet)
            fits = self._settings.prepared_bytes <= self._ledger.free_bytes(device)
            if idle and fits and not starting and len(mine) < wanted and now >= self._not_before:
                self._make(device, now)
        for process in self._processes.values():
            if process.ending and now - process.asked_at >= self._settings.answer_timeout_seconds:
                self._end(process, now)

    def take(self, device: str) -> str:
        """The name of a process that shall become a host; its bytes are free to be booked. Empty: there is none."""
        process = self._first(device)
        if process is None:
            return ""
        del self._processes[process.ref]
        self._ledger.release(process.ref.name)
        return process.ref.name

    def first_bytes(self, device: str) -> int:
        """What ``take`` would free; 0 where there is none to take."""
        process = self._first(device)
        return self._ledger.held_bytes(process.ref.name) if process else 0

    def bytes_on(self, device: str) -> int:
        """What they hold, or are giving back; free for anybody who can wait a moment."""
        return sum(self._ledger.held_bytes(p.ref.name) for p in self._processes.values() if p.device == device)

    def give_way(self, device: str, now: float) -> None:
        """End all on a device: somebody wants the bytes."""
        for process in self._processes.values():
            if process.device == device and not process.ending:
                self._end(process, now)
                self._not_before = now + self._settings.prepared_pause_seconds

    def ready(self, ref: HostRef, measured_bytes: int) -> None:
        process = self._processes.get(ref)
        if process is not None:
            process.ready = True
            self._failures = 0
            self._ledger.settle(ref.name, min(measured_bytes, self._settings.prepared_bytes))

    def gone(self, ref: HostRef, now: float) -> bool:
        """Its process is no more. False: it was none of these."""
        process = self._processes.pop(ref, None)
        if process is None:
            return False
        self._ledger.release(ref.name)
        if not process.ending:  # it died by itself: the next one may too
            self._failures += 1
            pause = self._settings.cooldown_seconds * 2.0 ** min(self._failures - 1, 60)
            self._not_before = now + min(self._settings.cooldown_cap_seconds, pause)
        return True

    def _first(self, device: str) -> _Process | None:
        mine = (p for p in self._processes.values() if p.device == device and p.ready and not p.ending)
        return next(mine, None)

    def _make(self, device: str, now: float) -> None:
        self._number += 1
        ref = HostRef(MODEL, self._number, 0)
        self._ledger.book(ref.name, device, self._settings.prepared_bytes)
        self._processes[ref] = _Process(ref, device, now)
        self._effects.prepare(ref, device)

    def _end(self, process: _Process, now: float) -> None:
        process.ending, process.asked_at = True, now
        self._effects.unload(process.ref)
