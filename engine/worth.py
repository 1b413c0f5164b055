"""Owns what KV is worth to this engine: the price of losing a block, from what was measured here. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from engine.disk_tier import DiskTier
from engine.kv_cache import KVCache
from policies.preemption import KVCosts
from policies.pricing import SessionUse, supply_curve, worth_seconds

GIB = 2**30


class Worth:
    """Prices of whole blocks. Without measurements (all zero) everything is worth keeping."""

    def __init__(self, costs: KVCosts, block_size: int, block_bytes: int, *, host: bool, disk: DiskTier | None) -> None:
        """``host``: is there host memory for KV? Then what leaves the device costs a copy to bring back."""
        self._compute_seconds = costs.prefill_seconds_per_token * block_size
        self._copy_seconds = costs.copy_seconds_per_block
        self._block_bytes, self._host, self._disk = block_bytes, host, disk

    def of(self, uses: Sequence[SessionUse], now: float) -> float:
        """Weighted seconds lost if a block that these sessions use is on no tier any more."""
        return worth_seconds(uses, now, self._compute_seconds or 1.0)

    def reading(self) -> bool:
        """Is a block read from disk sooner than it is computed?"""
        seconds = self._disk.read_seconds if self._disk is not None else None
        return seconds is None or not self._compute_seconds or seconds < self._compute_seconds

    def writing(self, uses: Sequence[SessionUse], now: float) -> bool:
        """Is a block worth the work of writing it, by what it saves when it is wanted?"""
        if self._disk is None or not self._compute_seconds:
            return self._disk is not None
        saved = max(0.0, self._compute_seconds - (self._disk.read_seconds or 0.0))
        return worth_seconds(uses, now, saved) > (self._disk.write_seconds or 0.0)

    def supply(self, cache: KVCache, now: float) -> tuple[int, ...]:
        """Bytes of the device that could be freed at or below the price of each bucket of ``policies.pricing``."""
        lost = (self._copy_seconds if self._host else self._compute_seconds) or 1.0
        books = cache.pool.books()
        empty = [(0.0, (books.free - books.cached) * self._block_bytes)]
        prices = (worth_seconds(cache.sessions.uses(key), now, lost) for _, key, _ in cache.pool.cached())
        return supply_curve([*empty, *((price * GIB / self._block_bytes, self._block_bytes) for price in prices)])
