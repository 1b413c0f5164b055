"""Session entries of the scenario bank that the store and truncation alone must meet.

``BREAKS`` names, per test, one line whose breaking that test must notice: file, the line's text, what to put there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import redis

from policies.errors import SessionBusy, SessionNotFound, StoreUnavailable
from policies.truncation import fit
from session_store.embedded import EmbeddedRedis
from session_store.items import Item, message, text_of
from session_store.keys import session_keys, tenant_keys
from session_store.records import Begun, Replay
from session_store.store import INCOMPLETE_KEPT, SessionStore
from tests.conftest_redis import LIMITS, begin, contents, raw, redis_server, said, store, take_turn

__all__ = ["raw", "redis_server", "store"]  # fixtures

BREAKS = {
    "test_S01": ("policies/truncation.py", "if call is not None and index not in heads:", "if False:"),
    "test_S02": (
        "policies/truncation.py",
        "made_at.update(dict.fromkeys(item.call_ids, index))",
        "made_at = dict.fromkeys(item.call_ids, index)",
    ),
    "test_S17_every": (
        "session_store/lua/commit_turn.lua",
        "for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, session_ms) end",
        "",
    ),
    "test_S17_what": ("session_store/lua/settle.lua", "redis.pcall('PEXPIRE', sessions, session_ms)", ""),
    "test_S17_attempts": (
        "session_store/lua/abort_turn.lua",
        "redis.call('LTRIM', KEYS[7]",
        "redis.call('LLEN', KEYS[7]) --",
    ),
    "test_S28_a_turn": ("session_store/lua/commit_turn.lua", "redis.pcall('PEXPIRE'", "redis.call('PEXPIRE'"),
    "test_S28_a_lease": ("session_store/lua/begin_turn.lua", "redis.call('PEXPIRE', lease, lease_ms)", ""),
    "test_S20": ("session_store/lua/begin_turn.lua", "local busy = held[1] and held[1] ~= turn", "local busy = false"),
    "test_S22": ("session_store/lua/commit_turn.lua", "if idem_key ~= '' then redis.call", "if false then redis.call"),
    "test_S23": ("session_store/lua/abort_turn.lua", "redis.call('RPUSH', KEYS[7], ARGV[4])", ""),
    "test_S26": ("session_store/lua/commit_turn.lua", "redis.call('HSETNX', index, ARGV[i], place) == 1", "true"),
    "test_S29": (
        "session_store/lua/commit_turn.lua",
        "local first = redis.call('LLEN', items)",
        "redis.call('PEXPIRE', items, session_ms) local first = redis.call('LLEN', items)",
    ),
    "test_S31": ("session_store/lua/append_items.lua", "place = place + 1", ""),
    "test_S34": ("session_store/reading.py", "pipe.delete(*keys.all())", "pipe.flushdb()"),
    "test_S35": ("session_store/keys.py", "{encode_tenant(tenant)}/{check", "{check"),
}


def call(call_id: str) -> dict[str, object]:
    return {"type": "function_call", "call_id": call_id, "name": "look_up", "arguments": "{}"}


async def stored_tool_history(store: SessionStore) -> Begun:
    """Four turns: talk, a message with two parallel calls, their results as the next request, a new question."""
    await take_turn(store, "acme", "s", "t1")
    begun = await begin(store, "acme", "s", "t2")
    calling = [Item(f"t2.{c}", "t2", 2.0, call(c)) for c in ("c1", "c2")]
    await store.commit_turn(begun, [*said("t2", ("user", "look up")), *calling], {}, {}, 1)
    begun = await begin(store, "acme", "s", "t3")
    results = [
        Item(f"t3.{c}", "t3", 3.0, {"type": "function_call_output", "call_id": c, "output": f"result {c}"})
        for c in ("c1", "c2")
    ]
    answer = Item("t3.a", "t3", 4.0, message("assistant", "found"))
    await store.commit_turn(begun, [*results, answer], {}, {}, 1)
    return await begin(store, "acme", "s", "t4")


def kept_at(begun: Begun, budget_items: int) -> set[str]:
    items = (*begun.items, *said("t4", ("user", "and now?")))
    indices, record = fit([item.view() for item in items], budget_items, len)
    kept = {items[i].item_id for i in indices}
    assert kept.isdisjoint(record.dropped_items)
    assert len(kept) + len(record.dropped_items) == len(items) == 9
    return kept


async def test_S01_a_tool_call_and_its_result_stay_or_go_together(store: SessionStore) -> None:
    begun = await stored_tool_history(store)
    assert kept_at(begun, 4) == {"t4.0"}  # results and answer would fit without the call


async def test_S02_parallel_calls_are_atomic(store: SessionStore) -> None:
    begun = await stored_tool_history(store)
    assert kept_at(begun, 7) == {"t2.0", "t2.c1", "t2.c2", "t3.c1", "t3.c2", "t3.a", "t4.0"}
    assert kept_at(begun, 3) == kept_at(begun, 6) == {"t4.0"}  # never one of the two results


def ttls_ms(raw: redis.Redis) -> dict[str, int]:
    return {key.decode(): raw.pttl(key) for key in raw.scan_iter()}


async def keyed_turn(store: SessionStore, session_id: str, key: str, turn_id: str) -> Begun | Replay:
    """A committed turn under an idempotency key; the replay if it had finished already."""
    asked = {**LIMITS, "idempotency_key": key, "request_fingerprint": "abc"}
    begun = await store.begin_turn("acme", session_id, turn_id, **asked)  # type: ignore[arg-type]
    if isinstance(begun, Begun):
        items = said(turn_id, ("system", "be brief"), ("user", "q"), ("assistant", "a"))
        await store.commit_turn(begun, items, {}, {"finish_reason": "stop"}, 10)
    return begun


async def test_S17_every_key_that_a_turn_writes_lapses_unless_the_session_is_used(
    redis_server: EmbeddedRedis, raw: redis.Redis
) -> None:
    store = SessionStore(redis_server.url, session_ttl_seconds=600)
    for_ever = ["co:{acme}:usage"]  # two counters per tenant
    await keyed_turn(store, "s", "k1", "t1")
    assert [key for key, ttl in ttls_ms(raw).items() if ttl < 0] == for_ever
    failed = await begin(store, "acme", "s", "t2")
    await store.abort_turn(failed, "client gone")
    found = ttls_ms(raw)
    assert [key for key, ttl in found.items() if ttl < 0] == for_ever
    parts = {key.rpartition(":")[2] for key in found if "/s}" in key}
    assert parts == {"meta", "items", "heads", "turns", "idem", "incomplete", "index"}
    assert all(595_000 < ttl <= 600_000 for key, ttl in found.items() if "/s}" in key)
    for key in found:  # nine minutes pass
        if "/s}" in key:
            raw.pexpire(key, 60_000)
    await take_turn(store, "acme", "s", "t3")
    assert min(ttl for key, ttl in ttls_ms(raw).items() if "/s}" in key) > 595_000, "used, so it slides"
    await store.close()


async def test_S17_what_nobody_uses_is_gone_and_its_reply_is_not_replayed(
    redis_server: EmbeddedRedis, raw: redis.Redis
) -> None:
    store = SessionStore(redis_server.url, session_ttl_seconds=1.0, lease_ttl_seconds=0.5)
    for n in range(50):
        await keyed_turn(store, f"s{n}", "k", f"t{n}")
    assert isinstance(await keyed_turn(store, "s49", "k", "again"), Replay)
    kept = {b"co:{acme}:usage", b"co:{acme}:settled"}  # two counters; the turns settled in the last hour
    deadline = asyncio.get_running_loop().time() + 5
    while set(raw.keys()) != kept:
        assert asyncio.get_running_loop().time() < deadline, "still there after five times their TTL"
        await asyncio.sleep(0.02)
    assert 0 < raw.pttl("co:{acme}:settled") <= 3_600_000
    assert (await store.list_sessions("acme")).sessions == ()
    with pytest.raises(SessionNotFound):
        await store.session_info("acme", "s0")
    anew = await keyed_turn(store, "s0", "k", "t-anew")
    assert isinstance(anew, Begun) and anew.items == () and anew.version == 0
    assert raw.zcard(tenant_keys("acme").sessions) == 1
    await store.close()


async def test_S17_attempts_that_failed_are_kept_in_bounded_number(store: SessionStore, raw: redis.Redis) -> None:
    await take_turn(store, "acme", "s", "t")
    for n in range(INCOMPLETE_KEPT + 8):
        await store.abort_turn(await begin(store, "acme", "s", f"gone{n}"), "client gone")
    kept = await store.read_incomplete("acme", "s")
    assert raw.llen(session_keys("acme", "s").incomplete) == len(kept) == INCOMPLETE_KEPT
    assert kept[-1]["turn_id"] == f"gone{INCOMPLETE_KEPT + 7}"


@pytest.fixture
def may_expire(raw: redis.Redis) -> Iterator[Callable[[bool], None]]:
    """Whether the store's user may run EXPIRE and PEXPIRE."""

    def allow(allowed: bool) -> None:
        sign = "+" if allowed else "-"
        raw.execute_command("ACL", "SETUSER", "default", f"{sign}expire", f"{sign}pexpire")

    yield allow
    allow(True)


