"""Owns the words everybody shares: state enums and the frozen views that policies decide on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TypeVar

from policies.errors import IllegalTransition


class Tier(IntEnum):
    """Priority class of a tenant; the smaller number goes first."""

    INTERACTIVE = 0  # a person is waiting
    STANDARD = 1  # an agent is waiting
    BATCH = 2  # nobody is waiting

    @classmethod
    def parse(cls, name: str) -> Tier:
        """``"interactive"`` → ``Tier.INTERACTIVE``; KeyError for an unknown name."""
        return cls[name.upper()]


class ModelState(StrEnum):
    """State of one engine host (design section 6). A model's state is derived from its hosts."""

    COLD = "cold"  # no process
    LOADING = "loading"  # process starting, weights being read
    WARMING = "warming"  # weights in place, first steps running
    READY = "ready"  # takes requests
    DRAINING = "draining"  # finishes what it has, takes nothing new
    SLEEPING = "sleeping"  # process alive, weights and KV given back
    DEEP_SLEEP = "deep_sleep"  # process alive, nothing of the model in it
    WAKING = "waking"  # weights being copied back
    QUARANTINED = "quarantined"  # woke with a wrong canary: it must answer nobody
    UNLOADING = "unloading"  # process being ended
    FAILED = "failed"  # the load failed; in cooldown
    LOST = "lost"  # the process died


class ContextState(StrEnum):
    """State of one generation (design section 5)."""

    WAITING = "waiting"  # holds no block
    RUNNING = "running"  # holds blocks, in the batch
    PREEMPTED = "preempted"  # blocks taken away, will recompute
    SWAPPING_OUT = "swapping_out"  # KV being copied to the host tier
    SWAPPED = "swapped"  # KV on the host tier
    SWAPPING_IN = "swapping_in"  # KV being copied back
    FINISHED = "finished"  # stop or length
    CANCELLED = "cancelled"  # the client went away
    FAILED = "failed"  # an error of this generation alone
    EXPIRED = "expired"  # its deadline passed


State = TypeVar("State", ModelState, ContextState)


def check_edge(edges: Mapping[State, frozenset[State]], old: State, new: State, what: str) -> None:
    """Raise IllegalTransition unless ``old → new`` is an edge of the table."""
    if new not in edges[old]:
        legal = ", ".join(sorted(edges[old])) or "none: it is terminal"
        raise IllegalTransition(f"{what}: {old} → {new} is not an edge (legal: {legal})")


@dataclass(frozen=True, slots=True)
class HostView:
    """What a residency policy sees of one live host."""

    host: str  # host:<model>:<n>
    model: str
    state: ModelState
    device: str
    resident_bytes: int  # freed on the device by sleeping it (promised bytes − residual)
    residual_bytes: int  # what its process keeps while asleep
    in_flight: int  # running generations + tickets not yet redeemed
    last_used: float  # seconds, the pool's clock
    ready_since: float  # seconds; meaningful while READY
    pinned: bool = False
    waiting: int = 0  # requests waiting for this model
    tier: Tier = Tier.STANDARD  # of the tickets last placed on it; warm traffic is not seen here
    min_resident_seconds: float | None = None  # not put to sleep for another earlier; None: as the pool says
    process_bytes: int | None = None  # what it would keep in deep sleep; None: no less than residual_bytes


@dataclass(frozen=True, slots=True)
class DemandView:
    """Requests waiting for one model."""

    model: str
    need_bytes: int  # device bytes its host will hold when ready, residual included
    oldest_arrival: float  # seconds
    best_tier: Tier
    waiting: int
    committed: bool = False  # room is already being made for it: it owns the next bytes freed
    host: str = ""  # which of the model's hosts is to be started; "": the model has one
    awaits_others: bool = False  # the books had room and the device had not: not before what is given back is back
    start_bytes: int | None = None  # what its process takes to be loaded asleep, beside others; None: that cannot be


@dataclass(frozen=True, slots=True)
class PoolView:
    """One frozen picture of a device, enough to decide residency."""

    now: float
    device: str
    budget_bytes: int
    booked_bytes: int  # all that live hosts hold or were promised on this device
    hosts: tuple[HostView, ...]
    demand: tuple[DemandView, ...]
    min_resident_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ItemView:
    """What truncation sees of one item of a session."""

    item_id: str
    turn_id: str
    role: str  # system | developer | user | assistant | tool
    call_ids: tuple[str, ...] = ()  # tool calls an assistant item makes
    result_of: str | None = None  # the tool call a tool item answers
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class TruncationRecord:
    """What was cut from one prompt, and why. Stored with the turn."""

    budget_tokens: int
    prompt_tokens: int
    full_tokens: int  # the prompt with nothing cut
    dropped_turns: int = 0
    dropped_items: tuple[str, ...] = field(default=())
    reason: str = ""
    unread_items: int = 0  # older ones that were not even read

    @property
    def cut(self) -> bool:
        return bool(self.dropped_items) or self.unread_items > 0

    def header(self) -> str:
        """Value of X-Context-Truncated, e.g. ``turns=3, items=7, tokens=1290``."""
        tokens = self.full_tokens - self.prompt_tokens
        return f"turns={self.dropped_turns}, items={len(self.dropped_items) + self.unread_items}, tokens={tokens}"
