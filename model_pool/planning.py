"""Owns what follows from a plan: the policy is asked for each device, and what it says is done. Pure."""

from __future__ import annotations

from model_pool.ledger import Ledger
from model_pool.lifecycle import Lifecycle
from model_pool.prepared import Prepared
from model_pool.slot import Fleet, PoolSettings, Slot
from model_pool.states import NEAREST_FIRST, STARTABLE
from model_pool.views import Views
from policies.errors import CapacityPinned
from policies.residency import Action, ActionKind, Plan, ResidencyPolicy
from policies.types import ModelState

_S = ModelState
_UNDISTURBED = (ActionKind.START, ActionKind.STAGE, ActionKind.REFUSE)


class Planner:
    """Plans again after every event that could change the plan."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, views: Views, life: Lifecycle, prepared: Prepared, policy: ResidencyPolicy,
        settings: PoolSettings,
    ) -> None:  # fmt: skip
        self._fleet, self._ledger, self._views, self._life = fleet, ledger, views, life
        self._prepared, self._policy, self._settings = prepared, policy, settings

    def replan(self, now: float) -> bool:
        """Ask the policy for each device and do what it says. False: there was nothing to do."""
        wanted = self._views.demand(now)
        for device, demand in wanted.items():
            plan = self._policy.plan(self._views.pool(device, demand, now))
            hosts = {wanted.model: wanted.host for wanted in demand}
            for action in plan.actions:
                slot = self._fleet.at(hosts[action.model])
                assert slot is not None
                self._do(action, slot, device, now)
            # Nobody may be kept waiting by a model that only comes back because a load failed, or by a second host.
            if all(action.kind in _UNDISTURBED for action in plan.actions):
                self._restore(device, now)
                self._spread(device, now)
        return any(wanted.values())

    def dry_run(self, slots: tuple[Slot, ...], now: float) -> Plan:
        """What would be done if a request for this model came now, and it is not up. Nothing is done."""
        slot = min(slots, key=lambda s: NEAREST_FIRST.index(s.state))
        device = self._views.device_for(slot, {})
        demand = self._views.demand_for(slot, now)
        return self._policy.plan(self._views.pool(device, [demand], now))

    def _do(self, action: Action, slot: Slot, device: str, now: float) -> None:
        match action.kind:
            case ActionKind.START | ActionKind.STAGE:
                self._start(slot, device, action.reason, now, asleep=action.kind is ActionKind.STAGE)
            case ActionKind.WAIT:
                self._life.decide(slot, action.reason, now)
            case ActionKind.REFUSE:
                self._refuse(slot, action.reason, now)
            case ActionKind.DEEP_SLEEP | ActionKind.SLEEP | ActionKind.UNLOAD:
                slot.committed, slot.device = True, device
                victim = self._fleet.at(action.host or "")
                assert victim is not None
                if action.kind is ActionKind.DEEP_SLEEP:
                    self._life.deepen(victim, action.reason, now)
                else:
                    unload = action.kind is ActionKind.UNLOAD
                    self._life.evict(victim, action.reason, now, unload=unload, target=slot.name)

    def _start(self, slot: Slot, device: str, reason: str, now: float, *, asleep: bool) -> None:
        """Start it, in a prepared process if there is one; those whose bytes it needs end first."""
        cold = slot.state is _S.COLD and slot.spec.preparable
        wanted = slot.residual_bytes if asleep else slot.need_bytes
        have = self._ledger.held_bytes(slot.ref.name) + self._ledger.free_bytes(device)
        short = wanted - have - (self._prepared.first_bytes(device) if cold else 0)
        if short > 0:
            self._prepared.give_way(device, now)
            self._life.decide(slot, f"{reason}; {short} bytes of prepared processes are being given back", now)
            return
        process = self._prepared.take(device) if cold else ""
        begin = self._life.stage if asleep else self._life.start
        begin(slot, device, reason, now, process)

    def _refuse(self, slot: Slot, reason: str, now: float) -> None:
        elsewhere = self._views.elsewhere(slot)
        slot.committed = False
        if elsewhere is not None:  # the next planning sends a cold model there
            if slot.state is not _S.COLD:
                self._life.unload(slot, f"{reason}; moves to {elsewhere}", now)
            return
        slot.wanted_since = None
        self._life.decide(slot, reason, now)
        retry = self._settings.retry_after_seconds
        self._life.reject_all(slot, CapacityPinned(reason, retry_after_seconds=retry), now)

    def _restore(self, device: str, now: float) -> None:
        """Bring back what was evicted for a model that then failed, as far as it fits."""
        for slot in self._fleet:
            if slot.restore and slot.device == device and self._able(slot, now):
                extra, free = self._views.extra_bytes(slot), self._ledger.free_bytes(device)
                if extra <= free:
                    reason = f"restored: needs {extra} more bytes, {free} free on {device}"
                    self._life.start(slot, device, reason, now)

    def _spread(self, device: str, now: float) -> None:
        """Start further hosts of models that are up, as far as bytes are to spare: they evict nobody."""
        for slot in self._fleet:
            if slot.ref.number == 0 or not self._able(slot, now):
                continue
            siblings = self._fleet.of(slot.name)
            if not any(s.state is _S.READY for s in siblings) or self._views.device_for(slot, {}) != device:
                continue
            extra, free = self._views.extra_bytes(slot), self._ledger.free_bytes(device)
            if extra <= free:
                reason = f"host {slot.ref.number + 1} of {len(siblings)}: needs {extra} more bytes, {free} free"
                self._life.start(slot, device, reason, now)

    @staticmethod
    def _able(slot: Slot, now: float) -> bool:
        return slot.state in STARTABLE and not slot.deepening and not slot.cooling(now)
