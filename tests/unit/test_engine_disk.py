"""KV on disk: what is found again, what damage costs, who may be killed when, and that processes share it in peace."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine import disk, disk_files, disk_index
from engine.disk import DiskStore
from engine.disk_index import DiskUnavailable

MODEL = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
TOKENS = (5, 6, 7, 8)
BLOCK = 4096
ROOM = 10**9
Child = subprocess.Popen[str]


class Clock:
    """Real time, plus what a test adds: the age of files is real."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def content_of(number: int, size: int = BLOCK) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_store(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., DiskStore]]:
    stores = []

    def opened(capacity_bytes: int = ROOM) -> DiskStore:
        stores.append(DiskStore(tmp_path / "kv", capacity_bytes, clock))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., DiskStore]) -> DiskStore:
    return open_store()


def put(store: DiskStore, number: int, *sessions: str, model: str = MODEL) -> bool:
    return store.put(model, key_of(number), TOKENS, content_of(number), sessions)


def holds(store: DiskStore, number: int, model: str = MODEL) -> bool:
    content = store.get(model, key_of(number), TOKENS, BLOCK)
    assert content is None or np.array_equal(content, content_of(number)), "wrong content"
    return content is not None


def block_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*/*.kv"))


def file_of(directory: Path, number: int) -> Path:
    name = key_of(number).hex()
    return directory / MODEL[:16] / name[:2] / f"{name}.kv"


def rows(directory: Path, query: str = "SELECT key FROM blocks") -> list[tuple[object, ...]]:
    index = sqlite3.connect(directory / "index.db")
    try:
        return index.execute(query).fetchall()
    finally:
        index.close()


def check_whole(directory: Path, store: DiskStore) -> None:
    """Files, rows and sums say the same, within the capacity."""
    books = store.books()
    sizes = [path.stat().st_size for path in block_files(directory)]
    assert (books.blocks, books.used_bytes) == (len(sizes), sum(sizes))
    assert rows(directory, "SELECT count(*), coalesce(sum(bytes), 0) FROM blocks") == [(len(sizes), sum(sizes))]
    assert books.used_bytes <= books.capacity_bytes
    assert not list(directory.glob("*/*/.*.tmp"))
    assert not rows(directory, "SELECT key FROM uses WHERE key NOT IN (SELECT key FROM blocks)")


# -- what is found again ----------------------------------------------------------------------


def test_a_block_comes_back_as_it_was_also_for_another_instance_and_for_safetensors(
    tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore]
) -> None:
    assert put(store, 1)
    content = open_store().get(MODEL, key_of(1), TOKENS, BLOCK)
    assert content is not None
    assert np.array_equal(content, content_of(1))
    content[0] ^= 1  # its caller's own
    assert holds(store, 1)
    assert np.array_equal(load_file(file_of(tmp_path / "kv", 1))["kv"], content_of(1))
    check_whole(tmp_path / "kv", store)


def test_content_of_any_shape_is_its_bytes(store: DiskStore) -> None:
    assert store.put(MODEL, key_of(1), TOKENS, content_of(1).view(np.float32).reshape(2, -1).T.copy().T)
    assert store.get(MODEL, key_of(1), TOKENS, BLOCK) is not None


def test_other_tokens_or_another_model_under_the_same_key_are_a_miss_and_harm_nothing(store: DiskStore) -> None:
    put(store, 1)
    assert store.get(MODEL, key_of(1), (5, 6, 7, 9), BLOCK) is None
    assert store.get(MODEL, key_of(1), TOKENS[:3], BLOCK) is None
    assert store.get(MODEL[:16] + "another", key_of(1), TOKENS, BLOCK) is None
    assert store.get(OTHER, key_of(1), TOKENS, BLOCK) is None
    assert holds(store, 1)


def test_a_key_that_another_model_wrote_goes_to_the_one_that_writes_last(tmp_path: Path, store: DiskStore) -> None:
    put(store, 1, "session")
    assert put(store, 1, model=OTHER)
    assert not holds(store, 1)
    assert holds(store, 1, OTHER)
    assert store.sessions() == ["session"]  # what a session used is about the key
    check_whole(tmp_path / "kv", store)


