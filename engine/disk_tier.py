"""Owns the disk tier of one engine: a thread that reads and writes a ``DiskStore``, so that no step waits for a disk.

The engine's thread only asks which keys are known, queues work, and takes up what has landed. Whatever goes wrong with
the disk — full, read-only, deleted under us, damaged files, or a read that never returns — is time, never an answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.disk import DiskStore
from engine.disk_index import DiskUnavailable
from engine.protocol import DiskStats

RETRY_SECONDS = 5.0  # a disk that failed is tried again
REFRESH_SECONDS = 1.0  # how often other hosts' blocks are looked for
SESSIONS_SECONDS = 5.0  # how often it is asked whose blocks there are
SWEEP_SECONDS = 60.0
PATIENCE_SECONDS = 2.0  # without one block read, after which those who wait compute instead
QUEUED_BYTES = 16 * 2**20  # most waiting to be written; what comes beyond is dropped
ERRANDS = 4096  # most waiting for a disk that is out of use
NEW_SHARE = 0.2  # of the last sample in the running mean
REMEMBERED_SECONDS = 60.0


def queued_blocks(block_bytes: int) -> int:
    """Blocks that may wait in memory to be written; and as many that are read together."""
    return max(2, QUEUED_BYTES // block_bytes)


@dataclass(frozen=True, slots=True)
class Landing:
    """A fetch that has ended."""

    key: bytes
    arrived: bool  # is its content in the block it was fetched for?


@dataclass(frozen=True, slots=True)
class _Fetch:
    ticket: int
    key: bytes
    token_ids: tuple[int, ...]
    block: int


@dataclass(slots=True, eq=False)
class _Put:
    key: bytes
    token_ids: tuple[int, ...]
    content: np.ndarray
    sessions: tuple[str, ...]


class Mean:
    """A running mean that is forgotten after a minute without a sample: what was slow then is tried again."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._at = 0.0

    @property
    def value(self) -> float | None:
        return self._mean if time.monotonic() - self._at < REMEMBERED_SECONDS else None

    def add(self, sample: float) -> None:
        old = self.value
        self._mean = sample if old is None else (1 - NEW_SHARE) * old + NEW_SHARE * sample
        self._at = time.monotonic()


