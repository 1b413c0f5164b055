"""Owns the plain data of the pool and the protocol through which its core acts on the world.

Every effect is fire-and-forget: it must not block, and must not call the pool back before it returns. Its outcome comes
later as an event of the pool. ``now``, ``at``, ``expires`` and ``last_used`` are seconds of one clock, the pool's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from policies.errors import OrchestratorError
from policies.types import ModelState


@dataclass(frozen=True, slots=True)
class HostRef:
    """One life of one engine host. A host that is started again has the same name and the next epoch."""

    model: str
    number: int
    epoch: int
    process: str = field(default="", compare=False)  # the name of its actor; "": the host's own

    @property
    def name(self) -> str:
        return f"host:{self.model}:{self.number}"

    @property
    def actor(self) -> str:
        """The name Ray knows it by."""
        return self.process or self.name


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the pool must know of a configured model."""

    name: str
    memory_bytes: int  # device bytes of a resident host, its process residual included
    residual_estimate_bytes: int = 0  # what its process keeps while asleep, until that is measured
    pinned: bool = False  # never evicted for another model
    load_timeout_seconds: float = 600.0  # for a load or a wake
    max_waiting: int = 1000  # requests; more get QueueFull
    problem: str = ""  # why it cannot be loaded, known before the first request
    replicas: int = 1  # hosts; those after the first are started when bytes are to spare
    preload: bool = False  # loaded at start; displaced by others, it comes back when they are idle
    keep_alive_seconds: float = math.inf  # idle for so long, it is put to sleep
    min_resident_seconds: float | None = None  # not put to sleep for another earlier; None: as the pool says
    background: bool = False  # may be loaded asleep while others keep the memory it will need
    preparable: bool = False  # a prepared process can become its host


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a host says about itself."""

    state: ModelState
    memory_bytes: int  # measured when ready, residual included; 0: not measured
    residual_bytes: int  # measured while asleep
    in_flight: int = 0  # generations
    last_used: float = 0.0
    redeemed: tuple[str, ...] = ()  # tickets whose requests have arrived
    keep_alive_seconds: float | None = None  # what its last request asked for; None: nothing
    measured_bytes: int = 0  # what its process holds now; 0: not measured
    process_bytes: int | None = None  # what it would keep in deep sleep; None: no less than residual_bytes
    promised_residual_bytes: int | None = None  # that its load allowed it to keep while asleep; None: not loaded
    asleep: bool = False  # LOADING: in the background, to end asleep


@dataclass(frozen=True, slots=True)
class Placement:
    """The answer to a ticket: go to this host before ``expires``."""

    ticket_id: str
    host: HostRef
    expires: float


@dataclass(frozen=True, slots=True)
class RoutingEntry:
    host: HostRef
    state: ModelState


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """The READY hosts of each model. ``version`` counts up within one life of the controller."""

    version: int
    entries: Mapping[str, tuple[RoutingEntry, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """One transition or decision, with the numbers it was made on."""

    at: float
    model: str
    host: str
    kind: str  # transition | decision | rejected | adopted | ignored | drift
    old: ModelState
    new: ModelState  # same as old unless kind is transition or adopted
    reason: str
    bytes: int  # held on the device after it
    seconds: float  # spent in ``old``
    waiting: int  # requests waiting for the model


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One line of ``ps``."""

    model: str
    state: ModelState
    memory_bytes: int  # held on the device now
    residual_bytes: int
    in_flight: int  # generations and tickets not yet redeemed
    waiting: int
    last_used: float
    cause: str | None  # of the last failure, until it is ready again
    host: str
    epoch: int
    device: str | None
    since: float  # when it entered ``state``
    pinned: bool
    cooldown_until: float  # new requests are rejected until then
    keep_alive_seconds: float | None  # idle for so long, it is put to sleep; None: never
    actor: str = ""  # the name Ray knows it by
    load_seconds: float | None = None  # the last time; None: not yet
    wake_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """What a request waits for."""

    state: ModelState  # of the model
    position: int  # among those who wait for it, from 1
    waiting: int
    eta_seconds: float | None  # until the model is ready, as long as it took last time; None: nobody knows


class Effects(Protocol):
    """What the core can do. The comment names the events that answer."""

    def start_host(self, ref: HostRef, device: str, asleep: bool) -> None:
        """New process, or the prepared one that ``ref.process`` names → on_warming, on_loaded | on_failed.

        ``asleep``: without the memory of a ready host → on_loaded with a report of SLEEPING or DEEP_SLEEP.
        After on_failed the pool asks for unload in any case.
        """

    def load(self, ref: HostRef) -> None:
        """From deep sleep; same outcomes as ``start_host``."""

    def prepare(self, ref: HostRef, device: str) -> None:
        """A process without a model → on_prepared | on_lost."""

    def drain(self, ref: HostRef, tickets: tuple[str, ...]) -> None:
        """Finish what it has and these tickets (until they expire), refuse all else → on_drained."""

    def forfeit(self, ref: HostRef, ticket_id: str) -> None:
        """A draining host need not wait for this ticket: its caller has left. Not answered."""

    def sleep(self, ref: HostRef) -> None:
        """Give the memory back, keep the process → on_slept | on_failed."""

    def deep_sleep(self, ref: HostRef) -> None:
        """Let go of the model, keep the process → on_deep_slept | on_failed."""

    def resize_kv(self, ref: HostRef, full: bool) -> None:
        """Let its KV pool have all that was promised, or no more than it needs now; not answered."""

    def wake(self, ref: HostRef) -> None:
        """→ on_woken | on_wake_failed (rolled back: asleep again) | on_quarantined (it is not what it was)."""

    def unload(self, ref: HostRef) -> None:
        """End the process, if there still is one, and see its memory freed → on_unloaded. May be asked twice."""

    def resolve(self, ticket_id: str, placement: Placement) -> None: ...

    def reject(self, ticket_id: str, error: OrchestratorError) -> None: ...

    def publish(self, table: RoutingTable) -> None: ...

    def record(self, event: PoolEvent) -> None: ...