def test_a_model_whose_name_would_leave_the_directory_is_refused(store: DiskStore) -> None:
    for name in ("../x", "", "."):
        with pytest.raises(ValueError, match="model"):
            put(store, 1, model=name)


def test_modes_let_only_the_owner_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = DiskStore(tmp_path / "kv", ROOM)
        put(store, 1, "session")
        store.sweep()
        found = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
        assert {path.name for path in found} >= {"index.db", "index.db-wal", ".lock", ".sweep"}
        for path in found:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        store.close()
    finally:
        os.umask(before)


# -- room -------------------------------------------------------------------------------------


def size_of_one(directory: Path, store: DiskStore) -> int:
    put(store, 0)
    size = file_of(directory, 0).stat().st_size
    store.discard([key_of(0)])
    return size


def test_the_least_recently_used_goes_first_and_the_capacity_holds(
    tmp_path: Path, store: DiskStore, clock: Clock, open_store: Callable[..., DiskStore]
) -> None:
    directory = tmp_path / "kv"
    small = open_store(3 * size_of_one(directory, store))
    for number in (1, 2, 3):
        clock.ahead += 10
        assert put(small, number, "session")
    clock.ahead += 10
    assert holds(small, 1)
    clock.ahead += 10
    assert put(small, 2)  # there already: used again
    clock.ahead += 10
    assert put(small, 4)
    assert [number for number in (1, 2, 3, 4) if holds(small, number)] == [1, 2, 4]
    assert len(rows(directory, "SELECT key FROM uses")) == 2
    check_whole(directory, small)


def test_of_a_chain_that_was_read_the_end_goes_first(
    tmp_path: Path, store: DiskStore, clock: Clock, open_store: Callable[..., DiskStore]
) -> None:
    small = open_store(3 * size_of_one(tmp_path / "kv", store))
    for number in (1, 2, 3):
        put(small, number)
    clock.ahead += 0.5
    assert all(holds(small, number) for number in (1, 2, 3))
    put(small, 4)
    assert [number for number in (1, 2, 3) if holds(small, number)] == [1, 2]


def test_a_block_larger_than_the_capacity_is_refused_and_evicts_nothing(
    tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore]
) -> None:
    small = open_store(2 * size_of_one(tmp_path / "kv", store))
    put(small, 1)
    assert not small.put(MODEL, key_of(2), TOKENS, content_of(2, 3 * BLOCK))
    assert not open_store(0).put(MODEL, key_of(3), TOKENS, content_of(3))
    assert holds(small, 1)


def test_a_store_that_became_smaller_makes_room_at_the_next_put(
    tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore]
) -> None:
    size = size_of_one(tmp_path / "kv", store)
    for number in range(8):
        put(store, number)
    small = open_store(2 * size)
    assert put(small, 9)
    assert small.books() == disk.DiskBooks(2 * size, 2 * size, 2)
    check_whole(tmp_path / "kv", small)


def test_reads_write_to_the_index_at_most_once_a_second(tmp_path: Path, store: DiskStore, clock: Clock) -> None:
    for number in range(5):
        put(store, number)

    def used() -> list[tuple[object, ...]]:
        return rows(tmp_path / "kv", "SELECT last_used FROM blocks ORDER BY id")

    clock.ahead += 5
    assert holds(store, 0)  # this one writes
    before = used()
    assert all(holds(store, number) for number in range(1, 5))
    assert used() == before
    clock.ahead += 5
    assert holds(store, 0)
    assert all(now > then for now, then in zip(used(), before, strict=True))


# -- damage -----------------------------------------------------------------------------------


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def bit_in_kv(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-BLOCK // 2] ^= 4
    path.write_bytes(content)


def bit_in_record(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"token_ids") + 14] ^= 1  # 5 becomes 4: still JSON
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def directory_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def others_file(path: Path) -> None:
    shutil.copy(file_of(path.parents[2], 2), path)


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def nested(path: Path) -> None:
    content = b"[" * 100_000
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(BLOCK))


