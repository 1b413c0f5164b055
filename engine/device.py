"""Owns what we measure with torch: activation peaks, thread choice."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.memory import status_bytes


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


def choose_threads(step: Callable[[], object], limit: int | None = None) -> int:
    """The torch thread count (1 … cores) with which ``step`` runs fastest now; sets it.

    With a busy neighbour two threads are far slower than one: an OpenMP barrier waits a scheduler slice for the thread
    that lost its core. So the count is measured, not assumed.
    """
    cores = limit or len(os.sched_getaffinity(0))
    timings = {}
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        step()
        samples = []
        for _ in range(3):
            begin = time.perf_counter()
            step()
            samples.append(time.perf_counter() - begin)
        timings[threads] = sorted(samples)[1]
    best = min(timings, key=lambda threads: timings[threads])
    torch.set_num_threads(best)
    return best