async def test_S28_a_turn_whose_expiry_cannot_be_set_is_kept_whole(
    store: SessionStore, raw: redis.Redis, may_expire: Callable[[bool], None]
) -> None:
    asked = {**LIMITS, "idempotency_key": "k", "request_fingerprint": "abc"}
    await take_turn(store, "acme", "s", "t1")
    begun = await begin(store, "acme", "s", "t2", **asked)
    may_expire(False)
    items = said("t2", ("user", "q"), ("assistant", "a"))
    assert await store.commit_turn(begun, items, {}, {"id": "r"}, 7) == 2
    assert await store.commit_turn(begun, items, {}, {"id": "r"}, 7) == 2  # a retry after a lost answer
    assert [
        text_of(json.loads(item)["item"]["content"]) for item in raw.lrange(session_keys("acme", "s").items, 2, -1)
    ] == ["q", "a"]
    assert not raw.exists(session_keys("acme", "s").lease)
    usage = await store.tenant_usage("acme")
    assert (usage.used_tokens, usage.turns, usage.running) == (17, 2, 0)
    may_expire(True)
    replay = await store.begin_turn("acme", "s", "retry", **asked)  # type: ignore[arg-type]
    assert isinstance(replay, Replay) and replay.turn_id == "t2"
    assert all(ttl > 0 for key, ttl in ttls_ms(raw).items() if "/s}" in key)


