"""What an acknowledged turn survives: each row of the table in docs/sessions.md, and a Redis that moves or stalls."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from policies.errors import StoreUnavailable
from session_store.embedded import EmbeddedRedis
from session_store.items import parse_live
from session_store.keys import session_keys
from session_store.records import Begun, Replay
from session_store.store import SessionStore
from tests.conftest_redis import (
    LIMITS,
    Wire,
    begin,
    contents,
    raw,
    redis_server,
    require_server,
    said,
    take_turn,
    wire_to,
)

__all__ = ["raw", "redis_server"]  # fixtures

T, S = "acme", "talk"
BREAKS = {
    "test_a_turn_that_no_replica": (
        "session_store/store.py",
        "self._client.run(commit, settle, confirmed=True)",
        "self._client.run(commit, settle)",
    ),
    "test_a_retry_of_an_unconfirmed": ("session_store/store.py", "await self._client.confirm(", "str("),
    "test_a_new_primary": (
        "session_store/client.py",
        "if any(isinstance(answer, redis_errors.ReadOnlyError) for answer in answers):",
        "if False:",
    ),
    "test_a_slow_server": ("session_store/client.py", "self._observe(time.perf_counter() - begin)", "pass"),
}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[EmbeddedRedis, EmbeddedRedis]]:
    """A primary and its replica, in step."""
    require_server()
    primary, replica = EmbeddedRedis(tmp_path / "primary"), EmbeddedRedis(tmp_path / "replica")
    primary.start()
    (tmp_path / "replica").mkdir()
    shutil.copy(tmp_path / "primary" / "redis.secret", tmp_path / "replica")  # a failover needs one password for both
    replica.start()
    parts = urlsplit(primary.url)
    with redis.Redis.from_url(replica.url) as client, redis.Redis.from_url(primary.url) as first:
        client.config_set("masterauth", parts.password or "")
        first.config_set("repl-diskless-sync-delay", 0)
        client.replicaof("127.0.0.1", parts.port)  # type: ignore[no-untyped-call]
        until = time.monotonic() + 20
        while client.info("replication")["master_link_status"] != "up":
            assert time.monotonic() < until, "the replica does not follow"
            time.sleep(0.02)
    yield primary, replica
    for server in (replica, primary):
        if server.pid is not None:
            os.kill(server.pid, signal.SIGCONT)
        server.stop()


def promote(server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]


def kill(server: EmbeddedRedis) -> None:
    assert server.pid is not None
    process = psutil.Process(server.pid)
    process.kill()
    process.wait(5)


# -- the table ------------------------------------------------------------------------------


@pytest.mark.parametrize("appendfsync", ["always", "everysec"])
async def test_what_of_acknowledged_turns_survives_kill_9_of_the_server(tmp_path: Path, appendfsync: str) -> None:
    """``always``: all of them. ``everysec``: the first of them, whole; it has been seen to lose the last ones."""
    require_server()
    server = EmbeddedRedis(tmp_path, appendfsync=appendfsync)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.config_get("appendfsync") == {"appendfsync": appendfsync}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
    store = SessionStore(server.url)
    try:
        for n in range(20):
            name = f"s{n}"
            for turn in range(3):
                await take_turn(store, T, name, f"t{turn}")
            kill(server)  # at once: the acknowledgement is all that has been waited for
            server.start()
            pairs = raw_items(server.url, name)
            assert pairs == [f"{what} t{turn}" for turn in range(len(pairs) // 2) for what in ("question", "answer")]
            if appendfsync == "always":
                assert len(pairs) == 6
    finally:
        await store.close()
        server.stop()


def raw_items(url: str, session_id: str) -> list[str]:
    with redis.Redis.from_url(url) as client:
        return [item.text for item in parse_live(client.lrange(session_keys(T, session_id).items, 0, -1))]


async def test_without_waiting_for_it_a_replica_may_lack_the_last_turns(
    pair: tuple[EmbeddedRedis, EmbeddedRedis],
) -> None:
    primary, replica = pair
    store = SessionStore(primary.url)
    await take_turn(store, T, S, "t1", idempotency_key="k")
    with redis.Redis.from_url(primary.url) as client:
        client.wait(1, 5000)
    promote(replica)  # it is cut off, and somebody decides for it
    await take_turn(store, T, S, "t2")  # acknowledged
    kill(primary)
    await store.close()
    store = SessionStore(replica.url)
    assert (await store.session_info(T, S)).version == 1, "this is what redis.replicas is for"
    await store.close()


async def test_with_a_replica_that_is_waited_for_no_acknowledged_turn_is_lost(
    pair: tuple[EmbeddedRedis, EmbeddedRedis],
) -> None:
    primary, replica = pair
    store = SessionStore(primary.url, replicas=1, command_timeout_seconds=20.0)
    counts: dict[str, int] = {}

    async def talk(name: str) -> None:
        for n in range(1000):
            await take_turn(store, T, name, f"t{n}")
            counts[name] = n + 1
            if sum(counts.values()) == 40:
                kill(primary)

    ended = await asyncio.gather(*(talk(f"s{n}") for n in range(4)), return_exceptions=True)
    assert all(isinstance(error, StoreUnavailable) for error in ended), ended
    assert sum(counts.values()) >= 40
    await store.close()
    promote(replica)
    store = SessionStore(replica.url)
    for name, count in counts.items():
        assert (await store.session_info(T, name)).version >= count
    await store.close()


async def test_a_turn_that_no_replica_confirms_is_not_acknowledged(pair: tuple[EmbeddedRedis, EmbeddedRedis]) -> None:
    primary, replica = pair
    store = SessionStore(primary.url, replicas=1, command_timeout_seconds=0.6)
    begun = await begin(store, T, S, "t1")
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
        await store.commit_turn(begun, said("t1", ("user", "q"), ("assistant", "a")), {}, {}, 1)
    os.kill(replica.pid, signal.SIGCONT)
    assert await store.commit_turn(begun, said("t1", ("user", "q"), ("assistant", "a")), {}, {}, 1) == 1
    await store.close()


async def test_a_retry_of_an_unconfirmed_turn_waits_for_the_replica_too(
    pair: tuple[EmbeddedRedis, EmbeddedRedis],
) -> None:
    primary, replica = pair
    store = SessionStore(primary.url, replicas=1, command_timeout_seconds=0.6)
    begun = await begin(store, T, S, "t1", idempotency_key="k")
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        await store.commit_turn(begun, said("t1", ("user", "q"), ("assistant", "a")), {}, {}, 1)
    with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
        await store.begin_turn(T, S, "t2", **LIMITS, idempotency_key="k")  # type: ignore[arg-type]
    os.kill(replica.pid, signal.SIGCONT)
    replay = await store.begin_turn(T, S, "t3", **LIMITS, idempotency_key="k")  # type: ignore[arg-type]
    assert isinstance(replay, Replay) and contents(replay.items) == ["q", "a"]
    await store.close()


# -- a Redis that moves, stalls or fills -------------------------------------------------------


@asynccontextmanager
async def name_of(first: str) -> AsyncIterator[tuple[str, list[str]]]:
    """(url, [where it leads]): an address that can be made to lead elsewhere, as a DNS name can."""
    leads = [first]
    wires: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        wires.add(task)
        parts = urlsplit(leads[0])
        try:
            await Wire()._serve(parts.hostname or "", parts.port or 0, reader, writer)
        except OSError:
            writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    parts = urlsplit(first)
    try:
        yield first.replace(f":{parts.port}/", f":{listener.sockets[0].getsockname()[1]}/"), leads
    finally:
        listener.close()
        for wire in wires:
            wire.cancel()
        await asyncio.gather(*wires, return_exceptions=True)


async def test_a_new_primary_behind_the_same_name_is_found(pair: tuple[EmbeddedRedis, EmbeddedRedis]) -> None:
    primary, replica = pair
    async with name_of(primary.url) as (url, leads):
        store = SessionStore(url, replicas=1)
        await take_turn(store, T, S, "t1")
        await store.close()
        store = SessionStore(url)
        begun = await begin(store, T, S, "t2")
        with redis.Redis.from_url(primary.url) as client:
            client.wait(1, 5000)
        leads[0] = replica.url
        promote(replica)
        with redis.Redis.from_url(primary.url) as client:  # still up, and our connections lead to it
            client.replicaof("127.0.0.1", urlsplit(replica.url).port)  # type: ignore[no-untyped-call]
        assert await store.commit_turn(begun, said("t2", ("user", "q"), ("assistant", "a")), {}, {}, 1) == 2
        assert await take_turn(store, T, S, "t3") == 3
        await store.close()


async def test_a_slow_server_makes_turns_slow_and_says_so(redis_server: EmbeddedRedis, raw: redis.Redis) -> None:
    seconds: list[float] = []
    async with wire_to(redis_server.url) as wire:
        store = SessionStore(wire.url, observe=seconds.append)
        await take_turn(store, T, S, "t0")
        seconds.clear()
        wire.delay_seconds = 2.0
        assert await take_turn(store, T, S, "t1") == 2
        assert len(seconds) == 2 and min(seconds) > 1.9
        wire.delay_seconds = 0.0
        await store.close()


async def test_an_outage_in_the_middle_of_a_turn_is_survived_if_it_ends_within_the_lease(
    tmp_path: Path,
) -> None:
    require_server()
    server = EmbeddedRedis(tmp_path, appendfsync="always")
    server.start()
    store = SessionStore(server.url)
    begun = await begin(store, T, S, "t1")
    kill(server)
    with pytest.raises(StoreUnavailable):
        await store.renew(begun)
    server.start()
    await store.renew(begun)
    assert await store.commit_turn(begun, said("t1", ("user", "q"), ("assistant", "a")), {}, {}, 1) == 1
    assert isinstance(await begin(store, T, S, "t2"), Begun)
    await store.close()
    server.stop()
