"""The session store against a real server: fencing, TTLs, idempotence, limits, failures, restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from policies.errors import (
    BadRequest,
    IdempotencyMismatch,
    LeaseLost,
    SessionBusy,
    SessionNotFound,
    StoreUnavailable,
    TenantLimit,
)
from session_store import embedded
from session_store.embedded import EmbeddedRedis
from session_store.items import Item, message
from session_store.keys import session_keys, tenant_keys
from session_store.records import Begun, Replay
from session_store.store import SessionStore
from tests.conftest_redis import (
    LIMITS,
    begin,
    contents,
    raw,
    redis_server,
    require_server,
    said,
    store,
    take_turn,
    wire_to,
)

__all__ = ["raw", "redis_server", "store"]  # fixtures

T, S = "acme", "chat-1"


def session_ttls_ms(client: redis.Redis) -> dict[bytes, int]:
    return {key: client.pttl(key) for key in client.scan_iter("co:{*/*}:*")}


# Turns


async def test_turns_follow_each_other(store: SessionStore) -> None:
    assert await take_turn(store, T, S, "t1") == 1
    assert await take_turn(store, T, S, "t2") == 2
    begun = await begin(store, T, S, "t3")
    assert contents(begun.items) == ["question t1", "answer t1", "question t2", "answer t2"]
    assert (begun.version, begun.truncated_store) == (2, 0)


async def test_fencing_tokens_only_grow_even_over_a_deletion(store: SessionStore) -> None:
    tokens = []
    for n in range(3):
        begun = await begin(store, T, S, f"t{n}")
        tokens.append(begun.fencing_token)
        await store.commit_turn(begun, said(f"t{n}", ("user", "x")), {}, {}, 1)
    await store.delete_session(T, S)
    tokens.append((await begin(store, T, S, "t9")).fencing_token)
    assert tokens == sorted(set(tokens))


async def test_a_stale_fencing_token_writes_nothing(redis_server: EmbeddedRedis, raw: redis.Redis) -> None:
    store = SessionStore(redis_server.url, lease_ttl_seconds=0.05)
    try:
        late = await begin(store, T, S, "late")
        await asyncio.sleep(0.08)  # the lease lapses in Redis, by Redis's own clock
        assert await take_turn(store, T, S, "next") == 1
        before = {key: raw.dump(key) for key in raw.scan_iter("co:{*/*}:*")}
        with pytest.raises(LeaseLost):
            await store.commit_turn(late, said("late", ("user", "stale")), {}, {}, 1)
        with pytest.raises(LeaseLost):
            await store.renew(late)
        assert {key: raw.dump(key) for key in raw.scan_iter("co:{*/*}:*")} == before
        await store.abort_turn(late, "lease lost")
        assert [a["turn_id"] for a in await store.read_incomplete(T, S)] == ["late"]
    finally:
        await store.close()


async def test_an_old_holder_cannot_free_the_new_ones_lease(redis_server: EmbeddedRedis, raw: redis.Redis) -> None:
    store = SessionStore(redis_server.url, lease_ttl_seconds=0.05)
    patient = SessionStore(redis_server.url)
    try:
        late = await begin(store, T, S, "late")
        await asyncio.sleep(0.08)
        mine = await begin(patient, T, S, "mine")
        await store.abort_turn(late, "slow")
        assert raw.hget(session_keys(T, S).lease, "turn") == b"mine"
        assert await patient.commit_turn(mine, said("mine", ("user", "x")), {}, {}, 1) == 1
    finally:
        await store.close()
        await patient.close()


async def test_renewing_keeps_lease_and_place(redis_server: EmbeddedRedis, raw: redis.Redis) -> None:
    store = SessionStore(redis_server.url, lease_ttl_seconds=0.4)
    try:
        begun = await begin(store, T, S, "t1")
        for _ in range(3):
            await asyncio.sleep(0.2)
            await store.renew(begun)
        assert raw.pttl(session_keys(T, S).lease) > 200
        assert raw.zcard(tenant_keys(T).places) == 1
        assert await store.commit_turn(begun, said("t1", ("user", "x")), {}, {}, 1) == 1
    finally:
        await store.close()


async def test_a_begin_again_of_the_holder_gets_a_newer_token(store: SessionStore) -> None:
    first = await begin(store, T, S, "t1")
    second = await begin(store, T, S, "t1")
    assert second.fencing_token > first.fencing_token
    with pytest.raises(LeaseLost):
        await store.commit_turn(first, said("t1", ("user", "x")), {}, {}, 1)
    assert await store.commit_turn(second, said("t1", ("user", "x")), {}, {}, 1) == 1


async def test_a_commit_sent_twice_appends_once(store: SessionStore, raw: redis.Redis) -> None:
    begun = await begin(store, T, S, "t1")
    items = said("t1", ("user", "q"), ("assistant", "a"))
    assert await store.commit_turn(begun, items, {}, {}, 7) == 1
    await take_turn(store, T, S, "t2")
    assert await store.commit_turn(begun, items, {}, {}, 7) == 1
    assert raw.llen(session_keys(T, S).items) == 4
    assert (await store.tenant_usage(T)).used_tokens == 17


async def test_items_of_another_turn_are_refused(store: SessionStore) -> None:
    begun = await begin(store, T, S, "t1")
    with pytest.raises(ValueError, match="another turn than t1"):
        await store.commit_turn(begun, said("t2", ("user", "q")), {}, {}, 1)


async def test_a_deleted_session_does_not_come_back_through_a_running_turn(
    store: SessionStore, raw: redis.Redis
) -> None:
    await take_turn(store, T, S, "t1")
    begun = await begin(store, T, S, "t2")
    await store.delete_session(T, S)
    with pytest.raises(LeaseLost):
        await store.commit_turn(begun, said("t2", ("user", "q")), {}, {}, 1)
    await store.abort_turn(begun, "deleted")
    assert session_ttls_ms(raw) == {}
    assert (await store.list_sessions(T)).sessions == ()


async def test_a_session_in_its_first_turn_can_be_deleted_once(store: SessionStore) -> None:
    begun = await begin(store, T, S, "t1")
    await store.delete_session(T, S)  # not a "no such session" that ends the turn all the same
    with pytest.raises(LeaseLost):
        await store.commit_turn(begun, said("t1", ("user", "q")), {}, {}, 1)
    with pytest.raises(SessionNotFound):
        await store.delete_session(T, S)


# The window


async def test_the_window_holds_whole_turns_and_every_older_head(redis_server: EmbeddedRedis, raw: redis.Redis) -> None:
    store = SessionStore(redis_server.url, window_items=5)
    try:
        first = await begin(store, T, S, "t0")
        items = said("t0", ("system", "rules"), ("user", "q0"), ("assistant", "a0"))
        items.append(Item("pin", "t0", 1.0, message("user", "pinned"), pinned=True))
        await store.commit_turn(first, items, {}, {}, 1)
        for n in (1, 2, 3):
            await take_turn(store, T, S, f"t{n}")
        begun = await begin(store, T, S, "t4")
        # the newest 5 items would start with t1's answer: that half turn stays behind
        assert contents(begun.items) == [
            "rules", "pinned", "question t2", "answer t2", "question t3", "answer t3",
        ]  # fmt: skip
        assert begun.truncated_store == 4
    finally:
        await store.close()


@pytest.mark.parametrize(("window", "expected"), [(2, 2), (3, 3), (4, 4), (5, 5), (6, 5)])
async def test_a_turn_longer_than_the_window_is_cut_rather_than_lost(
    redis_server: EmbeddedRedis, raw: redis.Redis, window: int, expected: int
) -> None:
    store = SessionStore(redis_server.url, window_items=window)
    try:
        begun = await begin(store, T, S, "t0")
        await store.commit_turn(begun, said("t0", *[("user", str(n)) for n in range(5)]), {}, {}, 1)
        begun = await begin(store, T, S, "t1")
        assert contents(begun.items) == [str(n) for n in range(5)][-expected:]
        assert begun.truncated_store == 5 - expected
    finally:
        await store.close()


# Idempotency


async def test_one_key_for_two_requests_is_a_mismatch_running_or_finished(
    store: SessionStore, raw: redis.Redis
) -> None:
    running = await begin(store, T, S, "t1", idempotency_key="k", request_fingerprint="f1")
    for _ in ("running", "finished"):
        with pytest.raises(IdempotencyMismatch):
            await begin(store, T, S, "t2", idempotency_key="k", request_fingerprint="f2")
        await store.commit_turn(running, said("t1", ("user", "q")), {}, {}, 1)
    assert raw.zcard(tenant_keys(T).places) == 0


async def test_the_same_request_while_it_runs_is_busy(store: SessionStore) -> None:
    await begin(store, T, S, "t1", idempotency_key="k", request_fingerprint="f")
    with pytest.raises(SessionBusy):
        await begin(store, T, S, "t2", idempotency_key="k", request_fingerprint="f")


async def test_after_an_abort_the_same_key_runs_anew(store: SessionStore) -> None:
    begun = await begin(store, T, S, "t1", idempotency_key="k", request_fingerprint="f")
    await store.abort_turn(begun, "disconnect")
    assert isinstance(await begin(store, T, S, "t2", idempotency_key="k", request_fingerprint="f"), Begun)


# The tenant


async def test_reservations_never_exceed_the_tenants_tokens(store: SessionStore) -> None:
    async def one(n: int) -> bool:
        try:
            await store.reserve(T, f"r{n}", reserve_tokens=175, max_concurrent=None, max_reserved_tokens=400)
        except TenantLimit as error:
            assert error.retry_after_seconds is not None
            return False
        return True

    assert sum(await asyncio.gather(*(one(n) for n in range(8)))) == 2
    assert (await store.tenant_usage(T)).reserved_tokens == 350


async def test_a_request_that_can_never_fit_says_so(store: SessionStore) -> None:
    with pytest.raises(TenantLimit, match="lower max_tokens") as raised:
        await store.reserve(T, "r", reserve_tokens=500, max_concurrent=None, max_reserved_tokens=400)
    assert raised.value.retry_after_seconds is None


async def test_a_refused_tenant_leaves_the_session_free(store: SessionStore, raw: redis.Redis) -> None:
    await begin(store, T, "other", "t1", max_concurrent=1)
    with pytest.raises(TenantLimit, match="1 requests running, its limit is 1"):
        await begin(store, T, S, "t2", max_concurrent=1)
    assert not raw.exists(session_keys(T, S).lease)
    assert raw.lrange(session_keys(T, S).incomplete, 0, -1) == []
    assert raw.zrange(tenant_keys(T).places, 0, -1) == [b"t1"]


async def test_a_busy_session_leaves_no_reservation(store: SessionStore, raw: redis.Redis) -> None:
    await begin(store, T, S, "t1")
    with pytest.raises(SessionBusy):
        await begin(store, T, S, "t2")
    assert raw.zrange(tenant_keys(T).places, 0, -1) == [b"t1"]
    assert raw.hkeys(tenant_keys(T).reserved) == [b"t1"]


async def test_settling_twice_books_once_and_lapsed_places_are_dropped(
    redis_server: EmbeddedRedis, raw: redis.Redis
) -> None:
    store = SessionStore(redis_server.url, lease_ttl_seconds=0.05)
    try:
        limits = {"reserve_tokens": 10, "max_concurrent": 1, "max_reserved_tokens": None}
        await store.reserve(T, "r1", **limits)
        assert await store.renew_reservation(T, "r1")
        with pytest.raises(TenantLimit):
            await store.reserve(T, "r2", **limits)
        await asyncio.sleep(0.08)
        assert not await store.renew_reservation(T, "r1")
        await store.reserve(T, "r2", **limits)
        for turn in ("r1", "r1", "r2", "r2"):
            await store.settle(T, turn, 10)
        usage = await store.tenant_usage(T)
        assert (usage.used_tokens, usage.turns, usage.running, usage.reserved_tokens) == (20, 2, 0, 0)
    finally:
        await store.close()


# Lifetime of keys


async def test_every_key_of_a_session_has_a_ttl_after_every_operation(
    redis_server: EmbeddedRedis, raw: redis.Redis
) -> None:
    store = SessionStore(redis_server.url, session_ttl_seconds=600, lease_ttl_seconds=15)
    seen: set[bytes] = set()

    def check() -> None:
        ttls = session_ttls_ms(raw)
        seen.update(ttls)
        assert ttls
        for key, ttl_ms in ttls.items():
            longest_ms = 15_000 if key.endswith(b":lease") else 600_000
            assert longest_ms - 2_000 < ttl_ms <= longest_ms, key
            if not key.endswith(b":lease"):
                raw.pexpire(key, 20_000)  # the next operation must renew it

    try:
        begun = await begin(store, T, S, "t1", idempotency_key="k")
        check()
        await store.renew(begun)
        check()
        await store.commit_turn(begun, said("t1", ("system", "s"), ("user", "q")), {}, {}, 1)
        check()
        again = await begin(store, T, S, "t2", idempotency_key="k2")
        check()
        await store.abort_turn(again, "disconnect")
        check()
        replay = await store.begin_turn(T, S, "t3", **LIMITS, idempotency_key="k")
        assert isinstance(replay, Replay)
        check()
        await store.add_items(T, S, said("t4", ("user", "q2")), "change 1")
        check()
        await store.delete_item(T, S, "t4.0")
        check()
        await store.set_metadata(T, S, {"a": "b"})
        check()
        assert seen == {key.encode() for key in session_keys(T, S).all()}
        lasting = {key for key in raw.scan_iter() if raw.pttl(key) == -1}
        assert lasting == {tenant_keys(T).usage.encode()}
    finally:
        await store.close()


# Reading back


async def test_reading_listing_and_deleting(store: SessionStore) -> None:
    for n in range(5):
        await take_turn(store, T, f"s{n}", f"t{n}")
    await take_turn(store, T, "s0", "t9")
    page = await store.list_sessions(T, count=2)
    rest = await store.list_sessions(T, page.cursor, count=10)
    listed = [info.session_id for info in page.sessions + rest.sessions]
    assert (listed, rest.cursor) == (["s0", "s4", "s3", "s2", "s1"], None)
    info = await store.session_info(T, "s0")
    assert (info.version, info.items, info.incomplete, info.running_turn_id) == (2, 4, 0, None)
    assert info.created <= info.updated <= time.time() + 1
    assert contents(await store.read_items(T, "s0", 1, 2)) == ["answer t0", "question t9"]
    await store.delete_session(T, "s0")
    for reading in (store.session_info(T, "s0"), store.read_items(T, "s0"), store.delete_session(T, "s0")):
        with pytest.raises(SessionNotFound):
            await reading
    assert [i.session_id for i in (await store.list_sessions(T)).sessions] == ["s4", "s3", "s2", "s1"]
    with pytest.raises(BadRequest):
        await store.list_sessions(T, "abc")


async def test_a_session_without_a_committed_turn_does_not_exist(store: SessionStore) -> None:
    await store.abort_turn(await begin(store, T, S, "t1"), "disconnect")
    with pytest.raises(SessionNotFound):
        await store.session_info(T, S)
    assert (await store.list_sessions(T)).sessions == ()


# Failures


async def test_begin_and_commit_are_one_round_trip_each(redis_server: EmbeddedRedis, raw: redis.Redis) -> None:
    async with wire_to(redis_server.url) as wire:
        store = SessionStore(wire.url)
        await take_turn(store, T, S, "t1")  # connects, loads the scripts
        wire.round_trips = 0
        begun = await begin(store, T, S, "t2")
        assert wire.round_trips == 1
        await store.commit_turn(begun, said("t2", ("user", "q")), {}, {}, 1)
        assert wire.round_trips == 2
        await store.close()


async def test_a_commit_whose_answer_is_lost_is_sent_again_and_not_doubled(
    redis_server: EmbeddedRedis, raw: redis.Redis
) -> None:
    async with wire_to(redis_server.url) as wire:
        store = SessionStore(wire.url)
        begun = await begin(store, T, S, "t1")
        await take_turn(store, T, "warm", "t0")
        wire.lose_answers = 1
        assert await store.commit_turn(begun, said("t1", ("user", "q")), {}, {}, 9) == 1
        assert wire.lose_answers == 0
        assert raw.llen(session_keys(T, S).items) == 1
        assert raw.hgetall(tenant_keys(T).usage) == {b"tokens": b"19", b"turns": b"2"}
        await store.close()


async def test_a_begin_cancelled_on_the_way_leaves_nothing_taken(redis_server: EmbeddedRedis, raw: redis.Redis) -> None:
    async with wire_to(redis_server.url) as wire:
        store = SessionStore(wire.url)
        await take_turn(store, T, "warm", "t0")
        wire.hold_answers.clear()
        task = asyncio.create_task(begin(store, T, S, "t1"))
        while not raw.exists(session_keys(T, S).lease):  # noqa: ASYNC110 (the event is in Redis)
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        wire.hold_answers.set()
        await store.close()
        assert not raw.exists(session_keys(T, S).lease)
        assert raw.zcard(tenant_keys(T).places) == 0


async def test_scripts_are_loaded_again_after_the_server_forgot_them(store: SessionStore, raw: redis.Redis) -> None:
    await take_turn(store, T, S, "t1")
    raw.script_flush()
    assert await take_turn(store, T, S, "t2") == 2


async def test_a_full_server_refuses_the_turn_and_keeps_the_session(store: SessionStore, raw: redis.Redis) -> None:
    begun = await begin(store, T, S, "t1")
    raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreUnavailable, match="is full"):
            await store.commit_turn(begun, said("t1", ("user", "q")), {}, {}, 1)
        with pytest.raises(StoreUnavailable, match="is full"):
            await begin(store, T, "new", "t2")
        assert raw.llen(session_keys(T, S).items) == 0
        assert raw.zcard(tenant_keys(T).places) == 0
    finally:
        raw.config_set("maxmemory", 0)
    assert await store.commit_turn(begun, said("t1", ("user", "q")), {}, {}, 1) == 1


async def test_a_read_only_replica_is_named(store: SessionStore, raw: redis.Redis) -> None:
    raw.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailable, match="read-only replica"):
            await begin(store, T, S, "t1")
    finally:
        raw.execute_command("REPLICAOF", "NO", "ONE")


async def test_no_server_a_silent_server_and_a_wrong_password(redis_server: EmbeddedRedis) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        store = SessionStore(f"redis://:hidden@127.0.0.1:{port}/0", command_timeout_seconds=0.1)
        with pytest.raises(StoreUnavailable, match="did not answer in time") as raised:
            await store.ping()
        await store.close()
    assert "hidden" not in raised.value.message
    assert raised.value.retry_after_seconds is not None
    store = SessionStore(f"redis://127.0.0.1:{port}/0")
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await begin(store, T, S, "t1")
    await store.close()
    store = SessionStore(redis_server.url.replace("redis://:", "redis://:wrong"))
    with pytest.raises(StoreUnavailable, match="refused our password"):
        await store.ping()
    await store.close()


@pytest.fixture
def cluster_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a one-node cluster: it refuses any script whose keys lie in two slots."""
    require_server()
    monkeypatch.setattr(embedded, "_CONFIG", embedded._CONFIG + "cluster-enabled yes\n")
    port = next(port for port in range(21_000, 30_000) if embedded._free_port(port))  # its bus is at +10000
    server = EmbeddedRedis(tmp_path, port=port)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        while client.cluster("INFO")["cluster_state"] != "ok":
            time.sleep(0.02)
        with pytest.raises(redis.ResponseError, match="CROSSSLOT|same slot"):  # noqa: RUF043
            client.mget("a", "b")
    yield server.url
    server.stop()