def rewritten(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    """A file whose checksums are all right, but whose record says something else."""

    def rewrite(path: Path) -> None:
        content = path.read_bytes()
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        record = json.loads(metadata["block"])
        change(record)
        text = json.dumps(record)
        tensors = {"kv": np.frombuffer(content[-BLOCK:], np.uint8)}
        save_file(tensors, path, {"block": text, "crc32": str(zlib.crc32(text.encode()))})

    return rewrite


newer = pytest.param(rewritten(lambda record: record.update(version=disk_files.VERSION + 1)), id="newer")
unsigned = pytest.param(rewritten(lambda record: record.pop("crc32")), id="unsigned")
DAMAGES = [truncated, bit_in_kv, bit_in_record, emptied, directory_instead, others_file, newer, garbage, huge, nested]


@pytest.mark.parametrize("damage", [*DAMAGES, unsigned], ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_a_miss_and_removed_and_the_next_put_works(
    damage: Callable[[Path], None], tmp_path: Path, store: DiskStore
) -> None:
    directory = tmp_path / "kv"
    for number in (1, 2):
        put(store, number, "session")
    damage(file_of(directory, 1))
    assert store.get(MODEL, key_of(1), TOKENS, BLOCK) is None
    assert not file_of(directory, 1).exists()
    check_whole(directory, store)
    assert store.books().blocks == 1
    assert put(store, 1)
    assert holds(store, 1)
    assert holds(store, 2)


@pytest.mark.parametrize("damage", [directory_instead, truncated, emptied, Path.unlink], ids=lambda d: d.__name__)
def test_a_put_over_a_damaged_file_that_nobody_read_repairs_it(
    damage: Callable[[Path], None], tmp_path: Path, store: DiskStore
) -> None:
    put(store, 1, "session")
    damage(file_of(tmp_path / "kv", 1))
    assert put(store, 1)
    assert holds(store, 1)
    assert store.forget("session") == 1
    check_whole(tmp_path / "kv", store)


def test_a_file_that_went_away_takes_its_row_along(tmp_path: Path, store: DiskStore) -> None:
    put(store, 1, "session")
    file_of(tmp_path / "kv", 1).unlink()
    assert not holds(store, 1)
    check_whole(tmp_path / "kv", store)
    assert store.books().blocks == 0


def test_a_block_that_another_repairs_meanwhile_stays(
    tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = open_store()
    put(store, 1)
    file_of(tmp_path / "kv", 1).unlink()
    find = disk.find

    def meanwhile(index: sqlite3.Connection, key: bytes) -> object:
        monkeypatch.setattr(disk, "find", find)
        row = find(index, key)
        assert put(other, 1)
        return row

    monkeypatch.setattr(disk, "find", meanwhile)
    assert not holds(store, 1)
    assert holds(store, 1)
    check_whole(tmp_path / "kv", store)


def overwrite(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


def no_index(path: Path) -> None:
    for name in ("", "-wal", "-shm"):
        path.with_name(f"index.db{name}").unlink(missing_ok=True)


def no_database(path: Path) -> None:
    overwrite(path, b"not a database, or not any more" * 10)


def malformed(path: Path) -> None:
    overwrite(path, path.read_bytes()[:100] + bytes(path.stat().st_size - 100))


def other_version(path: Path) -> None:
    index = sqlite3.connect(path)
    index.execute("PRAGMA user_version = 99")
    index.close()


def no_table(path: Path) -> None:
    index = sqlite3.connect(path, isolation_level=None)
    index.execute("DROP TABLE total")
    index.close()


INDEX_DAMAGES = [no_index, no_database, malformed, other_version, no_table]


@pytest.mark.parametrize("damage", INDEX_DAMAGES, ids=lambda damage: damage.__name__)
def test_an_index_of_no_use_is_thrown_away_with_all_blocks(
    damage: Callable[[Path], None], tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore]
) -> None:
    directory = tmp_path / "kv"
    for number in range(4):
        put(store, number, "session")
    store.close()  # all of it is in index.db now
    assert rows(directory)
    damage(directory / "index.db")
    again = open_store()
    assert again.books().blocks == 0
    assert block_files(directory) == []
    assert put(again, 1)
    assert put(store, 2)  # it opens again by itself
    assert holds(store, 1)
    assert holds(again, 2)
    check_whole(directory, again)


@pytest.mark.parametrize("damage", INDEX_DAMAGES, ids=lambda damage: damage.__name__)
def test_an_index_damaged_in_use_costs_blocks_and_no_error(
    damage: Callable[[Path], None], tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore]
) -> None:
    directory = tmp_path / "kv"
    other = open_store()
    for number in range(4):
        put(store, number, "session")
    last = other.new_keys(MODEL, 0)[1]
    store._index.run(lambda index: None)
    store.close()
    other.close()
    assert other.books().blocks == 4  # opened again, with all of it in index.db
    damage(directory / "index.db")
    for each in (other, store, other):
        assert put(each, 7)
        each.note("session", [key_of(7)])
        each.sweep()
        each.forget("nobody")
    if damage is not other_version:  # which who has it open does not ask for
        keys, after = store.new_keys(MODEL, last)
        assert keys == [key_of(7)]  # also for who remembers an id of the index before
        assert after > last
    assert holds(store, 7)
    assert holds(other, 7)
    check_whole(directory, store)


def test_what_is_thrown_away_is_only_ours(
    tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore]
) -> None:
    directory = tmp_path / "kv"
    put(store, 1)
    (directory / "notes").mkdir()
    (directory / "notes" / "a.kv").touch()
    (directory / "file.kv").touch()
    (directory / "lost+found").mkdir()
    (directory / "a model" / "xy").mkdir(parents=True)
    (directory / "a model" / "xy" / "theirs.kv").touch()
    store.close()
    no_database(directory / "index.db")
    open_store().sweep()
    assert (directory / "notes" / "a.kv").exists()
    assert (directory / "file.kv").exists()
    assert (directory / "lost+found").exists()
    (directory / "a model" / "xy" / "theirs.kv").unlink()  # it was left alone
    assert block_files(directory) == []


# -- the disk is not usable -------------------------------------------------------------------


def test_a_directory_deleted_under_us_is_made_again(
    tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore]
) -> None:
    directory = tmp_path / "kv"
    other = open_store()
    uses: list[Callable[[DiskStore], object]] = [
        lambda each: holds(each, 1),
        lambda each: put(each, 1, "session"),
        lambda each: each.new_keys(MODEL, 0),
        lambda each: each.note("session", [key_of(1)]),
        lambda each: each.forget("session"),
        lambda each: each.discard([key_of(1)]),
        lambda each: each.sessions(),
        lambda each: each.sweep(),
        lambda each: each.books(),
    ]
    for use in uses:
        put(store, 1, "session")
        shutil.rmtree(directory)
        use(store)
        assert (directory / "index.db").exists()
        assert put(other, 2)
        assert holds(store, 2)
        check_whole(directory, other)


