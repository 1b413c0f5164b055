"""Owns what we measure with torch: activation peaks, thread choice."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from engine.memory import status_bytes

CONTENDED_SHARE = 0.8
WORTH_MORE_THREADS = 1.15  # how much faster several threads must be to be worth their sensitivity to neighbours


def peak_of(step: Callable[[], object]) -> int:
    """Bytes by which memory rose at its highest while ``step`` ran (the kernel's high-water mark is reset first).

    On CUDA the allocator's own peak counter is used.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with contextlib.suppress(OSError):  # not permitted in some sandboxes: the mark then only over-states the peak
        Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes()["VmRSS"]
    step()
    return max(0, status_bytes()["VmHWM"] - before)


def seconds_of(step: Callable[[], object]) -> float:
    """Wall seconds of one run."""
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


class ThreadGovernor:
    """Falls back to one thread while other processes want the cores.

    A step is contended when its process got clearly less CPU time than its threads could have used: spinning at a
    barrier counts as CPU time, waiting for a lost core does not. After ``pause_seconds`` all threads are tried again.
    While a core is ``lent``, one thread less computes: a load at the lowest priority, which never takes the CPU from
    anybody, would starve beside threads that spin.
    """

    def __init__(self, threads: int, *, contended_steps: int = 3, pause_seconds: float = 10.0) -> None:
        self._threads = threads
        self._contended_steps = contended_steps
        self._pause_seconds = pause_seconds
        self._contended = 0
        self._alone_until = 0.0
        self.lent = False

    @contextlib.contextmanager
    def step(self, share: int | None = None) -> Iterator[None]:
        """Around one step; sets the thread count for it, ``share`` at most."""
        wall, cpu = time.monotonic(), time.process_time()
        most = max(1, min(self._threads - self.lent, share or self._threads))
        threads = 1 if wall < self._alone_until else most
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        yield
        if threads > 1:
            self.took(time.monotonic() - wall, time.process_time() - cpu, threads)

    def took(self, wall_seconds: float, cpu_seconds: float, threads: int) -> None:
        """Judge a step of several threads."""
        share = cpu_seconds / (wall_seconds * threads) if wall_seconds > 0 else 1.0
        self._contended = self._contended + 1 if share < CONTENDED_SHARE else 0
        if self._contended >= self._contended_steps:
            self._contended = 0
            self._alone_until = time.monotonic() + self._pause_seconds


def threads_to_try(measured: int) -> int:
    """What an earlier load has measured; one alone may be a busy moment's word: all are tried, the governor decides."""
    return measured if measured > 1 else len(os.sched_getaffinity(0))


def choose_threads(step: Callable[[], object], limit: int | None = None) -> int:
    """One thread, or all cores if ``step`` runs clearly faster with them now; sets the count.

    With a busy neighbour two threads are far slower than one: an OpenMP barrier waits a scheduler slice for the thread
    that lost its core. So the count is measured, not assumed.
    """
    cores = limit or len(os.sched_getaffinity(0))
    alone = _median_seconds(step, 1)
    several = alone if cores == 1 else _median_seconds(step, cores, hopeless_seconds=2 * alone)
    best = cores if alone / several >= WORTH_MORE_THREADS else 1
    torch.set_num_threads(best)
    return best


def _median_seconds(step: Callable[[], object], threads: int, hopeless_seconds: float = math.inf) -> float:
    """Of three runs after a first one; a single one when that is hopeless already."""
    torch.set_num_threads(threads)
    step()
    samples: list[float] = []
    while len(samples) < 3 and max(samples, default=0.0) < hopeless_seconds:
        samples.append(seconds_of(step))
    return statistics.median(samples)
