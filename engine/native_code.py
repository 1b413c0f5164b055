"""Owns how our C++ sources become libraries: compiled once for this machine, kept on disk."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from engine import code_files
from engine.recipe import machine

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILE_SECONDS = 60.0


class NotNative(Exception):
    """Why something is computed by torch; for people."""


def library(directory: Path, source: Path, sizes: Mapping[str, int]) -> Path:
    """The library made of ``source`` with these macros, compiled if need be; NotNative when it cannot be."""
    said = f"{source.read_text()} {FLAGS} {sorted(sizes.items())} {machine()}"
    place = directory / f"{hashlib.sha256(said.encode()).hexdigest()[:24]}.so"
    try:
        if not code_files.is_as_put(place):
            _compile(source, sizes, place)
    except OSError as error:
        raise NotNative(f"{type(error).__name__}: {error}") from error
    return place


def _compile(source: Path, sizes: Mapping[str, int], place: Path) -> None:
    compiler = code_files.compiler()
    if compiler is None:
        raise NotNative(code_files.NO_COMPILER)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not code_files.only_ours(place.parent):
        raise NotNative(f"others can write to {place.parent}")
    with tempfile.TemporaryDirectory(prefix=".new-", dir=place.parent) as made:
        fresh = Path(made) / "made.so"
        defined = [f"-D{name}={size}" for name, size in sizes.items()]
        command = [compiler, *FLAGS, *defined, str(source), "-o", str(fresh)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise NotNative(f"{compiler} took more than {COMPILE_SECONDS:.0f} s") from error
        if done.returncode:
            raise NotNative(f"{compiler} ended with {done.returncode}: {_first_line(done.stderr)}")
        code_files.put(fresh, place)


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:200]
