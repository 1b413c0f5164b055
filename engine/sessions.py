"""Owns which blocks' KV belongs to which session, what it is worth, and which of it is pinned. Torch-free.

A deleted session leaves no KV behind; a block shared by sessions is priced by the sum of its users.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.protocol import GenerationRequest
from policies.pricing import SessionUse
from policies.types import Tier

MOST_SESSIONS = 4096  # the least recently used is no longer known: its KV goes with the cache's own order
NEW_GAP_SHARE = 0.3  # of the last gap in the running mean


@dataclass(slots=True)
class _Session:
    tier: Tier
    tenant: str
    last_used: float
    turns: int = 0
    gap_seconds: float | None = None
    keys: dict[bytes, None] = field(default_factory=dict)  # in the order of the tokens
    pinned_until: float = -math.inf
    pinned: tuple[bytes, ...] = ()

    def seen(self, now: float) -> None:
        if self.turns:
            gap = now - self.last_used
            old = self.gap_seconds if self.gap_seconds is not None else gap
            self.gap_seconds = (1 - NEW_GAP_SHARE) * old + NEW_GAP_SHARE * gap
        self.turns += 1
        self.last_used = now


class Sessions:
    """The keys of each session's whole blocks, over all its turns; the same key may be of several sessions."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._users: dict[bytes, dict[str, None]] = {}
        self._pinning: dict[str, _Session] = {}  # the sessions that pin something, oldest pin first
        self._pins: dict[bytes, int] = {}  # key → sessions that pin it
        self._changed: list[bytes] = []  # pinned or unpinned since ``pins_changed`` was called

    def remember(self, request: GenerationRequest, keys: Iterable[bytes], now: float) -> None:
        """A turn of the request's session has left these blocks."""
        assert request.session is not None
        session = self._sessions.setdefault(request.session, _Session(request.tier, request.tenant, now))
        self._sessions.move_to_end(request.session)
        session.seen(now)
        session.tier = request.tier
        for key in keys:
            session.keys[key] = None
            self._users.setdefault(key, {})[request.session] = None
        if len(self._sessions) > MOST_SESSIONS:
            self.forget(next(iter(self._sessions)))

    def forget(self, name: str) -> list[bytes]:
        """The keys that were this session's alone."""
        session = self._sessions.pop(name, None)
        if session is None:
            return []
        self._unpin(name)
        alone = []
        for key in session.keys:
            users = self._users[key]
            del users[name]
            if not users:
                del self._users[key]
                alone.append(key)
        return alone

    def users(self, key: bytes) -> Sequence[str]:
        """The sessions that use a block."""
        return tuple(self._users.get(key, ()))

    def uses(self, key: bytes) -> list[SessionUse]:
        """What is known of the sessions that use a block."""
        found = (self._sessions[name] for name in self._users.get(key, ()))
        return [SessionUse(each.tier, each.turns, each.gap_seconds, each.last_used) for each in found]

    def names(self) -> tuple[str, ...]:
        """Every session known here, ``tenant/session``."""
        return tuple(self._sessions)

    def whole(self, kept: Callable[[bytes], bool]) -> int:
        """How many sessions' last block is still kept: those can go on without computing their history again."""
        return sum(kept(next(reversed(each.keys))) for each in self._sessions.values() if each.keys)

    # -- pins ------------------------------------------------------------------

    def pin(self, name: str, until: float, most_blocks: int) -> None:
        """Pin a session's blocks, from their first, until then (monotonic seconds).

        All pins of its tenant together hold ``most_blocks`` at most: the tenant's oldest pins make room, then the end
        of this session's blocks stays unpinned.
        """
        session = self._sessions[name]
        self._unpin(name)
        wanted = tuple(session.keys)[:most_blocks]
        others = {other: each for other, each in self._pinning.items() if each.tenant == session.tenant}
        while others and sum(len(each.pinned) for each in others.values()) + len(wanted) > most_blocks:
            oldest = next(iter(others))
            del others[oldest]
            self._unpin(oldest)
        session.pinned, session.pinned_until = wanted, until
        self._pinning[name] = session
        for key in wanted:
            self._pins[key] = self._pins.get(key, 0) + 1
        self._changed += wanted

    def pins_changed(self, now: float) -> list[bytes]:
        """End the pins whose time is over. The keys that were pinned or unpinned since the last call."""
        for name in [name for name, session in self._pinning.items() if session.pinned_until <= now]:
            self._unpin(name)
        changed, self._changed = self._changed, []
        return changed

    def pinned(self, key: bytes) -> bool:
        return key in self._pins

    def _unpin(self, name: str) -> None:
        session = self._pinning.pop(name, None)
        if session is None:
            return
        for key in session.pinned:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
        self._changed += session.pinned
        session.pinned = ()
