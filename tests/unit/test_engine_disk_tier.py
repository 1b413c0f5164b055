"""KV on disk, through an engine: what comes back from there, and what happens when the disk does not do its part."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine import disk_tier
from engine.disk import DiskStore
from engine.disk_index import DiskUnavailable
from engine.disk_tier import DiskTier
from engine.fake import FakeEngine, FakeSettings
from engine.protocol import EngineLimits, GenerationRequest
from policies.types import ContextState
from tests.engine_helpers import Said, drain, request, run

SIZE = 4
PROMPT = list(range(10, 40))  # seven whole blocks and two tokens


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(disk_tier, "SESSIONS_SECONDS", 0.05)


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., FakeEngine]]:
    """Starts engines on one directory; all are ended."""
    engines: list[FakeEngine] = []

    def begin(blocks: int = 64, host: int = 0, **limits: int) -> FakeEngine:
        given = EngineLimits(256, SIZE, kv_disk=str(directory), kv_disk_bytes=2**20, kv_host_bytes=host * 16, **limits)
        engine = FakeEngine(given, FakeSettings(kv_capacity_tokens=blocks * SIZE, kv_bytes=blocks * 16))
        engine.load()
        engine.warm()
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        assert engine._disk is not None
        engine._disk.close(1.0)


def turn(name: str, session: str = "acme/s") -> GenerationRequest:
    return replace(request(name, PROMPT, 8), session=session)


def cached(said: Said) -> int:
    assert said.last.usage is not None
    return said.last.usage.cached_tokens


def settled(engine: FakeEngine, condition: Callable[[], bool]) -> None:
    """Until the disk's thread has done something; the engine's own time is not measured here."""
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def known(engine: FakeEngine) -> int:
    assert engine._disk is not None
    return len(engine._disk._known)


def gated(monkeypatch: pytest.MonkeyPatch, verb: str) -> threading.Event:
    """From now on that verb of the store waits until the event is set."""
    gate, work = threading.Event(), getattr(DiskStore, verb)

    def waiting(*args: object) -> object:
        gate.wait(10)
        return work(*args)

    monkeypatch.setattr(DiskStore, verb, waiting)
    return gate


def test_what_an_engine_leaves_the_next_one_finds(start: Callable[..., FakeEngine]) -> None:
    first = start()
    before = run(first, turn("1"))["1"]
    first.close()
    second = start()
    settled(second, lambda: known(second) >= 7)
    after = run(second, turn("2"))["2"]
    assert (cached(before), cached(after)) == (0, 28)
    assert after.tokens == before.tokens
    stats = second.stats().kv_disk
    assert (stats.fetched, stats.missed, stats.problem) == (7, 0, "")


def test_while_its_kv_is_read_a_generation_is_swapping_in_and_others_run(
    start: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    run(first, turn("1"))
    first.close()
    gate = gated(monkeypatch, "get_into")
    monkeypatch.setattr(disk_tier, "PATIENCE_SECONDS", 60.0)
    second = start()
    settled(second, lambda: known(second) >= 7)
    second.add(turn("2"))
    second.step()
    context = second._contexts["2", 0]
    assert context.state is ContextState.SWAPPING_IN
    assert [edge.new for edge in context.events] == [ContextState.SWAPPED, ContextState.SWAPPING_IN]
    assert "7 blocks from disk" in context.events[-1].reason
    second.add(request("other", [1, 2, 3], 2))
    assert {output.request_id for _ in range(3) for output in second.step()} == {"other"}
    snapshot = second.snapshot()
    assert (snapshot.unfreed_blocks, snapshot.states) == (0, {"swapping_in": 1})
    gate.set()
    assert cached(drain(second)["2"]) == 28


def test_what_host_memory_has_no_room_for_goes_to_disk_and_comes_back(start: Callable[..., FakeEngine]) -> None:
    engine = start(blocks=12, host=4)
    first = run(engine, turn("1"))["1"]
    run(engine, request("other", range(100, 140), 4))  # takes the blocks
    settled(engine, lambda: engine.stats().kv_disk.written + engine.stats().kv_host_blocks_used >= 7)
    assert engine.stats().kv_disk.written > 0
    again = run(engine, turn("2"))["2"]
    assert (again.tokens, cached(again)) == (first.tokens, 28)


def test_sleeping_puts_on_disk_what_host_memory_does_not_take(start: Callable[..., FakeEngine]) -> None:
    engine = start(host=3)
    run(engine, turn("1"))
    engine.sleep()
    settled(engine, lambda: engine.stats().kv_disk.written >= 6)
    engine.wake()
    assert cached(run(engine, turn("2"))["2"]) == 28
    assert engine.stats().kv_blocks_moved_in == 3


def damage_some(directory: Path) -> None:
    for file in sorted(directory.rglob("*.kv"))[::2]:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


def lose_all(directory: Path) -> None:
    shutil.rmtree(directory)


def lose_some(directory: Path) -> None:
    for file in sorted(directory.rglob("*.kv"))[1::2]:
        file.unlink()


@pytest.mark.parametrize("damage", [damage_some, lose_all, lose_some])
def test_a_damaged_or_lost_file_costs_time_only(
    start: Callable[..., FakeEngine], directory: Path, damage: Callable[[Path], None]
) -> None:
    first = start()
    before = run(first, turn("1"))["1"]
    first.close()
    second = start()
    settled(second, lambda: known(second) >= 7)
    damage(directory)
    after = run(second, turn("2"))["2"]
    assert after.tokens == before.tokens
    assert cached(after) < 28 and cached(after) % SIZE == 0
    assert second.stats().kv_disk.missed > 0
    assert cached(run(second, turn("3"))["3"]) == 28  # computed again, and found on the device


def test_a_read_that_never_returns_is_given_up_and_writes_to_nobodys_block(
    start: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    before = run(first, turn("1"))["1"]
    first.close()
    gate = gated(monkeypatch, "get_into")
    monkeypatch.setattr(disk_tier, "PATIENCE_SECONDS", 0.05)
    second = start()
    settled(second, lambda: known(second) >= 7)
    filled: list[int] = []
    write = second._write_kv

    def note(blocks: list[int], content: np.ndarray) -> None:
        filled.extend(blocks)
        write(blocks, content)

    monkeypatch.setattr(second, "_write_kv", note)
    after = run(second, turn("2"))["2"]
    assert (after.tokens, cached(after)) == (before.tokens, 0)
    assert second._disk is not None and not second._disk.has(next(iter(second._disk._known)))  # it does not answer
    assert cached(run(second, turn("3"))["3"]) == 28
    gate.set()
    settled(second, lambda: second._disk is not None and second._disk.has(next(iter(second._disk._known))))
    assert filled == []  # the read came back, and its block was somebody else's by then


def test_a_cancel_while_kv_is_read_frees_everything(
    start: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    run(first, turn("1"))
    first.close()
    gate = gated(monkeypatch, "get_into")
    second = start()
    settled(second, lambda: known(second) >= 7)
    second.add(turn("2"))
    second.step()
    assert second.cancel("2", 0, "the client went away")
    second.check()
    second.sleep()  # nothing lands in memory that was given back
    gate.set()
    second.wake()
    assert cached(run(second, turn("3"))["3"]) in (0, 28)
    books = second._kv_cache.pool.books()
    assert books.free == books.total


def test_a_disk_that_is_out_of_use_is_named_and_tried_again(
    start: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "RETRY_SECONDS", 0.02)
    full = threading.Event()
    full.set()
    put = DiskStore.put

    def no_space(*args: object) -> object:
        if full.is_set():
            raise DiskUnavailable("no space left on device")
        return put(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskStore, "put", no_space)
    engine = start(blocks=12)
    first = run(engine, turn("1"))["1"]
    run(engine, request("other", range(100, 140), 4))
    settled(engine, lambda: engine.stats().kv_disk.dropped > 0)
    again = run(engine, turn("2"))["2"]
    assert again.tokens == first.tokens
    full.clear()
    settled(engine, lambda: not engine.stats().kv_disk.problem)
    run(engine, request("another", range(100, 140), 4))
    settled(engine, lambda: engine.stats().kv_disk.written > 0)


def test_two_engines_of_other_weights_on_one_directory_share_nothing_but_the_bytes(
    start: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    run(first, turn("1"))
    first.close()
    monkeypatch.setattr("engine.fake.FINGERPRINT", "other")
    second = start()
    settled(second, lambda: second.stats().kv_disk.blocks >= 7)
    assert cached(run(second, turn("2"))["2"]) == 0
    assert known(second) == 0


def test_a_deleted_session_leaves_no_file_and_the_others_do(start: Callable[..., FakeEngine], directory: Path) -> None:
    first = start()
    run(first, turn("1", "acme/one"))
    run(first, replace(request("2", [*PROMPT[:8], *range(60, 80)], 8), session="acme/two"))
    first.close()
    second = start()  # knows the sessions from the disk only
    settled(second, lambda: set(second.sessions()) == {"acme/one", "acme/two"})
    files = len(list(directory.rglob("*.kv")))
    second.forget_session("acme/one")
    settled(second, lambda: set(second.sessions()) == {"acme/two"})
    assert 0 < len(list(directory.rglob("*.kv"))) < files
    second.forget_session("acme/two")
    settled(second, lambda: not second.sessions())
    assert not list(directory.rglob("*.kv"))


def test_what_waits_to_be_written_for_a_deleted_session_is_not_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gated(monkeypatch, "put")
    tier = DiskTier(lambda: DiskStore(directory, 2**20), "m", 8, lambda blocks, content: None)
    try:
        for number in range(3):
            tier.put(bytes([number] * 32), (number,), np.zeros(8, np.uint8), ("acme/s",))
        tier.put(bytes([9] * 32), (9,), np.zeros(8, np.uint8), ("acme/other",))
        tier.forget_session("acme/s")
        gate.set()
        assert tier.flush(10)
    finally:
        tier.close(1)
    assert [file.stem for file in directory.rglob("*.kv")] == [bytes([9] * 32).hex()]


def test_kv_of_a_failed_generation_is_not_on_disk_either(start: Callable[..., FakeEngine], directory: Path) -> None:
    first = start()
    run(first, turn("1"))
    first.close()
    second = start()
    second.settings = replace(second.settings, nan_at_token=1)
    settled(second, lambda: known(second) >= 7)
    assert run(second, turn("2"))["2"].last.error is not None
    assert second._disk is not None and second._disk.flush(10)
    assert len(list(directory.rglob("*.kv"))) == 2  # of the answer that did not fail


def test_files_are_our_own(start: Callable[..., FakeEngine], directory: Path) -> None:
    engine = start()
    run(engine, turn("1"))
    engine.close()
    assert {file.stat().st_mode & 0o777 for file in directory.rglob("*.kv")} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    assert os.listdir(directory)


def test_a_thread_that_fails_by_a_bug_says_so_and_goes_on(
    start: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(disk_tier, "PATIENCE_SECONDS", 0.05)
    first = start()
    before = run(first, turn("1"))["1"]
    first.close()
    second = start()
    settled(second, lambda: known(second) >= 7)

    def fails(blocks: object, content: object) -> None:
        second._disk._fill = second._write_kv  # type: ignore[union-attr]
        raise RuntimeError("a bug of ours")

    assert second._disk is not None
    second._disk._fill = fails
    assert run(second, turn("2"))["2"].tokens == before.tokens
    second._kv_cache.pool.clear_cache()
    settled(second, lambda: known(second) >= 7)
    assert cached(run(second, turn("3"))["3"]) == 28


def test_at_the_end_what_is_worth_most_goes_to_disk_first_and_what_is_not_worth_it_never(
    start: Callable[..., FakeEngine],
) -> None:
    engine = start()
    run(engine, turn("1"), request("2", range(100, 120), 4))
    cache = engine._kv_cache
    worth = {key: float(number) for number, (_, key, _) in enumerate(cache.pool.cached())}
    spills = cache.park_on_disk(worth.__getitem__)
    assert [worth[spill.key] for spill in spills] == sorted(worth.values(), reverse=True)
    cache._worth_writing = lambda key: worth[key] > 3.0
    assert {worth[spill.key] for spill in cache.park_on_disk()} == {value for value in worth.values() if value > 3.0}
