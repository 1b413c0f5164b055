"""Session entries of the scenario bank that the store and truncation alone must meet.

``BREAKS`` names, per test, one line whose breaking that test must notice: file, the line's text, what to put there.
"""

from __future__ import annotations

import asyncio

import pytest
import redis

from policies.errors import SessionBusy, SessionNotFound
from policies.truncation import fit
from session_store.items import Item
from session_store.keys import session_keys, tenant_keys
from session_store.records import Begun, Replay
from session_store.store import SessionStore
from tests.conftest_redis import LIMITS, begin, contents, raw, redis_server, said, store, take_turn

__all__ = ["raw", "redis_server", "store"]  # fixtures

BREAKS = {
    "test_S01": ("policies/truncation.py", "if call is not None and index not in heads:", "if False:"),
    "test_S02": (
        "policies/truncation.py",
        "dict.fromkeys(item.call_ids, index)",
        "dict.fromkeys(item.call_ids[:1], index)",
    ),
    "test_S20": ("session_store/lua/begin_turn.lua", "if held[1] and held[1] ~= turn then", "if false then"),
    "test_S22": ("session_store/lua/commit_turn.lua", "if idem_key ~= '' then redis.call", "if false then redis.call"),
    "test_S23": ("session_store/lua/abort_turn.lua", "redis.call('RPUSH', KEYS[7], ARGV[4])", ""),
    "test_S35": ("session_store/keys.py", "{encode_tenant(tenant)}/{check", "{check"),
}


def call(call_id: str) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


async def stored_tool_history(store: SessionStore) -> Begun:
    """Four turns: talk, a message with two parallel calls, their results as the next request, a new question."""
    await take_turn(store, "acme", "s", "t1")
    begun = await begin(store, "acme", "s", "t2")
    calling = Item("t2.1", "t2", "assistant", "", 2.0, tool_calls=(call("c1"), call("c2")))
    await store.commit_turn(begun, [*said("t2", ("user", "look up")), calling], {}, {}, 1)
    begun = await begin(store, "acme", "s", "t3")
    results = [Item(f"t3.{c}", "t3", "tool", f"result {c}", 3.0, tool_call_id=c) for c in ("c1", "c2")]
    answer = Item("t3.a", "t3", "assistant", "found", 4.0)
    await store.commit_turn(begun, [*results, answer], {}, {}, 1)
    return await begin(store, "acme", "s", "t4")


def kept_at(begun: Begun, budget_items: int) -> set[str]:
    items = (*begun.items, *said("t4", ("user", "and now?")))
    indices, record = fit([item.view() for item in items], budget_items, len)
    kept = {items[i].item_id for i in indices}
    assert kept.isdisjoint(record.dropped_items)
    assert len(kept) + len(record.dropped_items) == len(items) == 8
    return kept


async def test_S01_a_tool_call_and_its_result_stay_or_go_together(store: SessionStore) -> None:
    begun = await stored_tool_history(store)
    assert kept_at(begun, 4) == {"t4.0"}  # results and answer would fit without the call


async def test_S02_parallel_calls_are_atomic(store: SessionStore) -> None:
    begun = await stored_tool_history(store)
    assert kept_at(begun, 6) == {"t2.0", "t2.1", "t3.c1", "t3.c2", "t3.a", "t4.0"}
    assert kept_at(begun, 3) == kept_at(begun, 5) == {"t4.0"}  # never one of the two results


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