async def test_no_script_crosses_a_cluster_slot(cluster_node: str) -> None:
    store = SessionStore(cluster_node)
    try:
        await take_turn(store, "a/b", S, "t1", idempotency_key="k")
        begun = await begin(store, "a/b", S, "t2")
        await store.renew(begun)
        await store.abort_turn(begun, "x")
        assert len((await store.list_sessions("a/b")).sessions) == 1
        await store.create_session("a/b", "made", said("t1", ("system", "s"), ("user", "q")), metadata={"k": "v"})
        await store.add_items("a/b", "made", said("t2", ("user", "q")), "c1")
        await store.replace_item("a/b", "made", "t2.0", message("user", "q2"))
        await store.delete_item("a/b", "made", "t2.0")
        await store.set_metadata("a/b", "made", {})
        await store.fork_session("a/b", "made", "fork")
        assert await store.import_session("a/b", [line async for line in store.export_session("a/b", "fork")], "copy")
        await begin(store, "a/b", S, "t3")
        assert await store.cancel_turn("a/b", S, "t3")
        await store.delete_turn("a/b", S, "t1")
        await store.delete_session("a/b", S)
    finally:
        await store.close()


# The embedded server


async def test_kill_9_keeps_what_was_committed(tmp_path: Path) -> None:
    require_server()
    server = EmbeddedRedis(tmp_path)
    server.start()
    url, pid = server.url, server.pid
    assert pid is not None
    store = SessionStore(url)
    try:
        for n in range(5):
            await take_turn(store, T, S, f"t{n}")
        os.kill(pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=5)
        assert server.pid is None
        with pytest.raises(StoreUnavailable):
            await store.ping()
        server.start()
        assert (server.url, server.pid == pid) == (url, False)
        begun = await begin(store, T, S, "t5")
        assert begun.version == 5
        assert contents(begun.items) == [f"{what} t{n}" for n in range(5) for what in ("question", "answer")]
    finally:
        await store.close()
        server.stop()


