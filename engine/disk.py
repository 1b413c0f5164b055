"""Owns the KV blocks that a node keeps on disk, below host memory: their files, and the index of them. Torch-free.

It is a cache that several processes share and that any of them may leave at any instruction: losing some of it costs
time, never an answer. A block is one file, ``<directory>/<model[:16]>/<key hex[:2]>/<key hex>.kv``: safetensors, tensor
``kv`` (uint8, ``[block_bytes]``) and a JSON record with a checksum of its own. A file is believed only after all of it
was checked, so the index (SQLite) decides nothing about content, only about room, recency and who uses what.

Files appear and vanish only under SQLite's write lock, inside the transaction that says so. Were they unlinked after
it, a process could unlink what another has just written again, and one killed in between would keep what a deleted
session had. Bytes are booked before they are written, so the rows are never less than what lies there. Whoever holds
the lock and needs room evicts: the elected host of design section 7.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engine.disk_files import (
    Damaged,
    fanout,
    header_of,
    is_hex,
    listing,
    name_of,
    read_block,
    remove,
    subdirectories,
    write_temporary,
)
from engine.disk_index import READ, DiskUnavailable, Index, SharedIndex, add_uses, find, flock, remove_unused

T = TypeVar("T")

READERS = 2
STALE_SECONDS = 60.0  # a file takes milliseconds to write: its writer was killed
TOUCH_SECONDS = 1.0  # reads write to the index no more often
PENDING_TOUCHES = 10_000
BATCH = 500  # blocks removed per transaction, so that others get their turn


@dataclass(frozen=True, slots=True)
class DiskBooks:
    """Of the whole node, all models and processes."""

    capacity_bytes: int
    used_bytes: int  # whole files, those being written too
    blocks: int


class DiskStore:
    """The blocks on disk as one process sees them. Every method may raise DiskUnavailable; none waits long.

    Args:
        directory: shared by the node's processes; made (mode 0700) if it is not there.
        capacity_bytes: of all block files together.
    """

    def __init__(self, directory: Path, capacity_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._index = SharedIndex(directory, clock)
        self._touched: dict[bytes, None] = {}  # read since the index was last told, in order
        self._touched_at = self._told_at = clock()
        self._readers = ThreadPoolExecutor(READERS, "kv-read")  # reading and checksums let go of the GIL
        self._index.run(lambda index: None, READ)

    # -- blocks -------------------------------------------------------------------------------

    def put(
        self, model: str, key: bytes, token_ids: Sequence[int], content: np.ndarray, sessions: Sequence[str] = ()
    ) -> bool:
        """Keeps a block, ``content`` uint8 ``[block_bytes]``, evicting what was not used for longest.

        True: it is there now, or was already (then it counts as used, by ``sessions`` too). False: no room for it.
        """
        kv = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
        header = header_of(model, key, token_ids, kv)
        size = len(header) + kv.nbytes
        if size > self._capacity_bytes:
            return False
        booked = self._index.run(partial(self._book, model=model, key=key, size=size, sessions=sessions))
        if booked is None:
            return True
        path = self._path(model, key)
        try:
            with self._unavailable(), write_temporary(path, (header, kv.data), make_directories=True) as temporary:
                return self._index.run(partial(self._publish, key=key, booked=booked, temporary=temporary, path=path))
        except BaseException:
            with suppress(DiskUnavailable):
                self._index.run(partial(self._unbook, booked=booked))
            raise

    def get(self, model: str, key: bytes, token_ids: Sequence[int], block_bytes: int) -> np.ndarray | None:
        """A block's content, uint8 ``[block_bytes]``; None when it is not there."""
        out = np.empty((1, block_bytes), np.uint8)
        return out[0] if self.get_into(model, [(key, token_ids)], out)[0] else None

    def get_into(self, model: str, wanted: Sequence[tuple[bytes, Sequence[int]]], out: np.ndarray) -> list[bool]:
        """Fill the rows of ``out``, uint8 ``[blocks, block_bytes]``, with the blocks of (key, token ids); which it did.

        A damaged file is removed. The index is not asked: a file that passes the checks is the block.
        """
        reads = [(self._path(model, key), key, out[row]) for row, (key, _) in enumerate(wanted)]
        found = map(_try_read, reads) if len(reads) == 1 else self._readers.map(_try_read, reads)
        return [
            self._judge(model, key, token_ids, outcome)
            for (key, token_ids), outcome in zip(wanted, list(found), strict=True)
        ]

    def _judge(self, model: str, key: bytes, token_ids: Sequence[int], outcome: dict[str, Any] | Exception) -> bool:
        if isinstance(outcome, (FileNotFoundError, NotADirectoryError)):
            row = self._index.run(partial(find, key=key), READ)
            if row is not None and row.ready:
                self._index.run(partial(self._drop_gone, keys=[key]))
            return False
        if isinstance(outcome, (Damaged, IsADirectoryError)):
            self._index.run(partial(self._drop, key=key, model=model))
            return False
        if isinstance(outcome, Exception):
            raise DiskUnavailable(f"cannot read from {self._directory}: {outcome}") from outcome
        if outcome["model"] != model or outcome["token_ids"] != list(token_ids):
            return False  # a whole block, but somebody else's
        self._touch(key)
        return True

    def discard(self, keys: Iterable[bytes]) -> None:
        """Drops these blocks, whoever uses them."""
        for batch in _batches(list(keys)):
            self._index.run(partial(self._drop_all, keys=batch))

    def new_keys(self, model: str, after: int) -> tuple[list[bytes], int]:
        """Keys of the model that any process completed since ``after`` (0, or the number returned before)."""
        query = "SELECT key, id FROM blocks WHERE model = ? AND id > ? AND ready ORDER BY id"
        rows = self._index.run(lambda index: index.execute(query, (model, after)).fetchall(), READ)
        return [key for key, _ in rows], rows[-1][1] if rows else after

    # -- who uses them ------------------------------------------------------------------------

    def note(self, session: str, keys: Sequence[bytes]) -> None:
        """The session uses these blocks too; a key that is not here is passed over."""
        if keys:
            self._index.run(partial(add_uses, pairs=[(session, key) for key in keys]))

    def forget(self, session: str) -> int:
        """Drops the blocks, of every model, that only this session used; their number.

        Killed half way, the session is still among ``sessions()``.
        """
        dropped, more = 0, True
        while more:
            count, more = self._index.run(partial(self._forget_some, session=session))
            dropped += count
        return dropped

    def sessions(self) -> list[str]:
        """Every session that is noted for some block."""
        query = "SELECT DISTINCT session FROM uses ORDER BY session"
        return [session for (session,) in self._index.run(lambda index: index.execute(query).fetchall(), READ)]

    # -- the whole ----------------------------------------------------------------------------

    def sweep(self) -> int:
        """Removes what killed processes left: files, temporary files, rows and uses; their number.

        One process at a time does it; 0 when another is at it.
        """
        with self._unavailable(), flock(self._directory / ".sweep", 0.0) as held:
            if not held:
                return 0
            files, temporary = listing(self._directory)  # before the rows: a row is older than its file
            removed = sum(map(self._remove_if_stale, temporary))
            query = "SELECT key, model, ready, written FROM blocks"
            rows = self._index.run(lambda index: index.execute(query).fetchall(), READ)
            named = {name_of(model, key): key for key, model, _, _ in rows}
            stale = self._clock() - STALE_SECONDS
            suspects = [
                key
                for key, model, ready, written in rows
                if (name_of(model, key) not in files if ready else written < stale)
            ]
            for names in _batches([name for name in files if name not in named]):
                removed += self._index.run(partial(self._remove_orphans, names=names))
            for keys in _batches(suspects):
                removed += self._index.run(partial(self._drop_gone, keys=keys))
            removed += self._index.run(remove_unused)
            self._remove_empty(files)
            return removed

    def books(self) -> DiskBooks:
        """Bytes and blocks now."""
        used, blocks = self._index.run(lambda index: index.execute("SELECT bytes, blocks FROM total").fetchone(), READ)
        return DiskBooks(self._capacity_bytes, used, blocks)

    def close(self) -> None:
        """Lets the index go; a later call opens it again."""
        self._tell()
        self._index.abandon()
        self._readers.shutdown(wait=False)

    # -- inside a transaction -----------------------------------------------------------------

    def _book(self, index: Index, model: str, key: bytes, size: int, sessions: Sequence[str]) -> int | None:
        """The id under which the bytes are booked; None when the block is there already."""
        self._store_touches(index)
        now = self._clock()
        row = find(index, key)
        same = row is not None and (row.model, row.bytes) == (model, size)
        if row is not None and same and (not row.ready or self._lies_there(model, key, size)):
            # A row that is not ready is being written, or its writer was killed. To write the same content a second
            # time is harmless; to believe that the other will finish is not.
            index.execute("UPDATE blocks SET last_used = ?, written = ? WHERE id = ?", (now, now, row.id))
            add_uses(index, [(session, key) for session in sessions])
            return None if row.ready else row.id
        if row is not None:
            index.execute("DELETE FROM blocks WHERE id = ?", (row.id,))  # its uses stay: they are about the key
            remove(self._path(row.model, key))
        self._make_room(index, size)
        cursor = index.execute(
            "INSERT INTO blocks(key, model, bytes, ready, last_used, written) VALUES(?, ?, ?, 0, ?, ?)",
            (key, model, size, now, now),
        )
        add_uses(index, [(session, key) for session in sessions])
        return cursor.lastrowid

    def _make_room(self, index: Index, size: int) -> None:
        excess = index.execute("SELECT bytes FROM total").fetchone()[0] + size - self._capacity_bytes
        victims = []
        with closing(index.execute("SELECT key, model, bytes FROM blocks ORDER BY last_used, id")) as rows:
            for key, model, freed in rows:
                if excess <= 0:
                    break
                victims.append((key, model))
                excess -= freed
        for key, model in victims:
            self._drop(index, key, model)

    def _publish(self, index: Index, key: bytes, booked: int, temporary: Path, path: Path) -> bool:
        row = find(index, key)
        if row is None or row.id != booked:  # evicted or forgotten meanwhile, or written by another
            return row is not None and bool(row.ready)
        try:
            temporary.replace(path)
        except IsADirectoryError:
            remove(path)
            temporary.replace(path)
        except FileNotFoundError:  # swept, because writing took a minute, or thrown away with the directory
            self._drop(index, key, row.model)
            return False
        # A new id: whoever asks for keys after 9 must not miss 8 because it was ready later.
        index.execute("DELETE FROM blocks WHERE id = ?", (booked,))
        index.execute(
            "INSERT INTO blocks(key, model, bytes, ready, last_used, written) VALUES(?, ?, ?, 1, ?, ?)",
            (key, row.model, row.bytes, self._clock(), row.written),
        )
        return True

    def _unbook(self, index: Index, booked: int) -> None:
        row = index.execute("SELECT key, model FROM blocks WHERE id = ?", (booked,)).fetchone()
        if row is not None:
            self._drop(index, *row)

    def _drop(self, index: Index, key: bytes, model: str) -> None:
        index.execute("DELETE FROM blocks WHERE key = ?", (key,))
        index.execute("DELETE FROM uses WHERE key = ?", (key,))
        remove(self._path(model, key))

    def _drop_all(self, index: Index, keys: Iterable[bytes]) -> int:
        rows = [(key, row.model) for key in keys if (row := find(index, key)) is not None]
        for key, model in rows:
            self._drop(index, key, model)
        return len(rows)

    def _drop_gone(self, index: Index, keys: Iterable[bytes]) -> int:
        return sum(self._drop_if_gone(index, key) for key in keys)

    def _drop_if_gone(self, index: Index, key: bytes) -> bool:
        """Asked again under the lock: what was not there a moment ago may have been written since."""
        row = find(index, key)
        if row is None:
            return False
        gone = not self._path(row.model, key).exists() if row.ready else row.written < self._clock() - STALE_SECONDS
        if gone:
            self._drop(index, key, row.model)
        return gone

    def _remove_orphans(self, index: Index, names: Iterable[str]) -> int:
        removed = 0
        for name in names:
            path = self._directory / name
            row = find(index, bytes.fromhex(path.stem)) if is_hex(path.stem) else None
            if (row is None or name_of(row.model, bytes.fromhex(path.stem)) != name) and os.path.lexists(path):
                remove(path)
                removed += 1
        return removed

    def _forget_some(self, index: Index, session: str) -> tuple[int, bool]:
        """Blocks dropped of the next ones the session used, and whether there are more."""
        query = """SELECT key, (SELECT count(*) FROM uses AS other WHERE other.key = uses.key) = 1
                   FROM uses WHERE session = ? LIMIT ?"""
        rows = index.execute(query, (session, BATCH)).fetchall()
        dropped = self._drop_all(index, [key for key, alone in rows if alone])
        index.executemany("DELETE FROM uses WHERE session = ? AND key = ?", [(session, key) for key, _ in rows])
        return dropped, len(rows) == BATCH

    # -- recency ------------------------------------------------------------------------------

    def _touch(self, key: bytes) -> None:
        self._touched.pop(key, None)
        self._touched[key] = None
        self._touched_at = self._clock()
        if not 0 <= self._touched_at - self._told_at < TOUCH_SECONDS:
            self._tell()

    def _tell(self) -> None:
        """Best effort and without waiting: recency is not worth a failed or a slow read."""
        self._told_at = self._clock()
        if len(self._touched) > PENDING_TOUCHES:
            self._touched.clear()
        if self._touched:
            with suppress(DiskUnavailable):
                self._index.run(self._store_touches, wait_seconds=0.0)

    def _store_touches(self, index: Index) -> None:
        """Of what was read together the first counts as the most recent: chains are evicted from their end."""
        rows = [(self._touched_at - place * 1e-6, key) for place, key in enumerate(self._touched)]
        index.executemany("UPDATE blocks SET last_used = max(last_used, ?) WHERE key = ?", rows)
        self._touched.clear()

    # -- files --------------------------------------------------------------------------------

    def _path(self, model: str, key: bytes) -> Path:
        if "/" in model or model[:1] in {"", "."}:
            raise ValueError(f"a model's name is a directory here: {model!r} cannot be one")
        return self._directory / name_of(model, key)

    def _lies_there(self, model: str, key: bytes, size: int) -> bool:
        try:
            found = self._path(model, key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == size

    def _remove_if_stale(self, name: str) -> bool:
        path = self._directory / name
        try:
            stale = path.stat().st_mtime < self._clock() - STALE_SECONDS
        except FileNotFoundError:
            return False
        if stale:
            remove(path)
        return stale

    def _remove_empty(self, blocks: set[str]) -> None:
        """Directories of models that have no block any more; one that is not empty stays."""
        alive = {name.split("/", 1)[0] for name in blocks}
        for model in subdirectories(self._directory):
            if model.name not in alive and fanout(model):
                with suppress(OSError):
                    for part in fanout(model):
                        part.rmdir()
                    model.rmdir()

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskUnavailable(f"{self._directory}: {type(error).__name__}: {error}") from error


def _try_read(read: tuple[Path, bytes, np.ndarray]) -> dict[str, Any] | Exception:
    try:
        return read_block(*read)
    except (Damaged, OSError) as error:
        return error


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
