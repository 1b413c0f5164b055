"""Owns how the engines of one machine share its cores: each computes with as many threads as its share. Torch-free.

Engines in different processes do not wait for each other: two threads of one engine that fight for cores with another's
spin at every barrier until the lost core comes back, and both crawl. With a core each, they run as if alone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path

import psutil

SEATS = 64
MOST_PID = 2**31
ENTRY = struct.Struct("<qd")  # process id, 0: free; monotonic seconds until which it computes
SILENT_SECONDS = 5.0  # a step that takes longer is taken for one that died


class CoreShares:
    """A seat in a file that all engines of the machine map."""

    def __init__(self, file: Path) -> None:
        """OSError when the file cannot be made. Without a free seat this engine is not seen by the others."""
        self._cores = len(os.sched_getaffinity(0))
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+b") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            os.posix_fallocate(opened.fileno(), 0, SEATS * ENTRY.size)  # a hole on a full disk would be a SIGBUS later
            self._seats = mmap.mmap(opened.fileno(), SEATS * ENTRY.size)
            self._mine = next((seat for seat in range(SEATS) if not _taken(self._at(seat)[0])), None)
            self._write(0.0)
            fcntl.flock(opened, fcntl.LOCK_UN)  # closing is not enough: the map keeps the file open

    def take(self) -> int:
        """Threads for the step that begins now; at least one."""
        now = time.monotonic()
        self._write(now + SILENT_SECONDS)
        others = (self._at(seat)[1] for seat in range(SEATS) if seat != self._mine)
        computing = sum(now < until <= now + SILENT_SECONDS for until in others)  # later: from before a restart
        return max(1, self._cores // (1 + computing))

    def rest(self) -> None:
        """Nothing to compute for the moment."""
        self._write(0.0)

    def _at(self, seat: int) -> tuple[int, float]:
        pid, until = ENTRY.unpack_from(self._seats, seat * ENTRY.size)
        return pid, until

    def _write(self, until: float) -> None:
        if self._mine is not None:
            ENTRY.pack_into(self._seats, self._mine * ENTRY.size, os.getpid(), until)


def _taken(pid: int) -> bool:
    """Also by this process: it may hold two engines."""
    return 0 < pid < MOST_PID and psutil.pid_exists(pid)