class DiskTier:
    """See the module's text. Its public methods are for the engine's thread."""

    def __init__(
        self,
        open_store: Callable[[], DiskStore],
        model: str,
        block_bytes: int,
        fill: Callable[[Sequence[int], np.ndarray], None],
    ) -> None:
        """Starts the thread.

        Args:
            model: fingerprint of the weights.
            fill: writes content (uint8 ``[blocks, block_bytes]``) into blocks of the device; called in the thread.
        """
        self._open, self._model, self._block_bytes, self._fill = open_store, model, block_bytes, fill
        self._queued = queued_blocks(block_bytes)
        self._staging = np.empty((self._queued, block_bytes), np.uint8)  # what is read together
        self._known: set[bytes] = set()
        self._fetches: deque[_Fetch] = deque()
        self._puts: deque[_Put] = deque()
        self._errands: deque[Callable[[DiskStore], object]] = deque(maxlen=ERRANDS)
        self._landed: deque[Landing] = deque()
        self._change = threading.Condition()
        self._arrival = threading.Event()
        self._listed = threading.Event()
        self._tickets = 0
        self._void = 0  # tickets up to this one must not fill a block any more
        self._outstanding = 0
        self._heard = time.monotonic()
        self._read_took, self._write_took = Mean(), Mean()
        self._counts = {"written": 0, "fetched": 0, "missed": 0, "dropped": 0}
        self._problem = ""
        self._books = DiskStats()
        self._sessions: tuple[str, ...] = ()
        self._closing = self._busy = self._reading = self._hanging = False
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    # -- the engine's side -----------------------------------------------------

    def wait_listed(self, seconds: float) -> None:
        """Until it is known what lies on disk; the first request may come a moment later."""
        self._listed.wait(seconds)

    def has(self, key: bytes) -> bool:
        """Was this block on disk when last looked, and does the disk answer?"""
        return key in self._known and not self._hanging

    @property
    def read_seconds(self) -> float | None:
        """What reading a block has cost lately; None: none was read."""
        return self._read_took.value

    @property
    def write_seconds(self) -> float | None:
        return self._write_took.value

    def fetch(self, key: bytes, token_ids: tuple[int, ...], block: int) -> None:
        """Read a block's content into ``block``, which stays the fetch's own until it has landed or was given up."""
        with self._change:
            if not self._outstanding:
                self._heard = time.monotonic()
            self._tickets += 1
            self._outstanding += 1
            self._fetches.append(_Fetch(self._tickets, key, token_ids, block))
            self._change.notify()

    def landed(self) -> list[Landing]:
        """The fetches that have ended since the last call."""
        with self._change:
            found = list(self._landed)
            self._landed.clear()
            self._arrival.clear()
            return found

    def wait(self, seconds: float) -> None:
        """Until a fetch lands."""
        self._arrival.wait(seconds)

    def stuck(self) -> bool:
        """Has nothing landed for too long?"""
        return bool(self._outstanding) and time.monotonic() - self._heard > PATIENCE_SECONDS

    def give_up(self) -> None:
        """No fetch so far fills a block any more, nor lands. Never waits for the disk."""
        with self._change:
            self._void = self._tickets
            self._outstanding = 0
            self._hanging = self._reading
            self._fetches.clear()
            self._landed.clear()

    def put(self, key: bytes, token_ids: tuple[int, ...], content: np.ndarray, sessions: Sequence[str]) -> None:
        """Write a block's content some time soon; dropped when too much waits already."""
        with self._change:
            if self._problem or self._closing or len(self._puts) >= self._queued:
                self._counts["dropped"] += 1
                return
            self._puts.append(_Put(key, token_ids, content, tuple(sessions)))
            self._change.notify()

    def wait_room(self, until: float) -> bool:
        """Wait until a block more may be queued; False when that is not before ``until`` (monotonic seconds)."""
        with self._change:
            return self._change.wait_for(
                lambda: bool(self._problem) or len(self._puts) < self._queued, until - time.monotonic()
            )

    def note(self, session: str, keys: Sequence[bytes]) -> None:
        """This session uses these blocks, those of them that are on disk."""
        mine = [key for key in keys if key in self._known]
        if mine:
            self._errand(lambda store: store.note(session, mine))

    def forget_session(self, session: str) -> None:
        """Drop what only this session uses, of every model; what waits to be written too."""
        with self._change:
            for put in list(self._puts):
                if session in put.sessions:
                    put.sessions = tuple(name for name in put.sessions if name != session)
                    if not put.sessions:
                        self._puts.remove(put)
        self._errand(lambda store: store.forget(session))

    def discard(self, keys: Sequence[bytes]) -> None:
        """Let nobody find these blocks again."""
        gone = set(keys)
        mine = [key for key in keys if key in self._known]
        self._known -= gone
        with self._change:
            for put in [put for put in self._puts if put.key in gone]:
                self._puts.remove(put)
        if mine:
            self._errand(lambda store: store.discard(mine))

    def sessions(self) -> tuple[str, ...]:
        """The sessions with blocks on this node's disk, of every model, as of a moment ago."""
        return self._sessions

    def stats(self) -> DiskStats:
        books = self._books
        return DiskStats(books.capacity_bytes, books.used_bytes, books.blocks, **self._counts, problem=self._problem)

    def flush(self, seconds: float) -> bool:
        """Wait until all that was queued is done; False if the disk is not that fast."""
        with self._change:
            return self._change.wait_for(lambda: not (self._puts or self._errands or self._busy), seconds)

    def close(self, seconds: float) -> None:
        """Finish what is queued, within ``seconds``, and end the thread."""
        self.give_up()
        self.flush(seconds)
        with self._change:
            self._closing = True
            self._known = set()
            self._change.notify()
        self._thread.join(timeout=1)

    def _errand(self, work: Callable[[DiskStore], object]) -> None:
        with self._change:
            self._errands.append(work)
            self._change.notify()

    # -- the thread ------------------------------------------------------------

    def _run(self) -> None:
        store: DiskStore | None = None
        while not self._closing:
            try:
                store = store or self._open()
                self._serve(store)
            except DiskUnavailable as error:
                self._out_of_use(str(error))
            except Exception as error:  # noqa: BLE001 — boundary: a thread that ended would be waited for again and again
                self._out_of_use(f"{type(error).__name__}: {error}")
        if store is not None:
            store.close()

    def _serve(self, store: DiskStore) -> None:
        """Until the end, or until the disk fails. What other hosts wrote is learnt anew: they may have, meanwhile."""
        last = 0
        refresh = sessions = sweep = 0.0
        while not self._closing:
            now = time.monotonic()
            if now >= refresh:
                last = self._refresh(store, last)
                refresh = now + REFRESH_SECONDS
            if now >= sessions:
                self._sessions = tuple(store.sessions())
                sessions = now + SESSIONS_SECONDS
            if now >= sweep:
                store.sweep()
                sweep = now + SWEEP_SECONDS
            with self._change:
                self._problem = ""
                self._change.wait_for(self._has_work, REFRESH_SECONDS)
                self._busy = True
            try:
                self._work(store)
            finally:
                with self._change:
                    self._busy = False
                    self._change.notify_all()

    def _has_work(self) -> bool:
        return bool(self._closing or self._fetches or self._errands or self._puts)

    def _work(self, store: DiskStore) -> None:
        """One piece: who waits for KV comes first."""
        with self._change:
            fetches = [self._fetches.popleft() for _ in range(min(len(self._fetches), self._queued))]
            errand = self._errands.popleft() if not fetches and self._errands else None
            put = self._puts[0] if not fetches and errand is None and self._puts else None
            self._reading = bool(fetches)
        if fetches:
            self._read(store, fetches)
        elif errand is not None:
            self._do(store, errand)
        elif put is not None:
            self._write(store, put)

    def _do(self, store: DiskStore, errand: Callable[[DiskStore], object]) -> None:
        try:
            errand(store)
        except DiskUnavailable:
            with self._change:
                self._errands.appendleft(errand)  # what is to be forgotten must be
            raise

    def _read(self, store: DiskStore, fetches: Sequence[_Fetch]) -> None:
        begin = time.monotonic()
        found = [False] * len(fetches)
        try:
            wanted = [(fetch.key, fetch.token_ids) for fetch in fetches]
            found = store.get_into(self._model, wanted, self._staging[: len(fetches)])
        finally:
            self._land(fetches, found)
        self._known -= {fetch.key for fetch, there in zip(fetches, found, strict=True) if not there}
        self._counts["missed"] += found.count(False)
        self._counts["fetched"] += found.count(True)
        if any(found):
            self._read_took.add((time.monotonic() - begin) / len(fetches))

    def _land(self, fetches: Sequence[_Fetch], found: Sequence[bool]) -> None:
        with self._change:  # held while blocks are filled: after ``give_up`` they may be anybody's
            self._reading = self._hanging = False
            valid = [row for row, fetch in enumerate(fetches) if fetch.ticket > self._void]
            rows = [row for row in valid if found[row]]
            if rows:
                content = self._staging[: len(fetches)] if len(rows) == len(fetches) else self._staging[rows]
                self._fill([fetches[row].block for row in rows], content)
            self._landed += [Landing(fetches[row].key, found[row]) for row in valid]
            self._outstanding -= len(valid)
            self._heard = time.monotonic()
            self._arrival.set()

    def _write(self, store: DiskStore, put: _Put) -> None:
        begin = time.monotonic()
        try:
            written = store.put(self._model, put.key, put.token_ids, put.content, put.sessions)
        finally:
            with self._change:
                forgotten = put not in self._puts  # its session was deleted, or its key discarded, meanwhile
                if not forgotten:
                    self._puts.remove(put)
        if forgotten:
            store.discard([put.key])
        elif written:
            self._known.add(put.key)
            self._write_took.add(time.monotonic() - begin)
            self._counts["written"] += 1
        else:
            self._counts["dropped"] += 1

    def _refresh(self, store: DiskStore, last: int) -> int:
        keys, last = store.new_keys(self._model, last)
        self._known.update(keys)
        books = store.books()
        self._books = DiskStats(books.capacity_bytes, books.used_bytes, books.blocks)
        self._listed.set()
        return last

    def _out_of_use(self, why: str) -> None:
        """Those who wait compute instead; what was to be written is dropped, what was to be forgotten is not."""
        with self._change:
            self._problem = why
            self._known = set()
            self._counts["dropped"] += len(self._puts)
            self._puts.clear()
            while self._fetches:
                fetch = self._fetches.popleft()
                if fetch.ticket > self._void:
                    self._landed.append(Landing(fetch.key, arrived=False))
                    self._outstanding -= 1
            self._arrival.set()
            self._change.notify_all()
            self._change.wait_for(lambda: self._closing, RETRY_SECONDS)
