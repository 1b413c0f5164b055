"""Owns the index of the KV blocks on disk: one SQLite file that the node's processes share. Torch-free.

It says which blocks there are, how recently each was used and by which sessions; of their content it decides nothing.
Every use is one transaction. An index that is damaged, or of another version, is thrown away with all blocks: it is a
cache.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from engine.disk_files import listing, remove

T = TypeVar("T")
Index = sqlite3.Connection

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE blocks(id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, model TEXT, bytes INTEGER, ready INTEGER,
    last_used REAL, written REAL);
CREATE INDEX blocks_by_use ON blocks(last_used);
CREATE TABLE uses(session TEXT, key BLOB, PRIMARY KEY(session, key)) WITHOUT ROWID;
CREATE INDEX uses_by_key ON uses(key);
CREATE TABLE total(bytes INTEGER, blocks INTEGER);  -- a sum over all rows at every put would take milliseconds
INSERT INTO total VALUES(0, 0);
CREATE TRIGGER booked AFTER INSERT ON blocks
    BEGIN UPDATE total SET bytes = bytes + new.bytes, blocks = blocks + 1; END;
CREATE TRIGGER dropped AFTER DELETE ON blocks
    BEGIN UPDATE total SET bytes = bytes - old.bytes, blocks = blocks - 1; END;
"""
BUSY_SECONDS = 2.0  # waiting for the write lock
OPEN_SECONDS = 5.0  # waiting for another process that throws the whole directory away
WRITE, READ = "BEGIN IMMEDIATE", "BEGIN"
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR}


class DiskUnavailable(Exception):
    """The disk cannot be used now: full, read-only, failing, locked. The next call tries again."""


class Row(NamedTuple):
    id: int
    model: str
    bytes: int
    ready: int
    written: float


class SharedIndex:
    """The index as one process has it open: every use of it is one transaction, and heals what can be healed."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._path = directory / "index.db"
        self._clock = clock
        self._open_index: Index | None = None
        self._opened: tuple[int, int] | None = None  # device and inode of the index that is open
        self._condemned: tuple[int, int] | None = None  # of one that was found damaged while in use

    def run(self, act: Callable[[Index], T], begin: str = WRITE, wait_seconds: float = BUSY_SECONDS) -> T:
        """``act`` in one transaction of an index that is whole and still the directory's; DiskUnavailable."""
        error: Exception | None = None
        for _ in range(3):
            try:
                index = self._open_index if self._open_index is not None else self._open()
                index.execute(f"PRAGMA busy_timeout = {wait_seconds * 1000:.0f}")
                index.execute(begin)
                if not self._replaced():
                    result = act(index)
                    index.execute("COMMIT")
                    return result
                self.abandon()
            except (sqlite3.Error, OSError, UnicodeDecodeError) as caught:
                error, damaged = caught, _damaged(caught)
                again = damaged or self._replaced()
                self._condemned = self._opened if damaged else None
                self.abandon(keep=getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY)
                if not again:
                    break
            except BaseException:
                self.abandon()
                raise
        cause = f"{type(error).__name__}: {error}" if error else "its index is replaced again and again"
        raise DiskUnavailable(f"{self._directory}: {cause}") from error

    def _open(self) -> Index:
        """The directory's index; made when there is none, and anew, without blocks, when it is of no use.

        Under a lock, so that two processes do not throw away each other's new one.
        """
        with flock(self._directory / ".lock", OPEN_SECONDS) as held:
            if not held:
                raise DiskUnavailable(f"{self._directory}: another process has held its lock for {OPEN_SECONDS:.0f} s")
            found = _identity(self._path)
            index = self._connect() if found is not None and found != self._condemned else None
            if index is None:
                self._throw_away()
                os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                index = self._connect()
            if index is None:
                raise DiskUnavailable(f"{self._directory}: its new index is damaged at once")
            self._open_index, self._opened, self._condemned = index, _identity(self._path), None
            return index

    def _connect(self) -> Index | None:
        """None: no whole index of this version."""
        index = sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            index.execute("PRAGMA journal_mode = WAL")
            index.execute("PRAGMA synchronous = NORMAL")
            if not index.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                # Ids begin at the time, so that they are larger than all of an index that was thrown away: a host that
                # asks for keys after its last id would else not see the new ones.
                first = f"INSERT INTO sqlite_sequence VALUES('blocks', {int(self._clock() * 1e6)});"
                index.executescript(f"BEGIN; {SCHEMA} {first} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            version = index.execute("PRAGMA user_version").fetchone()[0]
            whole = version == SCHEMA_VERSION and index.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
        except (sqlite3.Error, UnicodeDecodeError) as error:
            index.close()
            if not _damaged(error):
                raise
            return None
        except BaseException:
            index.close()
            raise
        if not whole:
            index.close()
        return index if whole else None

    def _throw_away(self) -> None:
        """The index last: whoever finds it still there, because we were killed, goes on with it."""
        for names in listing(self._directory):
            for name in names:
                remove(self._directory / name)
        for suffix in ("", "-wal", "-shm"):
            remove(self._directory / f"index.db{suffix}")

    def _replaced(self) -> bool:
        """Somebody else threw the index away, or the directory: what is open has no name any more."""
        return self._open_index is not None and _identity(self._path) != self._opened

    def abandon(self, keep: bool = False) -> None:
        """Ends the transaction, and lets go of the index: what is wrong with it shows when it is opened."""
        index = self._open_index
        if index is None:
            return
        with suppress(sqlite3.Error):
            if index.in_transaction:
                index.execute("ROLLBACK")
        if not keep:
            self._open_index = None
            with suppress(sqlite3.Error):
                index.close()


def find(index: Index, key: bytes) -> Row | None:
    row = index.execute("SELECT id, model, bytes, ready, written FROM blocks WHERE key = ?", (key,)).fetchone()
    return Row(*row) if row is not None else None


def add_uses(index: Index, pairs: Iterable[tuple[str, bytes]]) -> None:
    index.executemany("INSERT OR IGNORE INTO uses SELECT ?, key FROM blocks WHERE key = ?", pairs)


def remove_unused(index: Index) -> int:
    index.execute(
        "UPDATE total SET bytes = (SELECT coalesce(sum(bytes), 0) FROM blocks), blocks = (SELECT count(*) FROM blocks)"
    )
    return index.execute("DELETE FROM uses WHERE key NOT IN (SELECT key FROM blocks)").rowcount


def _damaged(error: Exception) -> bool:
    """Whether it speaks of what the index holds. Of a damaged text the error has no code, or its own text is none."""
    code = getattr(error, "sqlite_errorcode", 0)
    if isinstance(error, UnicodeDecodeError) or (type(error) is sqlite3.OperationalError and not code):
        return True
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF in DAMAGE


@contextmanager
def flock(path: Path, wait_seconds: float) -> Iterator[bool]:
    """Whether the lock was got. The kernel lets it go when its holder is killed."""
    deadline = time.monotonic() + wait_seconds
    while True:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            held = _try_flock(handle)
            found = os.fstat(handle)
            if held and _identity(path) == (found.st_dev, found.st_ino):  # else the directory was deleted meanwhile
                yield True
                return
        finally:
            os.close(handle)
        if time.monotonic() >= deadline:
            yield False
            return
        time.sleep(0.01)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; they are not given to another file while this one is open."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _try_flock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