async def test_S28_a_lease_whose_expiry_cannot_be_set_is_refused_and_not_left_behind(
    store: SessionStore, raw: redis.Redis, may_expire: Callable[[bool], None]
) -> None:
    await take_turn(store, "acme", "s", "t1")
    may_expire(False)
    for session_id in ("s", "new"):
        with pytest.raises(StoreUnavailable, match="pexpire"):
            await begin(store, "acme", session_id, "t2")
        assert not raw.exists(session_keys("acme", session_id).lease), "held for ever: it would have no TTL"
    assert not raw.keys("co:{acme/new}:*")
    assert raw.zcard(tenant_keys("acme").places) == raw.hlen(tenant_keys("acme").reserved) == 0
    may_expire(True)
    begun = await begin(store, "acme", "s", "t3")
    assert contents(begun.items) == ["question t1", "answer t1"]


async def test_S20_of_two_concurrent_turns_one_runs_and_the_other_waits_or_gets_busy(store: SessionStore) -> None:
    first = await begin(store, "acme", "s", "t1")
    with pytest.raises(SessionBusy) as raised:
        await begin(store, "acme", "s", "t2")
    assert raised.value.http_status == 409
    assert 0 < (raised.value.retry_after_seconds or 0) <= 1
    with pytest.raises(SessionBusy):
        await store.begin_turn_waiting("acme", "s", "t2", deadline_seconds=0.1, **LIMITS)

    waiting = asyncio.create_task(store.begin_turn_waiting("acme", "s", "t2", deadline_seconds=5, **LIMITS))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.commit_turn(first, said("t1", ("user", "q1"), ("assistant", "a1")), {}, {}, 1)
    second = await waiting
    assert isinstance(second, Begun)
    assert contents(second.items) == ["q1", "a1"]  # it sees what it waited for
    await store.abort_turn(second, "test")


