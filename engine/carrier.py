"""Owns the carrying out of planned copies: between device and host by the engine's own means, to disk by its thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine.disk_tier import DiskTier
from engine.kv_cache import KVCache
from engine.tiers import Move, Spill

READ_TOGETHER = 8  # blocks, on their way to disk


class ReadKV(Protocol):
    """The bytes of whole blocks of the device, or of host memory: uint8 ``[blocks, block_bytes]``."""

    def __call__(self, blocks: Sequence[int], *, host: bool) -> np.ndarray: ...


class Carrier:
    """Copies may fail with RuntimeError, MemoryError or OSError: time is lost then, and never an answer."""

    def __init__(
        self, cache: KVCache, disk: DiskTier | None, read: ReadKV, move: Callable[[Sequence[Move]], None]
    ) -> None:
        self._cache, self._disk, self._read, self._move = cache, disk, read, move
        self.failures = 0

    def carry_out(self, moves: Sequence[Move | Spill], until: float = 0.0) -> None:
        """In their order; what goes to disk waits for room in its queue until then (monotonic seconds), or is lost."""
        for spilling, group in itertools.groupby(moves, key=lambda move: isinstance(move, Spill)):
            if spilling:
                self.spill([move for move in group if isinstance(move, Spill)], until)
            else:
                self._move([move for move in group if isinstance(move, Move)])

    def carry_out_or_drop(self, moves: Sequence[Move | Spill], until: float = 0.0) -> None:
        """The same for copies nobody counts on yet: if they fail, host memory is emptied."""
        try:
            self.carry_out(moves, until)
        except (RuntimeError, MemoryError, OSError):
            self.failures += 1
            self._cache.host.clear()

    def spill(self, spills: Sequence[Spill], until: float = 0.0) -> None:
        """Hand blocks to the disk's thread."""
        for begin in range(0, len(spills), READ_TOGETHER):
            for host, group in itertools.groupby(spills[begin : begin + READ_TOGETHER], key=lambda each: each.host):
                together = list(group)
                content = self._read([spill.place for spill in together], host=host)
                for spill, row in zip(together, content, strict=True):
                    self._put(spill, row, until)

    def _put(self, spill: Spill, content: np.ndarray, until: float) -> None:
        if self._disk is not None and (not until or self._disk.wait_room(until)):
            self._disk.put(spill.key, spill.token_ids, content, self._cache.sessions.users(spill.key))
