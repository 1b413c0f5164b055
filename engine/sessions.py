"""Owns which blocks' KV belongs to which session, so that a deleted session leaves none behind. Torch-free."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

MOST_SESSIONS = 4096  # the least recently used is no longer known: its KV goes with the cache's own order


class SessionKeys:
    """The keys of each session's whole blocks, over all its turns; the same key may be of several sessions."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, dict[bytes, None]] = OrderedDict()  # in the order of the tokens
        self._users: Counter[bytes] = Counter()

    def remember(self, session: str, keys: Iterable[bytes]) -> None:
        """A turn of the session has left these blocks."""
        known = self._keys.setdefault(session, {})
        self._keys.move_to_end(session)
        for key in keys:
            if key not in known:
                known[key] = None
                self._users[key] += 1
        if len(self._keys) > MOST_SESSIONS:
            self.forget(next(iter(self._keys)))

    def forget(self, session: str) -> list[bytes]:
        """The keys that were this session's alone."""
        keys = self._keys.pop(session, {})
        self._users.subtract(list(keys))
        alone = [key for key in keys if not self._users[key]]
        for key in alone:
            del self._users[key]
        return alone

    def whole(self, kept: Callable[[bytes], bool]) -> int:
        """How many sessions' last block is still kept: those can go on without computing their history again."""
        return sum(kept(next(reversed(keys))) for keys in self._keys.values() if keys)
