"""Owns the decision who holds device memory: one frozen PoolView in, one frozen Plan with reasons out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from policies.ordering import tier_then_arrival
from policies.types import DemandView, HostView, ModelState, PoolView

PROCESS_SECONDS = 3.0  # that a process takes to start
WORTH_DEEPER = 4  # letting go of a sleeping model must free a fourth of what is short
ASLEEP = (ModelState.SLEEPING, ModelState.DEEP_SLEEP)
GIVING_BACK = (ModelState.DRAINING, ModelState.UNLOADING)  # their bytes come back without a new decision


class ActionKind(StrEnum):
    """What the pool shall do."""

    START = "start"  # load or wake the model now: its bytes are free
    STAGE = "stage"  # load the model asleep, while others keep the memory it will need
    SLEEP = "sleep"  # drain the host and put it to sleep
    DEEP_SLEEP = "deep_sleep"  # of a sleeping host, keep the bare process
    UNLOAD = "unload"  # drain the host if it is ready, then end its process: the residual is needed too
    WAIT = "wait"  # nothing to do now; a later event or tick will change that
    REFUSE = "refuse"  # can never be satisfied while the pinned models stay


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a plan."""

    kind: ActionKind
    model: str  # the model it is done for
    reason: str  # with the numbers it was decided on
    host: str | None = None  # the victim of SLEEP, DEEP_SLEEP and UNLOAD


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do on one device now, in order."""

    actions: tuple[Action, ...] = ()


class ResidencyPolicy(Protocol):
    """Decides who holds the memory of one device."""

    def plan(self, view: PoolView) -> Plan: ...


@dataclass(frozen=True, slots=True)
class _Victim:
    host: HostView
    kind: ActionKind
    freed_bytes: int


@dataclass(slots=True)
class _Room:
    """Bytes as they change while a plan is being made."""

    free: int  # free now
    coming: int  # being given back
    spare: int  # what may be taken now without taking it from the demand room is being made for
    target: str | None = None  # the demand room is being made for
    later: dict[str, int] = field(default_factory=dict)  # of ``spare``: what hosts will give back for the target
    started: set[str] = field(default_factory=set)  # models this plan starts: asleep a moment ago, no victims now


class Lru:
    """Least recently used, by bytes.

    Demand is served by tier, then arrival (aged by ``aging_seconds``); a committed demand goes first, so that a new
    request for its victim cannot take the bytes back (ollama#17408). Three strategies, by what measured bytes allow:

    - resident together: all that fits is started;
    - scheduled swap: a cold model whose process fits beside the others is loaded asleep while they serve on, and is
      then like one that sleeps;
    - direct swap: for the first that does not fit room is made, one at a time.

    Victims: lowest tier first, idle before busy, least recently used first; of these a set with nothing superfluous in
    it. Only when sleeping does not free enough are sleeping hosts cut down to their process, and then processes ended.
    """

    def __init__(self, aging_seconds: float = math.inf) -> None:
        self._aging_seconds = aging_seconds

    def plan(self, view: PoolView) -> Plan:
        free = view.budget_bytes - view.booked_bytes
        coming = sum(host.resident_bytes for host in view.hosts if host.state in GIVING_BACK)
        room = _Room(free=free, coming=coming, spare=free + coming)
        actions: list[Action] = []
        for demand in sorted(view.demand, key=lambda d: self._rank(d, view.now)):
            actions += self._serve(view, demand, room)
        return Plan(tuple(actions))

    def _rank(self, demand: DemandView, now: float) -> tuple[bool, tuple[int, float], str]:
        key = tier_then_arrival(demand.best_tier, demand.oldest_arrival, now, self._aging_seconds)
        return not demand.committed, key, demand.model

    def _serve(self, view: PoolView, demand: DemandView, room: _Room) -> list[Action]:
        pinned = sum(_kept_bytes(host) for host in view.hosts if host.pinned and host.model != demand.model)
        if demand.need_bytes + pinned > view.budget_bytes:
            return [Action(ActionKind.REFUSE, demand.model, _refusal(view, demand, pinned))]
        own = sum(host.residual_bytes for host in view.hosts if _is_for(host, demand))
        extra = demand.need_bytes - own
        if demand.awaits_others:
            room.free -= extra
            room.spare -= extra
            said = f"needs {extra} more bytes, and tries again when {room.coming} being freed on {view.device} are free"
            return [Action(ActionKind.WAIT, demand.model, said)]
        spare = room.spare - room.later.get(demand.host, 0)  # what it holds itself it does not give back by starting
        if extra <= min(room.free, spare):
            reason = (
                f"needs {extra} more bytes, {room.free} of {view.budget_bytes} free on {view.device}, "
                f"{demand.waiting} waiting"
            )
            room.free -= extra
            room.spare -= extra
            room.started.add(demand.model)
            return [Action(ActionKind.START, demand.model, reason)]
        if demand.start_bytes is not None and demand.start_bytes <= min(room.free, spare):
            room.free -= demand.start_bytes
            room.spare -= demand.start_bytes
            reason = (
                f"needs {extra} more bytes, {room.free + demand.start_bytes} free on {view.device}: loaded in the "
                f"background into {demand.start_bytes}, others serve on meanwhile"
            )
            return [Action(ActionKind.STAGE, demand.model, reason)]
        if room.target is not None:
            reason = f"needs {extra} more bytes, {room.free} free on {view.device}; {room.target} is served first"
            return [Action(ActionKind.WAIT, demand.model, reason)]
        room.target = demand.model
        return self._make_room(view, demand, extra, room)

    def _make_room(self, view: PoolView, demand: DemandView, extra: int, room: _Room) -> list[Action]:
        shortage = extra - room.free - room.coming
        spared = {demand.model, *room.started}
        others = [host for host in view.hosts if host.model not in spared and not host.pinned]
        victims = _choose(view, others, shortage) if shortage > 0 else ()
        said = (
            f"{demand.model} needs {extra} more bytes, {room.free} free and {room.coming} being freed on {view.device}"
        )
        if victims:
            room.spare = room.free + room.coming + sum(victim.freed_bytes for victim in victims) - extra
            return [_evict(victim, demand, view, f"{said}: short by {shortage}") for victim in victims]
        room.spare = room.free + room.coming - extra
        if shortage > 0:  # what it waits for is none of those bytes, and others may have them meanwhile
            later = [host for host in others if host.state not in GIVING_BACK]
            room.later = {host.host: host.resident_bytes + host.residual_bytes for host in later}
            room.spare += sum(room.later.values())
        if shortage > 0:
            said += f": short by {shortage}, {_why_not(view, others)}"
        return [Action(ActionKind.WAIT, demand.model, said)]


def _is_for(host: HostView, demand: DemandView) -> bool:
    return host.host == demand.host if demand.host else host.model == demand.model


def _kept_bytes(host: HostView) -> int:
    """What a pinned host keeps from others for good."""
    return host.residual_bytes + (0 if host.state in GIVING_BACK else host.resident_bytes)


def _refusal(view: PoolView, demand: DemandView, pinned_bytes: int) -> str:
    return (
        f"{demand.model} needs {demand.need_bytes} bytes, but pinned models keep {pinned_bytes} of the "
        f"{view.budget_bytes} bytes of {view.device}; unpin one"
    )


def _why_not(view: PoolView, others: Sequence[HostView]) -> str:
    dwelling = [h for h in others if h.state is ModelState.READY and not _may_sleep(view, h)]
    busy = sorted(h.model for h in others if h.state in (ModelState.LOADING, ModelState.WARMING, ModelState.WAKING))
    if dwelling:
        first = min(dwelling, key=lambda h: h.ready_since + _dwell(view, h))
        dwell = _dwell(view, first)
        return f"{first.model} stays until t={first.ready_since + dwell:.1f} s (minimum residence {dwell} s)"
    return f"waiting for {', '.join(busy) or 'bytes to be given back'}"


def _may_sleep(view: PoolView, host: HostView) -> bool:
    return host.state is ModelState.READY and view.now - host.ready_since >= _dwell(view, host)


def _dwell(view: PoolView, host: HostView) -> float:
    return view.min_resident_seconds if host.min_resident_seconds is None else host.min_resident_seconds


def _worth(host: HostView) -> tuple[int, int, bool, float, str]:
    """Sort key: the host that is missed least comes first."""
    return -host.tier, min(host.waiting, 1), host.in_flight > 0, host.last_used, host.host


def _choose(view: PoolView, others: Sequence[HostView], shortage: int) -> tuple[_Victim, ...]:
    """Victims that free ``shortage`` bytes, none superfluous; empty when no set can do it now."""
    ready = sorted((host for host in others if _may_sleep(view, host)), key=_worth)
    asleep = sorted((host for host in others if host.state in ASLEEP), key=_worth)
    steps = [_Victim(host, ActionKind.SLEEP, host.resident_bytes) for host in ready]
    deeper = [_Victim(host, ActionKind.DEEP_SLEEP, _freed_by_deep_sleep(host)) for host in asleep]
    steps += [victim for victim in deeper if victim.freed_bytes * WORTH_DEEPER >= shortage]
    steps += [_Victim(host, ActionKind.UNLOAD, host.resident_bytes + host.residual_bytes) for host in (*asleep, *ready)]
    chosen: dict[str, _Victim] = {}
    freed = 0
    for step in steps:  # each takes the place of what its host was to do before
        if freed >= shortage:
            break
        before = chosen.get(step.host.host)
        freed += step.freed_bytes - (before.freed_bytes if before else 0)
        chosen[step.host.host] = step
    if freed < shortage or _soon_without_ending(view, others, chosen, shortage):
        return ()
    return _prune(tuple(chosen.values()), freed - shortage)


def _soon_without_ending(
    view: PoolView, others: Sequence[HostView], chosen: Mapping[str, _Victim], shortage: int
) -> bool:
    """Would waiting for a minimum residence spare a process that is to end? To start it again takes longer."""
    if all(victim.kind is not ActionKind.UNLOAD for victim in chosen.values()):
        return False
    soon = view.now + PROCESS_SECONDS
    ready = [h for h in others if h.state is ModelState.READY and h.ready_since + _dwell(view, h) <= soon]
    return sum(host.resident_bytes for host in ready) >= shortage


def _freed_by_deep_sleep(host: HostView) -> int:
    if host.process_bytes is None or host.state is not ModelState.SLEEPING:
        return 0
    return max(0, host.residual_bytes - host.process_bytes)


def _prune(victims: tuple[_Victim, ...], excess_bytes: int) -> tuple[_Victim, ...]:
    """Let go again what is not needed, the most missed first."""
    kept = []
    for victim in reversed(victims):
        if victim.freed_bytes <= excess_bytes:
            excess_bytes -= victim.freed_bytes
        else:
            kept.append(victim)
    return tuple(reversed(kept))


def _evict(victim: _Victim, demand: DemandView, view: PoolView, said: str) -> Action:
    host = victim.host
    reason = (
        f"{said}; {host.model} frees {victim.freed_bytes} bytes, {host.in_flight} in flight, "
        f"tier {host.tier.name.lower()}, last used {max(0.0, view.now - host.last_used):.1f} s ago"
    )
    return Action(victim.kind, demand.model, reason, host.host)
