"""Owns what a process can say of its own memory (Linux). Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


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
