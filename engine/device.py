"""Owns what we measure of the machine: process memory, activation peaks, thread choice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch


def held_bytes() -> int:
    """RssAnon + shared memory of this process: what it holds besides pages of mapped files (Linux)."""
    fields = _status()
    return fields["RssAnon"] + fields["RssShmem"]


def peak_of(step: Callable[[], object]) -> int:
    """Bytes by which memory rose at its highest while ``step`` ran (the kernel's high-water mark is reset first).

    On CUDA the allocator's own peak counter is used.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not permitted in some sandboxes: the mark then only over-states the peak
        pass
    before = _status()["VmRSS"]
    step()
    return max(0, _status()["VmHWM"] - before)


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


def _status() -> dict[str, int]:
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            fields[name] = int(rest.split()[0]) * 1024
    return fields