def test_what_is_no_directory_is_unavailable_until_it_is_one(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "kv"
    path.touch()
    with pytest.raises(DiskUnavailable, match="File exists"):
        DiskStore(path, ROOM)
    path.unlink()
    store = DiskStore(path, ROOM)
    put(store, 1)
    shutil.rmtree(path)
    path.touch()
    with pytest.raises(DiskUnavailable):
        put(store, 1)
    with pytest.raises(DiskUnavailable):
        holds(store, 1)
    path.unlink()
    assert put(store, 1)
    store.close()


def refuse(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, number: int) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, name, refused)


def test_a_read_only_directory_is_unavailable(
    tmp_path: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    with monkeypatch.context() as patch:
        refuse(patch, os, "open", errno.EROFS)  # root may write anywhere: only a simulated refusal tests this
        with pytest.raises(DiskUnavailable, match="Read-only"):
            DiskStore(tmp_path / "other", ROOM)
    with monkeypatch.context() as patch:
        refuse(patch, tempfile, "mkstemp", errno.EROFS)
        with pytest.raises(DiskUnavailable, match="Read-only"):
            put(store, 2)
    assert store.books().blocks == 1
    assert put(store, 2)


def test_an_index_that_cannot_be_written_is_unavailable(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1)
    index = store._index._open_index
    assert index is not None
    index.execute("PRAGMA query_only = 1")  # sqlite's own "attempt to write a readonly database"
    with pytest.raises(DiskUnavailable, match="readonly"):
        put(store, 2)
    assert put(store, 2)  # opened again


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("owner, name", [(os, "fsync"), (Path, "replace"), (tempfile, "mkstemp")])
def test_a_put_that_the_disk_interrupts_leaves_nothing(
    owner: object, name: str, number: int, tmp_path: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    with monkeypatch.context() as patch:
        refuse(patch, owner, name, number)
        with pytest.raises(DiskUnavailable, match=os.strerror(number)):
            put(store, 2, "session")
    check_whole(tmp_path / "kv", store)
    assert store.books().blocks == 1
    assert put(store, 2)
    assert holds(store, 2)


def test_a_real_full_disk_in_the_middle_of_a_write_leaves_nothing(tmp_path: Path, store: DiskStore) -> None:
    """Of the kernel's own making: a limit on file size, EFBIG."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    put(store, 1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
        with pytest.raises(DiskUnavailable, match="File too large"):
            store.put(MODEL, key_of(2), TOKENS, content_of(2, 1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    check_whole(tmp_path / "kv", store)
    assert store.put(MODEL, key_of(2), TOKENS, content_of(2, 1_000_000))


def test_a_locked_index_is_unavailable_for_writes_and_reads_go_on(
    tmp_path: Path, store: DiskStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    monkeypatch.setattr(disk_index.SharedIndex.run, "__defaults__", (disk_index.WRITE, 0.5))
    locker = sqlite3.connect(tmp_path / "kv" / "index.db", isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    clock.ahead += 5  # a read wants to write its touch, and lets it be
    started = time.monotonic()
    assert holds(store, 1)
    assert time.monotonic() - started < 0.4
    with pytest.raises(DiskUnavailable, match="locked"):
        put(store, 2)
    locker.close()
    assert put(store, 2)
    assert rows(tmp_path / "kv", "SELECT last_used > written + 4 FROM blocks ORDER BY id") == [(1,), (0,)]  # told later


def test_an_open_that_others_hold_up_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_index, "OPEN_SECONDS", 0.05)
    handle = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(DiskUnavailable, match="lock"):
        DiskStore(tmp_path, ROOM)
    os.close(handle)
    DiskStore(tmp_path, ROOM).close()


# -- who uses them ----------------------------------------------------------------------------


def test_forget_drops_what_only_this_session_used(tmp_path: Path, store: DiskStore) -> None:
    put(store, 1, "a")
    put(store, 2, "a", "b")
    put(store, 3)
    put(store, 4, "a", model=OTHER)
    put(store, 5, "a")
    put(store, 5, "c")  # there already, but noted
    put(store, 6, "b")
    store.note("b", [key_of(3), key_of(99)])  # one that is not here is passed over
    assert store.sessions() == ["a", "b", "c"]
    assert store.forget("a") == 2
    assert store.forget("a") == 0
    assert [number for number in (1, 2, 3, 5, 6) if holds(store, number)] == [2, 3, 5, 6]
    assert not holds(store, 4, OTHER)
    assert store.sessions() == ["b", "c"]
    assert store.forget("b") == 3
    check_whole(tmp_path / "kv", store)


def test_a_session_of_many_blocks_is_forgotten_in_batches(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "BATCH", 3)
    for number in range(9):
        put(store, number, "a", *(["b"] if number % 4 == 0 else []))
    assert store.forget("a") == 6
    assert store.sessions() == ["b"]
    assert store.books().blocks == 3


def test_what_is_forgotten_while_it_is_written_is_not_kept(
    tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = open_store()
    fsync = os.fsync

    def forgetful(handle: int) -> None:
        fsync(handle)
        assert other.forget("a") == 1

    monkeypatch.setattr(os, "fsync", forgetful)
    assert not put(store, 1, "a")
    assert not holds(store, 1)
    check_whole(tmp_path / "kv", store)


def test_two_that_write_the_same_block_both_succeed(
    tmp_path: Path, store: DiskStore, open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = open_store()
    fsync = os.fsync

    def meanwhile(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        assert put(other, 1, "b")

    monkeypatch.setattr(os, "fsync", meanwhile)
    assert put(store, 1, "a")
    assert holds(store, 1)
    assert store.sessions() == ["a", "b"]
    check_whole(tmp_path / "kv", store)


def test_discard_drops_blocks_whoever_uses_them(tmp_path: Path, store: DiskStore) -> None:
    for number in (1, 2, 3):
        put(store, number, "a")
    store.discard([key_of(1), key_of(3), key_of(99)])
    assert [number for number in (1, 2, 3) if holds(store, number)] == [2]
    check_whole(tmp_path / "kv", store)


def test_new_keys_tells_what_was_completed_since_also_out_of_order(
    store: DiskStore, open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = open_store()
    assert store.new_keys(MODEL, 0) == ([], 0)
    put(other, 1)
    put(other, 2, model=OTHER)
    keys, last = store.new_keys(MODEL, 0)
    assert keys == [key_of(1)]
    seen = []
    fsync = os.fsync

    def meanwhile(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        assert put(other, 4)  # booked after 3, ready before it
        seen.append(store.new_keys(MODEL, last))

    monkeypatch.setattr(os, "fsync", meanwhile)
    put(other, 3)
    assert seen[0][0] == [key_of(4)]
    keys, last = store.new_keys(MODEL, seen[0][1])
    assert keys == [key_of(3)]
    assert store.new_keys(MODEL, last) == ([], last)


# -- what killed processes leave --------------------------------------------------------------


def test_sweep_removes_what_nobody_will_come_back_for(tmp_path: Path, store: DiskStore, clock: Clock) -> None:
    directory = tmp_path / "kv"
    for number in (1, 2, 3):
        put(store, number, "a")
    assert store.sweep() == 0
    parent = file_of(directory, 1).parent
    (parent / ".killed.tmp").touch()
    shutil.copy(file_of(directory, 1), parent / f"{key_of(77).hex()}.kv")
    (parent / "no key.kv").touch()
    (parent / "directory.kv").mkdir()
    file_of(directory, 2).unlink()
    index = sqlite3.connect(directory / "index.db", isolation_level=None)
    index.execute("INSERT INTO uses VALUES('ghost', x'00')")
    index.execute("INSERT INTO blocks(key, model, bytes, ready, written) VALUES(x'ff', 'm', 9, 0, ?)", (clock(),))
    index.close()
    assert store.sweep() == 5  # three files, a row without file, a use
    assert (parent / ".killed.tmp").exists()  # its writer may be at it
    assert store.books().blocks == 3
    clock.ahead += 61
    assert store.sweep() == 2
    assert store.sweep() == 0
    check_whole(directory, store)
    assert [number for number in (1, 2, 3) if holds(store, number)] == [1, 3]


def test_sweep_removes_directories_of_models_without_blocks(tmp_path: Path, store: DiskStore) -> None:
    put(store, 1)
    put(store, 2, model=OTHER)
    store.discard([key_of(1)])
    store.sweep()
    assert not (tmp_path / "kv" / MODEL[:16]).exists()
    assert holds(store, 2, OTHER)
    assert put(store, 1)


def test_only_one_process_sweeps(tmp_path: Path, store: DiskStore, clock: Clock) -> None:
    put(store, 1)
    file_of(tmp_path / "kv", 1).unlink()
    handle = os.open(tmp_path / "kv" / ".sweep", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert store.sweep() == 0
    os.close(handle)
    assert store.sweep() == 1


WATCHED = (disk.__file__, disk_files.__file__, disk_index.__file__)


def kill_at_line(directory: Path, capacity_bytes: int, number: int, line: int) -> bool:
    """Whether a child that opens, evicts, puts and forgets was killed, before its ``line``-th line of disk.py."""
    child = os.fork()
    if not child:
        left = line

        def count(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in WATCHED:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return count

        try:
            sys.settrace(count)
            store = DiskStore(directory, capacity_bytes)
            put(store, number, "killed")
            store.forget("before")
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_killed_at_any_line_of_a_put_nothing_is_wrong_and_nothing_is_left(
    tmp_path: Path,
    store: DiskStore,
    clock: Clock,
    open_store: Callable[..., DiskStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # of no use against being killed, and most of the time
    directory = tmp_path / "kv"
    capacity = 4 * size_of_one(directory, store) + 100
    store.close()
    line = 0
    while True:
        clock.ahead = 0.0
        store = open_store(capacity)
        for number in range(4):
            put(store, number, *(["before"] if number == 3 else []))
        store.close()
        killed = kill_at_line(directory, capacity, 100 + line, line)
        survivor = open_store(capacity)
        assert survivor.books().used_bytes <= capacity
        for number in (0, 1, 2, 3, 100 + line):
            holds(survivor, number)
        clock.ahead = 61.0
        survivor.sweep()
        check_whole(directory, survivor)
        assert put(survivor, 100 + line)
        assert holds(survivor, 100 + line)
        survivor.forget("before")
        assert not holds(survivor, 3)
        survivor.discard([key_of(100 + line)])
        survivor.close()
        if not killed:
            break
        line += 1
    assert line > 150  # it was killed at each of so many


CHILD = """
import sys, random
from pathlib import Path
from tests.unit.test_engine_disk import *
directory, capacity, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
choose, store, model = random.Random(seed), DiskStore(directory, capacity), [MODEL, OTHER][seed % 2]
end, counts, last = time.monotonic() + seconds, dict.fromkeys(["put", "hit", "miss", "refused"], 0), 0
print("begun", flush=True)
while time.monotonic() < end:
    number, act = choose.randrange(60) + 1000 * (seed % 2), choose.random()
    if act < 0.45:
        counts["put" if put(store, number, f"s{choose.randrange(4)}", model=model) else "refused"] += 1
    elif act < 0.9:
        counts["hit" if holds(store, number, model) else "miss"] += 1
    elif act < 0.94:
        store.note("shared", [key_of(choose.randrange(60)) for _ in range(5)])
    elif act < 0.96:
        store.forget(f"s{choose.randrange(4)}")
    elif act < 0.98:
        last = store.new_keys(model, last)[1]
    else:
        store.sweep()
    assert store.books().used_bytes <= capacity
store.close()
print(json.dumps(counts))
"""


@contextmanager
def running(directory: Path, capacity_bytes: int, seeds: Iterable[int], seconds: float) -> Iterator[list[Child]]:
    """Processes that put, get, evict and forget at once; all have begun. None outlives the test."""
    children: list[Child] = []
    try:
        for seed in seeds:
            command = [sys.executable, "-c", CHILD, str(directory), str(capacity_bytes), str(seed), str(seconds)]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "begun\n"
        yield children
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
                child.communicate()


def test_three_processes_share_a_small_directory_in_peace(
    tmp_path: Path, store: DiskStore, clock: Clock, open_store: Callable[..., DiskStore]
) -> None:
    directory = tmp_path / "kv"
    small = open_store(20 * size_of_one(directory, store) + 100)
    with running(directory, small.books().capacity_bytes, (0, 1, 2), 3.0) as children:  # 0 and 2: the same keys
        for child in children:
            output, errors = child.communicate(timeout=60)
            assert (child.returncode, errors) == (0, "")
            counts = json.loads(output)
            assert min(counts["put"], counts["hit"], counts["miss"]) > 0, counts  # how many depends on the disk
    clock.ahead += 61
    assert small.sweep() == 0  # nobody was killed: nothing is left
    check_whole(directory, small)


def test_killed_at_random_moments_among_others_nothing_is_wrong_and_nothing_is_left(
    tmp_path: Path, store: DiskStore, clock: Clock, open_store: Callable[..., DiskStore]
) -> None:
    directory = tmp_path / "kv"
    small = open_store(8 * size_of_one(directory, store) + 100)
    capacity = small.books().capacity_bytes
    choose = random.Random(1)
    for round_number in range(6):
        with running(directory, capacity, (2 * round_number, 2 * round_number + 1), 60.0) as children:
            for child in children:
                time.sleep(choose.uniform(0.0, 0.15))
                child.kill()
                assert child.communicate()[1] == ""
                assert child.returncode == -signal.SIGKILL
        for number in range(60):
            holds(small, number)
            holds(small, 1000 + number, OTHER)
        assert put(small, round_number)
        assert small.books().used_bytes <= capacity
    clock.ahead += 61
    small.sweep()
    check_whole(directory, small)
