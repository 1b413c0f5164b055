"""Owns what is tried when a device turns out to have less memory than the books say, before anybody is told of it.

KV pools shrink, idle models fall asleep, sleeping processes and prepared ones end; then the model is tried once more.
Should that fail too, its waiters get the engine's own error. Pure.
"""

from __future__ import annotations

from model_pool.lifecycle import Lifecycle
from model_pool.prepared import Prepared
from model_pool.slot import Fleet, Slot
from model_pool.states import ASLEEP
from model_pool.views import Views
from policies.errors import OutOfMemory
from policies.types import ModelState


class Ladder:
    """Asked once for every failed load or wake."""

    def __init__(self, fleet: Fleet, views: Views, life: Lifecycle, prepared: Prepared) -> None:
        self._fleet, self._views, self._life, self._prepared = fleet, views, life, prepared

    def climb(self, slot: Slot, error: object, now: float) -> bool:
        """True: others give back what they can, and ``slot`` will be tried again."""
        if not isinstance(error, OutOfMemory) or slot.climbed or slot.device is None:
            return False
        device = slot.device
        others = [other for other in self._fleet if other is not slot and other.device == device and not other.pinned]
        busy = [o for o in others if o.state is ModelState.READY and self._views.in_flight(o, now)]
        idle = [o for o in others if o.state is ModelState.READY and o not in busy]
        asleep = [o for o in others if o.state in ASLEEP]
        given = f"{len(busy)} KV pools shrink, {len(idle)} idle models sleep, {len(asleep)} sleeping processes end"
        self._life.try_again(slot, error, given, now)
        self._prepared.give_way(device, now)
        for other in busy:
            self._life.shrink(other)
        for other in (*idle, *asleep):
            reason = f"{slot.name} found no memory on {device} while {other.need_bytes} bytes were booked for this one"
            self._life.evict(other, reason, now, unload=False, target=slot.name)
        return True
