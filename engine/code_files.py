"""Owns which native code on disk may be loaded: what this machine compiled, whole, where nobody else can write."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

NO_COMPILER = "no C++ compiler (g++) on this machine"


def compiler() -> str | None:
    """The C++ compiler to call; None: there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def only_ours(directory: Path) -> bool:
    """Could anybody else have written into it? OSError when it is not there."""
    status = directory.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def put(fresh: Path, library: Path) -> None:
    """Move ``fresh`` to ``library`` and remember its content; ``fresh`` is on the same file system."""
    fresh.chmod(0o700)
    seal = fresh.with_suffix(".sha256")
    seal.write_text(_digest(fresh))
    fresh.replace(library)
    seal.replace(_seal(library))


def is_as_put(library: Path) -> bool:
    """Is it there, whole, and of nobody else's making?"""
    try:
        return only_ours(library.parent) and _seal(library).read_text() == _digest(library)
    except OSError:
        return False


def _seal(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()