async def test_S20_many_turns_at_once_do_not_interleave(store: SessionStore, raw: redis.Redis) -> None:
    async def turn(name: str) -> None:
        begun = await store.begin_turn_waiting("acme", "s", name, deadline_seconds=20, **LIMITS)
        assert isinstance(begun, Begun)
        await asyncio.sleep(0)
        await store.commit_turn(begun, said(name, ("user", "q"), ("assistant", "a")), {}, {}, 1)

    await asyncio.gather(*(turn(f"t{n}") for n in range(6)))
    stored = [Item.from_json(data) for data in raw.lrange(session_keys("acme", "s").items, 0, -1)]
    assert [i.turn_id for i in stored[::2]] == [i.turn_id for i in stored[1::2]]
    assert {i.turn_id for i in stored} == {f"t{n}" for n in range(6)}
    assert [i.role for i in stored] == ["user", "assistant"] * 6


async def test_S22_a_retry_after_the_finish_gets_the_stored_reply(store: SessionStore, raw: redis.Redis) -> None:
    asked = {**LIMITS, "idempotency_key": "key-1", "request_fingerprint": "abc"}
    begun = await begin(store, "acme", "s", "t1", **asked)
    reply = {"id": "chatcmpl-1", "finish_reason": "stop", "usage": {"total_tokens": 12}}
    await store.commit_turn(begun, said("t1", ("user", "q"), ("assistant", "a")), {"reason": "none"}, reply, 12)
    await take_turn(store, "acme", "s", "t2")

    replay = await store.begin_turn("acme", "s", "retry", **asked)
    assert isinstance(replay, Replay)
    assert (replay.turn_id, replay.version, replay.reply) == ("t1", 1, reply)
    assert replay.truncation == {"reason": "none"}
    assert contents(replay.items) == ["q", "a"]
    assert raw.llen(session_keys("acme", "s").items) == 4  # t1 once, t2
    assert not raw.exists(session_keys("acme", "s").lease)
    assert raw.zcard(tenant_keys("acme").places) == 0


async def test_S23_after_a_disconnect_the_attempt_is_incomplete_and_out_of_prompts(
    store: SessionStore, raw: redis.Redis
) -> None:
    await take_turn(store, "acme", "s", "t1")
    begun = await begin(store, "acme", "s", "t2")
    await store.abort_turn(begun, "client disconnected after 7 tokens", used_tokens=7)
    await store.abort_turn(begun, "client disconnected after 7 tokens", used_tokens=7)

    again = await begin(store, "acme", "s", "t3")  # free at once
    assert contents(again.items) == ["question t1", "answer t1"]
    assert await store.read_incomplete("acme", "s") == (
        {"turn_id": "t2", "reason": "client disconnected after 7 tokens", "used_tokens": 7},
    )
    assert raw.llen(session_keys("acme", "s").items) == 2
    assert (await store.tenant_usage("acme")).used_tokens == 17


async def test_S35_another_tenants_session_does_not_exist(store: SessionStore) -> None:
    await take_turn(store, "acme", "s", "t1")
    for reading in (
        store.session_info("evil", "s"),
        store.read_items("evil", "s"),
        store.delete_session("evil", "s"),
    ):
        with pytest.raises(SessionNotFound) as raised:
            await reading
        assert raised.value.http_status == 404
    assert await store.read_incomplete("evil", "s") == ()
    assert (await store.list_sessions("evil")).sessions == ()

    held = await begin(store, "acme", "s", "t2")
    own = await begin(store, "evil", "s", "t1")  # a session of its own: not busy, and empty
    assert own.items == ()
    await store.commit_turn(own, said("t1", ("user", "mine")), {}, {}, 1)
    await store.delete_session("evil", "s")
    assert contents(held.items) == contents(await store.read_items("acme", "s")) == ["question t1", "answer t1"]


