"""Owns what becomes of hosts that nobody waits for: they fall asleep when their time is over, and a default model that
a burst of others had displaced comes back. Pure; what it decides, Lifecycle does.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_pool.ledger import Ledger
from model_pool.lifecycle import Lifecycle
from model_pool.slot import Fleet, PoolSettings, Slot
from model_pool.states import ON_THE_WAY, STARTABLE
from model_pool.views import Views
from policies.types import ModelState

_S = ModelState


class Idling:
    """Asked at every tick."""

    def __init__(self, fleet: Fleet, ledger: Ledger, views: Views, life: Lifecycle, settings: PoolSettings) -> None:
        self._fleet, self._ledger, self._views, self._life, self._settings = fleet, ledger, views, life, settings

    def tick(self, now: float) -> None:
        for model in self._fleet.models:
            self._put_to_sleep(self._fleet.of(model), now)
        for slot in self._fleet:
            if slot.displaced and slot.state in STARTABLE and slot.wanted_since is None and not slot.cooling(now):
                self._reclaim(slot, now)

    def promote(self, now: float) -> None:
        """Nobody wants anything: wake the model used last of those pushed out, if nobody has to move for it."""
        if any(slot.state in ON_THE_WAY or slot.state is _S.DRAINING for slot in self._fleet):
            return
        out = [slot for slot in self._fleet if slot.pushed_out and slot.state is _S.SLEEPING and not slot.deepening]
        for slot in sorted(out, key=lambda slot: -slot.last_used):
            assert slot.device is not None
            extra = self._views.extra_bytes(slot)
            free = self._ledger.free_bytes(slot.device)
            if extra <= free and not slot.cooling(now):
                slot.promoted = True
                self._life.start(slot, slot.device, f"promoted: needs {extra} more bytes, {free} idle", now)
                return

    def _put_to_sleep(self, slots: Sequence[Slot], now: float) -> None:
        """A model by its keep_alive: that of its last request, else its own. All its hosts together.

        One by one, an idle host would fall asleep, and be started again as the further host of one in use, for ever.
        """
        ready = [slot for slot in slots if slot.state is _S.READY]
        if not ready or any(slot.state in ON_THE_WAY for slot in slots):
            return
        if any(slot.pinned or self._views.in_flight(slot, now) for slot in ready):
            return
        idle = now - max(max(slot.last_used, slot.ready_since) for slot in ready)
        keep_alive = max(ready, key=lambda slot: slot.last_used).keep_alive_seconds
        stays = any(now - slot.ready_since < self._views.min_resident_seconds(slot) for slot in ready)
        if idle >= keep_alive and not stays:
            for slot in ready:
                reason = f"idle for {idle:.1f} s, keep_alive is {keep_alive:g} s"
                self._life.evict(slot, reason, now, unload=False)

    def _reclaim(self, slot: Slot, now: float) -> None:
        """It wants its place back once all others on its device have been idle for ``reclaim_after_seconds``.

        Models that are loaded from the start do not displace each other so: they would go on for ever.
        """
        device = slot.device or self._views.device_for(slot, {})
        others = [other for other in self._fleet if other is not slot and other.device == device]
        if any(other.state in ON_THE_WAY or other.state is _S.DRAINING for other in others):
            return
        extra = self._views.extra_bytes(slot)
        free = self._ledger.free_bytes(device) - self._promised_bytes(device)
        if extra <= free:
            slot.wanted_since = now
            self._life.decide(slot, f"wanted back: needs {extra} more bytes, {free} free on {device}", now)
            return
        ready = [other for other in others if other.state is _S.READY]
        idle = min((now - max(o.last_used, o.ready_since) for o in ready), default=0.0)
        busy = any(self._views.in_flight(other, now) for other in ready)
        keep = sum(other.need_bytes for other in ready if other.spec.preload or other.pinned)
        keep += self._promised_bytes(device)
        fits = keep + slot.need_bytes <= self._ledger.budget_bytes(device)
        if not busy and fits and idle >= self._settings.reclaim_after_seconds:
            slot.wanted_since = now
            self._life.decide(slot, f"wanted back: the others on {device} have been idle for {idle:.1f} s", now)

    def _promised_bytes(self, device: str) -> int:
        """What those will take that are wanted back already."""
        wanted = [slot for slot in self._fleet if slot.wanted_since is not None and slot.state in STARTABLE]
        mine = [slot for slot in wanted if (slot.device or self._views.device_for(slot, {})) == device]
        return sum(self._views.extra_bytes(slot) for slot in mine)
