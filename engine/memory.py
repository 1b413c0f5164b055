"""Owns what a process can say of its own memory (Linux). Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

# Environment of a process that holds an engine; it must be there before torch is imported.
PROCESS_ENVIRONMENT = {
    # glibc (ignored by others): malloc asks for 2 MiB pages. Fresh memory then costs a fifth of the page faults: waking
    # is twice as fast, and decoding a tenth. It does so in its main arena only: the engine's thread must have no other,
    # or waking takes twice as long again, and sleeping five times.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1",
    # oneDNN, and ideep above it, each keep what they compiled for the last 1,024 shapes. Every new number of rows is a
    # new shape of every layer: a host grew by 2 MiB with each prompt length it had not seen. To make one again takes
    # half a millisecond.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}


def status_bytes() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            fields[name] = int(rest.split()[0]) * 1024
    return fields


def held_bytes() -> int:
    """RssAnon + shared memory: what this process holds besides pages of mapped files."""
    fields = status_bytes()
    return fields["RssAnon"] + fields["RssShmem"]


def trim() -> None:
    """Hand freed heap pages back to the system (glibc keeps tens of megabytes after a load that converts weights)."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def drop_pages(begin: int, end: int) -> None:
    """Hand the whole pages between two addresses of our own anonymous memory back to the system; they read as zeros."""
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"madvise refuses to drop {length} bytes")