async def test_S26_an_item_that_is_sent_again_is_there_once(store: SessionStore) -> None:
    begun = await begin(store, "acme", "s", "t1")
    await store.commit_turn(begun, said("t1", ("user", "q"), ("assistant", "a")), {}, {}, 1)
    begun = await begin(store, "acme", "s", "t2")
    again = [replace(item, turn_id="t2") for item in begun.items]
    await store.commit_turn(begun, [*again, *said("t2", ("user", "q2"), ("assistant", "a2"))], {}, {}, 1)
    assert contents(await store.read_items("acme", "s")) == ["q", "a", "q2", "a2"]


async def test_S29_a_full_server_says_so_and_nothing_is_lost_or_half_written(
    store: SessionStore, raw: redis.Redis
) -> None:
    await take_turn(store, "acme", "s", "t1", idempotency_key="k")
    begun = await begin(store, "acme", "s", "t2")
    before = {key: raw.dump(key) for key in raw.keys("co:{acme/s}:*")}
    raw.config_set("maxmemory", 1)
    try:
        for refused in (
            store.commit_turn(begun, said("t2", ("user", "q"), ("assistant", "a")), {}, {}, 1),
            store.create_session("acme", "other", said("t", ("user", "q"))),
            begin(store, "acme", "other", "t3"),
        ):
            with pytest.raises(StoreUnavailable, match="is full") as error:
                await refused
            assert error.value.http_status == 503 and error.value.retry_after_seconds
        assert {key: raw.dump(key) for key in raw.keys("co:{acme/s}:*")} == before
        assert raw.keys("co:{acme/other}:*") == []
        assert contents(await store.read_items("acme", "s")) == ["question t1", "answer t1"], "reading goes on"
    finally:
        raw.config_set("maxmemory", 0)
    assert await store.commit_turn(begun, said("t2", ("user", "q"), ("assistant", "a")), {}, {}, 1) == 2


async def test_S31_a_history_written_piece_by_piece_is_read_back_whole(
    redis_server: EmbeddedRedis, store: SessionStore
) -> None:
    """Turns, additions, an edit and a deletion: another process reads exactly what they leave."""
    await store.create_session("acme", "s", said("t0", ("system", "rules")))
    expected = ["rules"]
    for n in range(1, 30):
        if n % 3:
            await take_turn(store, "acme", "s", f"t{n}")
            expected += [f"question t{n}", f"answer t{n}"]
        else:
            await store.add_items("acme", "s", said(f"t{n}", ("user", f"a{n}"), ("user", f"b{n}")), f"c{n}")
            expected += [f"a{n}", f"b{n}"]
    await store.replace_item("acme", "s", "t3.0", message("user", "edited"))
    expected[expected.index("a3")] = "edited"
    await store.delete_item("acme", "s", "t6.1")
    expected.remove("b6")
    other = SessionStore(redis_server.url)
    assert contents(await other.read_items("acme", "s", 0, 1000)) == expected
    assert contents((await begin(other, "acme", "s", "t")).items) == expected
    await other.close()


async def test_S32_items_are_still_there_long_after_ten_minutes(store: SessionStore, raw: redis.Redis) -> None:
    """Some stores forget within 600 s of the last write unless told otherwise. Ours keep a week, and say so."""
    await take_turn(store, "acme", "s", "t1")
    for key in raw.keys("co:{acme/s}:*"):
        assert raw.pttl(key) > 6 * 24 * 3600 * 1000, key
    assert (await store.session_info("acme", "s")).expires_in_seconds > 6 * 24 * 3600


async def test_S34_clearing_one_session_leaves_the_others(store: SessionStore, raw: redis.Redis) -> None:
    for tenant, name in (("acme", "s"), ("acme", "s2"), ("globex", "s")):
        await take_turn(store, tenant, name, f"t-{name}")
    await store.delete_session("acme", "s")
    assert not raw.keys("co:{acme/s}:*")
    for tenant, name in (("acme", "s2"), ("globex", "s")):
        assert contents(await store.read_items(tenant, name)) == [f"question t-{name}", f"answer t-{name}"]
    assert [session.session_id for session in (await store.list_sessions("acme")).sessions] == ["s2"]