def test_the_password_is_private_and_the_port_remembered(tmp_path: Path) -> None:
    require_server()
    server = EmbeddedRedis(tmp_path / 'with "odd" name')
    with pytest.raises(StoreUnavailable, match="not been started"):
        _ = server.url
    server.start()
    try:
        url = server.url
        secret = tmp_path / 'with "odd" name' / "redis.secret"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        process = psutil.Process(server.pid)
        assert secret.read_text() not in " ".join(process.cmdline())
        assert secret.read_text() not in "".join(process.environ().values())
        assert {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        assert os.getsid(process.pid) == process.pid
        with redis.Redis.from_url(url) as client:
            asked = {"appendonly": "yes", "appendfsync": "always", "save": ""}
            assert asked.items() <= client.config_get("*").items()
            client.set("k", "v")
    finally:
        server.stop()
    server.stop()
    assert not process.is_running()
    server.start()
    try:
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.get("k") == b"v"
    finally:
        server.stop()


def test_a_server_left_behind_is_stopped_cleanly_first(tmp_path: Path) -> None:
    require_server()
    crashed = EmbeddedRedis(tmp_path)
    crashed.start()
    with redis.Redis.from_url(crashed.url) as client:
        client.set("k", "v")
    left_behind = crashed.pid
    server = EmbeddedRedis(tmp_path)
    server.start()
    try:
        assert server.pid != left_behind
        assert crashed.pid is None
        with redis.Redis.from_url(server.url) as client:
            assert client.get("k") == b"v"
    finally:
        server.stop()
        crashed.stop()


def test_a_pid_file_that_names_a_stranger_harms_nobody(tmp_path: Path) -> None:
    require_server()
    (tmp_path / "redis.pid").write_text(f"{os.getpid()}\n")
    server = EmbeddedRedis(tmp_path)
    server.start()
    server.stop()


def test_a_taken_port_is_told_with_the_log(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = EmbeddedRedis(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(StoreUnavailable, match="Address already in use"):
            server.start()
        assert server.pid is None


def test_a_remembered_port_taken_by_others_is_given_up(tmp_path: Path) -> None:
    require_server()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (tmp_path / "redis.port").write_text(str(taken.getsockname()[1]))
        server = EmbeddedRedis(tmp_path)
        server.start()
        server.stop()
        assert (tmp_path / "redis.port").read_text().strip() != str(taken.getsockname()[1])
