"""Owns the file form of one KV block on disk, and the directories these files lie in. Torch-free.

A block is one file, ``<directory>/<model[:16]>/<key hex[:2]>/<key hex>.kv``: safetensors, tensor ``kv`` (uint8,
``[block_bytes]``) and a JSON record with a checksum of its own. It is believed only after all of it was checked.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
RECORD = "block"


class Damaged(Exception):
    """A file is not the block that its name says."""


@contextmanager
def write_temporary(path: Path, parts: Iterable[bytes | memoryview], make_directories: bool = False) -> Iterator[Path]:
    """The parts, synced, in a new file (mode 0600) beside ``path``, to be renamed; else it is removed. OSError."""
    handle, name = _temporary_in_new_directories(path) if make_directories else _temporary(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        with suppress(OSError):
            Path(name).unlink(missing_ok=True)


def _temporary(path: Path) -> tuple[int, str]:
    return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")


def _temporary_in_new_directories(path: Path) -> tuple[int, str]:
    for last in (False, True):
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            return _temporary(path)
        except FileNotFoundError:  # another process just removed the empty directory
            if last:
                raise
    raise AssertionError


def header_of(model: str, key: bytes, token_ids: Sequence[int], kv: np.ndarray) -> bytes:
    """All of the file before its tensor. By hand: ``safetensors.numpy.save`` copies the tensor twice."""
    record = {
        "version": VERSION,
        "key": key.hex(),
        "token_ids": [int(token) for token in token_ids],
        "crc32": zlib.crc32(kv.data),
        "model": model,
    }
    text = json.dumps(record)
    metadata = {RECORD: text, "crc32": str(zlib.crc32(text.encode()))}
    tensor = {"dtype": "U8", "shape": [kv.nbytes], "data_offsets": [0, kv.nbytes]}
    header = json.dumps({"__metadata__": metadata, "kv": tensor}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def read_block(path: Path, key: bytes, out: np.ndarray) -> dict[str, Any]:
    """Fill ``out`` (uint8 ``[block_bytes]``) with the tensor; the record. Damaged unless all is as it was written.

    Read and not mapped: a mapped file that somebody truncates kills the process.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size != 8 + length + out.nbytes:
            raise Damaged(f"{size} bytes with a header of {length}")
        header = file.read(length)
        if len(header) != length or file.readinto(out.data) != out.nbytes:
            raise Damaged("it became shorter")
    record = _record(header)
    if (record["version"], record["key"], record["crc32"]) != (VERSION, key.hex(), zlib.crc32(out.data)):
        raise Damaged("its version, its key, or its KV (checksum)")
    return record


def _record(header: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(header)["__metadata__"]
        text = metadata[RECORD]
        if str(zlib.crc32(text.encode())) != metadata["crc32"]:
            raise Damaged("its record (checksum)")
        record: dict[str, Any] = json.loads(text)
        if missing := {"version", "key", "crc32", "model", "token_ids"} - record.keys():
            raise Damaged(f"its record has no {', '.join(sorted(missing))}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header: {error}") from error
    return record


def name_of(model: str, key: bytes) -> str:
    name = key.hex()
    return f"{model[:16]}/{name[:2]}/{name}.kv"


def is_hex(text: str) -> bool:
    return len(text) % 2 == 0 and all(character in "0123456789abcdef" for character in text)


def listing(directory: Path) -> tuple[set[str], set[str]]:
    """Names, relative to the directory, of block files and of temporary files. Anything else is not ours."""
    blocks, temporary = set(), set()
    for model in subdirectories(directory):
        for part in fanout(model):
            for entry in _entries(part):
                name = f"{model.name}/{part.name}/{entry.name}"
                if entry.name.endswith(".kv"):
                    blocks.add(name)
                elif entry.name.startswith(".") and entry.name.endswith(".tmp"):
                    temporary.add(name)
    return blocks, temporary


def remove(path: Path) -> None:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (IsADirectoryError, PermissionError):  # EPERM is what POSIX says for a directory
        if not path.is_dir():
            raise
        shutil.rmtree(path)


def subdirectories(path: Path) -> list[Path]:
    return [Path(entry) for entry in _entries(path) if entry.is_dir(follow_symlinks=False)]


def fanout(model: Path) -> list[Path]:
    return [part for part in subdirectories(model) if len(part.name) == 2 and is_hex(part.name)]


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, PermissionError):  # removed since it was listed; not ours, as a volume's lost+found
        return []
