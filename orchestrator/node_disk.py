"""Owns what the controller does with this node's KV disk itself: models without a host have KV there too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine.disk import DiskStore
from engine.disk_index import DiskUnavailable
from orchestrator.logs import EventLogger

Result = TypeVar("Result")


class NodeDisk:
    """The disk tier at ``place`` (directory, bytes), of whatever model; None: there is none."""

    def __init__(self, place: tuple[str, int] | None, log: EventLogger) -> None:
        self._place, self._log = place, log

    async def do(self, work: Callable[[DiskStore], Result]) -> Result | None:
        """What ``work`` returns; None without a disk, or when it fails."""
        if self._place is None:
            return None
        directory, capacity_bytes = self._place

        def run() -> Result:
            store = DiskStore(Path(directory), capacity_bytes)
            try:
                return work(store)
            finally:
                store.close()

        try:
            return await asyncio.to_thread(run)
        except DiskUnavailable as error:
            self._log.warning("kv_disk_unavailable", cause=str(error))
            return None
