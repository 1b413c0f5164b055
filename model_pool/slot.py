"""Owns the mutable records: one slot per host that may be, the fleet of all of them, and the settings of the pool."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from model_pool.effects import HostRef, ModelSpec
from model_pool.states import ON_THE_WAY
from policies.errors import LoadFailed
from policies.types import ModelState, Tier


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Times and limits of the pool."""

    min_resident_seconds: float = 30.0  # a ready host is not evicted earlier; limits sleeping, never waking
    reclaim_after_seconds: float = 60.0  # a displaced default model returns when the others were idle for so long
    ticket_ttl_seconds: float = 10.0  # a placement must be redeemed within
    cooldown_seconds: float = 5.0  # after the first failed load; doubles with each further one
    cooldown_cap_seconds: float = 300.0
    losses_limit: int = 3  # process deaths within the window that end in FAILED
    losses_window_seconds: float = 300.0
    aging_seconds: float = 30.0  # a waiting request moves up one tier each
    retry_after_seconds: float = 2.0  # told to clients when nothing better is known
    first_epoch: int = 0  # epochs start above it; a restarted controller must not use one twice
    answer_timeout_seconds: float = 60.0  # sleep: then unload instead; unload: then ask again
    prepared_hosts: int = 0  # on each device: processes that wait for a model
    prepared_bytes: int = 320 * 2**20  # that one is promised
    prepared_pause_seconds: float = 60.0  # after one had to give way: each costs seconds of a core
    drift_bytes: int = 64 * 2**20  # a host may hold more than it was promised by so much, and a share
    drift_share: float = 0.05

    def allowed_bytes(self, promised_bytes: int) -> float:
        """What a host may hold that was promised so much; one that holds more has drifted."""
        return promised_bytes * (1 + self.drift_share) + self.drift_bytes


@dataclass(slots=True)
class Slot:
    """One host of a model. Only Lifecycle changes its state."""

    spec: ModelSpec
    ref: HostRef
    state: ModelState = ModelState.COLD
    since: float = 0.0
    device: str | None = None  # of the host, or of its last life
    asked_at: float = 0.0  # when the effect it now waits for was asked

    memory_bytes: int | None = None  # measured when it was last ready
    residual_bytes: int = 0
    process_bytes: int | None = None  # what it would keep in deep sleep
    in_flight: int = 0  # last report + tickets redeemed since
    last_used: float = 0.0
    ready_since: float = 0.0
    tier: Tier = Tier.STANDARD  # of the ticket placed last

    pinned: bool = field(init=False)  # as configured, until the admin says otherwise
    sleep_asked: bool = False  # DRAINING only: drained, now falling asleep
    unload_after: bool = False  # DRAINING only: its residual must go too
    evicted_for: str | None = None  # comes back if that model fails to load
    committed: bool = False  # room is being made for it
    wanted_since: float | None = None  # asked for by the admin
    restore: bool = False  # bring back when memory allows and nobody waits for it
    adopted: bool = False  # its outcome is learned from reports
    drifted: bool = False  # took more than the device has: restart it when idle
    heard: bool = False  # LOADING: its process has said something
    displaced: bool = False  # a default model that made room for another; the admin did not put it down
    pushed_out: bool = False  # asleep because another wanted its memory: it wakes when there is memory to spare
    dwells: bool = True  # somebody waited for it to be ready: not put to sleep for another at once
    promoted: bool = False  # woken so; nobody has asked for it, so that it is no less a victim than before
    asked_keep_alive_seconds: float | None = None  # by its last request
    last_decision: str = ""  # said already
    staging: bool = False  # LOADING: in the background, to end asleep
    deepening: bool = False  # SLEEPING: on its way to deep sleep
    climbed: bool = False  # memory was short, others gave theirs back: this is its last try
    shrunk: bool = False  # its KV pool gave memory back for another's last try

    load_seconds: float | None = None  # from asked to ready, the last time
    wake_seconds: float | None = None

    cause: LoadFailed | None = None
    failures: int = 0  # failed loads and wakes in a row
    cooldown_until: float = 0.0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pinned = self.spec.pinned
        if self.spec.problem:  # failed from the start: it must not evict anybody to find out; an admin may try a load
            self.state = ModelState.FAILED
            self.cause = LoadFailed(self.spec.problem)
            self.cooldown_until = math.inf

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def need_bytes(self) -> int:
        """Device bytes of its host when ready: measured, else as configured."""
        return self.spec.memory_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def keep_alive_seconds(self) -> float:
        """Idle for so long, it is put to sleep."""
        asked = self.asked_keep_alive_seconds
        return self.spec.keep_alive_seconds if asked is None else asked

    def cooling(self, now: float) -> bool:
        return now < self.cooldown_until


class Fleet:
    """All slots: by host name, and by model in the order of their numbers."""

    def __init__(self, specs: Sequence[ModelSpec], first_epoch: int) -> None:
        self._by_model: dict[str, tuple[Slot, ...]] = {
            spec.name: tuple(
                Slot(spec, HostRef(spec.name, number, first_epoch), residual_bytes=spec.residual_estimate_bytes)
                for number in range(spec.replicas)
            )
            for spec in specs
        }
        self._by_host = {slot.ref.name: slot for slots in self._by_model.values() for slot in slots}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._by_host.values())

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._by_model)

    def of(self, model: str) -> tuple[Slot, ...]:
        """The slots of a model; none for an unknown one."""
        return self._by_model.get(model, ())

    def at(self, host: str) -> Slot | None:
        return self._by_host.get(host)

    def up(self, model: str) -> bool:
        """Is a host of this model ready, or about to be?"""
        return any(slot.state is ModelState.READY or slot.state in ON_THE_WAY for slot in self.of(model))
