"""Owns the plain data that the session store hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from session_store.items import Item


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that holds its session's lease: pass it to ``renew``, ``commit_turn`` or ``abort_turn``."""

    tenant: str
    session_id: str
    turn_id: str
    fencing_token: int
    version: int  # changes before this one
    items: tuple[Item, ...]  # heads older than the window, then the window, whole turns only
    truncated_store: int  # older items that stayed in the store
    known: frozenset[str] = frozenset()  # of the ids asked for: those of items that are stored already
    idempotency_key: str | None = None
    request_fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """The stored outcome of a finished turn; no lease and no reservation is held."""

    tenant: str
    session_id: str
    turn_id: str  # of the turn that finished, not of the one that asked
    version: int  # changes, that one included
    items: tuple[Item, ...]  # what that turn appended
    reply: Mapping[str, Any]
    truncation: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Moved:
    """The session does not go on from the turn that was asked for; nothing is held."""

    tenant: str
    session_id: str
    turn_id: str
    end: int  # index behind that turn's last item: fork there


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn of the past, or one that runs or did not come to its end."""

    turn_id: str
    status: str  # completed | running | a reason why it was given up
    items: tuple[Item, ...] = ()  # what it appended, without what was deleted since
    reply: Mapping[str, Any] = field(default_factory=dict)
    truncation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ItemPage:
    """Some items of a session; ``more``: there are others behind the last."""

    items: tuple[Item, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What can be told of a session without reading its items."""

    tenant: str
    session_id: str
    version: int  # changes so far: turns, items added, superseded and deleted
    items: int  # deleted ones included
    incomplete: int  # remembered attempts that were not committed
    created: float  # seconds since the epoch, Redis's clock
    updated: float
    expires_in_seconds: float
    running_turn_id: str | None  # who holds the lease now
    kind: str = "session"
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Some sessions of a tenant, last used first; ``cursor`` asks for the next page, None after the last."""

    sessions: tuple[SessionInfo, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """A tenant's counters and what it holds now."""

    used_tokens: int
    turns: int
    running: int
    reserved_tokens: int
