"""Owns the books of KV in host memory, and the words for copies between the tiers. Torch-free.

A block is found by the same key on every tier (design section 8). So a preempted generation, a session between turns
and a sleeping model need no bookkeeping of their own: what leaves the device under its key is found again by it, and
what is lost on the way is computed again from the tokens. Technique: content-addressed KV offloading, as in LMCache
and vLLM's offloading connector.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """Between which memories KV is copied."""

    OUT = "out"  # device → host
    IN = "in"  # host → device
    COPY = "copy"  # device → device: a shared block that is about to be written


@dataclass(frozen=True, slots=True)
class Move:
    """One block's content to be copied. The moves of a step are carried out in their order, before its forward pass."""

    way: Way
    block: int  # on the device
    slot: int  # in host memory; of a COPY, the block on the device that is filled


@dataclass(frozen=True, slots=True)
class Spill:
    """One block's content to go to disk. It is read in its place among the moves, and written behind the step."""

    key: bytes
    token_ids: tuple[int, ...]
    place: int  # a block, or a slot in host memory
    host: bool


@dataclass(frozen=True, slots=True)
class HostEntry:
    """A block's content in host memory."""

    slot: int
    token_ids: tuple[int, ...]  # compared on a hit


@dataclass(frozen=True, slots=True)
class HostBooks:
    """Counts of host slots."""

    total: int
    used: int
    moved_out: int  # blocks copied there, ever
    moved_in: int  # blocks copied back, ever


def _drop(key: bytes, entry: HostEntry) -> None:
    """What is dropped is lost."""


def _none(key: bytes) -> bool:
    """Nothing is pinned."""
    return False


class HostTier:
    """Which content lies in which slot; least recently used content is dropped first, pinned content last.

    Chains are evicted from their end, and slots given out from theirs: what adjoined on the device adjoins here.
    """

    def __init__(
        self,
        capacity_blocks: int,
        on_evict: Callable[[bytes, HostEntry], None] = _drop,
        pinned: Callable[[bytes], bool] = _none,
    ) -> None:
        """``on_evict`` is told of content that makes room for other, before its slot is written to."""
        self._capacity = capacity_blocks
        self._on_evict = on_evict
        self._pinned = pinned
        self._free = [-slot for slot in reversed(range(capacity_blocks))]  # a heap that gives the highest slot
        self._entries: OrderedDict[bytes, HostEntry] = OrderedDict()
        self._held: set[bytes] = set()  # about to be copied in: their slots must not be written before
        self.moved_out = 0
        self.moved_in = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: bytes, token_ids: tuple[int, ...]) -> int | None:
        """The slot to copy a block's content to; None when it is there already, or when there is no room for it."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return None
        slot = self._room()
        if slot is not None:
            self._entries[key] = HostEntry(slot, token_ids)
            self.moved_out += 1
        return slot

    def find(self, key: bytes, token_ids: Sequence[int]) -> int | None:
        """The slot that has this content."""
        entry = self._entries.get(key)
        return entry.slot if entry is not None and entry.token_ids == tuple(token_ids) else None

    def take(self, key: bytes) -> int:
        """The slot to copy a block's content from; it is not written to before ``settle``."""
        self._entries.move_to_end(key)
        self._held.add(key)
        self.moved_in += 1
        return self._entries[key].slot

    def settle(self) -> None:
        """The moves planned so far are done."""
        self._held.clear()

    def holds(self, key: bytes) -> bool:
        return key in self._entries

    def entries(self) -> list[tuple[bytes, HostEntry]]:
        """All content, least recently used first."""
        return list(self._entries.items())

    def forget(self, key: bytes) -> None:
        """Drop one block's content."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            heapq.heappush(self._free, -entry.slot)

    def clear(self) -> None:
        """Drop everything."""
        for key in list(self._entries):
            self.forget(key)
        self._held.clear()

    def books(self) -> HostBooks:
        return HostBooks(self._capacity, len(self._entries), self.moved_out, self.moved_in)

    def _room(self) -> int | None:
        if not self._free:
            oldest = self._oldest()
            if oldest is None:
                return None
            self._on_evict(oldest, self._entries[oldest])
            self.forget(oldest)
        return -heapq.heappop(self._free)

    def _oldest(self) -> bytes | None:
        pinned = None
        for key in self._entries:
            if key in self._held:
                continue
            if not self._pinned(key):
                return key
            pinned = pinned or key
        return pinned
