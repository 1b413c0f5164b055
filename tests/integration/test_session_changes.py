"""Sessions changed outside of turns, on a real server: made, added to, superseded, deleted, forked, imported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import orjson
import pytest
import redis

from policies.errors import BadRequest, ItemNotFound, LeaseLost, SessionBusy, SessionExists, SessionNotFound
from session_store.changing import CHUNK_ITEMS
from session_store.embedded import EmbeddedRedis
from session_store.items import Item, message
from session_store.keys import session_keys
from session_store.records import Begun, Moved, StoredTurn
from session_store.store import SessionStore, Wish
from tests.conftest_redis import LIMITS, begin, contents, raw, redis_server, said, store, take_turn, wire_to

__all__ = ["raw", "redis_server", "store"]  # fixtures

T, S = "acme", "talk"
HEAD = b'{"export":1,"session_id":"x","kind":"session","metadata":{},"created":1.0}'
GOOD = b'{"v":2,"id":"a","at":1.0,"item":{"type":"message","role":"user","content":"q"}}'
BREAKS = {
    "test_a_change_sent_again": ("session_store/lua/append_items.lua", "if record then return", "if false then return"),
    "test_a_session_that_a_turn_runs_on": (
        "session_store/lua/change_item.lua",
        "if redis.call('EXISTS', lease) == 1 then",
        "if false then",
    ),
    "test_an_edit_is_held_to": ("session_store/lua/change_item.lua", "then return {'changed'} end", "then end"),
    "test_deleted_items_are_in": ("session_store/items.py", "if not data.endswith(b'\"gone\":true}')", ""),
    "test_a_window_is_read": ("session_store/lua/begin_turn.lua", "and bytes <= window_bytes do", "do"),
    "test_a_fork_of_a_long": ("session_store/changing.py", "            at += len(chunk)\n", "            at += 0\n"),
    "test_a_load_that_fails": (
        "session_store/changing.py",
        "lambda pipe: pipe.delete(*loading)",
        "lambda pipe: pipe.ping()",
    ),
    "test_what_is_being_loaded": ("session_store/keys.py", ":load-{load_id}-", ":"),
    "test_a_session_that_is_deleted": ("session_store/changing.py", "if len(data) <= last - start:", "if False:"),
    "test_what_a_turn_would_read": (
        "session_store/reading.py",
        "heads = await self._client.read(read) if older else []",
        "heads = []",
    ),
    "test_an_import_that_fails": ("session_store/changing.py", "parse_line(number, line, FileItem)", "pass"),
    "test_a_tenants_own": ("session_store/changing.py", "self.of_tenant.get(tenant, self.seconds)", "self.seconds"),
    "test_a_chain_goes_on": ("session_store/lua/begin_turn.lua", "or about[3] ~= ARGV[11]", ""),
    "test_a_retry_of_what": ("session_store/lua/begin_turn.lua", "or sent_away then", "then"),
    "test_a_cancelled_turn": ("session_store/lua/cancel_turn.lua", "redis.call('DEL', KEYS[2])", ""),
}


def chat(*texts: str) -> list[Item]:
    return [Item(f"i{n}", f"c{n}", float(n), message("user", text)) for n, text in enumerate(texts)]


async def items_of(store: SessionStore, name: str = S) -> list[str]:
    return contents(await store.read_items(T, name, 0, 10_000))


async def test_a_session_is_made_once_and_lists_itself(store: SessionStore) -> None:
    made = await store.create_session(T, S, chat("a", "b"), kind="conversation", metadata={"k": "v"})
    assert (made.kind, made.metadata, made.items, made.version) == ("conversation", {"k": "v"}, 2, 1)
    with pytest.raises(SessionExists):
        await store.create_session(T, S)
    empty = await store.create_session(T, "empty")
    assert empty.items == 0 and await items_of(store, "empty") == []
    assert {session.session_id for session in (await store.list_sessions(T)).sessions} == {S, "empty"}
    await begin(store, T, "running", "t1")
    with pytest.raises(SessionExists):
        await store.create_session(T, "running")


async def test_a_turn_goes_on_with_what_was_added(store: SessionStore) -> None:
    await take_turn(store, T, S, "t1")
    await store.add_items(T, S, chat("added"), "c1")
    begun = await begin(store, T, S, "t2")
    assert contents(begun.items) == ["question t1", "answer t1", "added"] and begun.version == 2


async def test_a_change_sent_again_changes_nothing_more(redis_server: EmbeddedRedis, raw: redis.Redis) -> None:
    async with wire_to(redis_server.url) as wire:
        store = SessionStore(wire.url, command_timeout_seconds=1.0)
        await store.create_session(T, S)
        wire.lose_answers = 1
        await store.add_items(T, S, [*chat("a"), Item("", "x", 0.0, message("user", "b"))], "c1")
        assert (await store.session_info(T, S)).version == 2
        assert await items_of(store) == ["a", "b"]
        wire.lose_answers = 1
        await store.replace_item(T, S, "i0", message("user", "A"))
        assert (await store.session_info(T, S)).version == 3
        assert raw.llen(session_keys(T, S).old) == 1
        await store.close()


async def test_a_session_that_a_turn_runs_on_is_not_changed(store: SessionStore) -> None:
    await store.create_session(T, S, chat("a", "b"))
    begun = await begin(store, T, S, "t1")
    for change in (
        store.add_items(T, S, chat("x"), "c"),
        store.replace_item(T, S, "i0", message("user", "x")),
        store.delete_item(T, S, "i0"),
    ):
        with pytest.raises(SessionBusy):
            await change
    await store.commit_turn(begun, said("t1", ("user", "q"), ("assistant", "a")), {}, {}, 1)
    assert await items_of(store) == ["a", "b", "q", "a"]


async def test_an_item_is_superseded_in_its_place_and_what_it_was_is_kept(
    store: SessionStore, raw: redis.Redis
) -> None:
    await store.create_session(T, S, chat("a", "b", "c"))
    await store.replace_item(T, S, "i1", message("user", "B"))
    assert await items_of(store) == ["a", "B", "c"]
    assert [Item.from_json(old).text for old in raw.lrange(session_keys(T, S).old, 0, -1)] == ["b"]
    with pytest.raises(BadRequest, match="stays one"):
        await store.replace_item(T, S, "i1", message("system", "B"))
    with pytest.raises(ItemNotFound):
        await store.replace_item(T, S, "nowhere", message("user", "B"))


async def test_an_edit_is_held_to_what_the_item_is_when_it_is_made(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted and added again as something else between our look and our change."""
    await store.create_session(T, S, chat("a"))
    read = store.read_stored

    async def then_changed(*where: str) -> bytes:
        stored = await read(*where)
        monkeypatch.setattr(store, "read_stored", read)
        await store.delete_item(T, S, "i0")
        await store.add_items(T, S, [Item("i0", "c9", 9.0, message("system", "rules"))], "c9")
        return stored

    monkeypatch.setattr(store, "read_stored", then_changed)
    with pytest.raises(BadRequest, match="system message and stays one"):
        await store.replace_item(T, S, "i0", message("user", "A"))
    assert await items_of(store) == ["rules"]


async def test_deleted_items_are_in_no_window_and_no_page(store: SessionStore) -> None:
    items = [Item("head", "c", 0.0, message("system", "rules")), *chat("a", "b", "c", "d")]
    await store.create_session(T, S, items)
    await store.delete_item(T, S, "head")
    await store.delete_item(T, S, "i2")
    begun = await begin(store, T, S, "t1")
    assert contents(begun.items) == ["a", "b", "d"]
    await store.abort_turn(begun, "test")
    page = await store.read_page(T, S, None, 2)
    assert (contents(page.items), page.more) == (["a", "b"], True)
    page = await store.read_page(T, S, "i1", 2)
    assert (contents(page.items), page.more) == (["d"], False)
    page = await store.read_page(T, S, None, 2, newest_first=True)
    assert (contents(page.items), page.more) == (["d", "b"], True)
    page = await store.read_page(T, S, "i1", 5, newest_first=True)
    assert (contents(page.items), page.more) == (["a"], False)
    for wrong in (store.read_item(T, S, "i2"), store.delete_item(T, S, "i2")):
        with pytest.raises(ItemNotFound):
            await wrong
    with pytest.raises(SessionNotFound):
        await store.read_page(T, "nowhere")


@pytest.mark.parametrize(("window_bytes", "turns"), [(1_500, 1), (2_500, 2), (5_000, 4), (100_000, 6)])
async def test_a_window_is_read_up_to_so_many_bytes_whole_turns_only(
    redis_server: EmbeddedRedis, raw: redis.Redis, window_bytes: int, turns: int
) -> None:
    store = SessionStore(redis_server.url, window_items=100)
    for n in range(6):
        begun = await begin(store, T, S, f"t{n}")
        items = said(f"t{n}", ("user", f"q{n}" + "x" * 400), ("assistant", f"a{n}" + "x" * 400))
        await store.commit_turn(begun, items, {}, {}, 1)
    begun = await begin(store, T, S, "t", wish=Wish(window_bytes=window_bytes))
    assert [text[:2] for text in contents(begun.items)] == [f"{k}{n}" for n in range(6 - turns, 6) for k in "qa"]
    assert begun.truncated_store == 2 * (6 - turns)
    await store.close()


async def test_what_is_known_is_said_and_not_appended_again(store: SessionStore) -> None:
    await store.create_session(T, S, chat("a", "b"))
    begun = await begin(store, T, S, "t1", wish=Wish(item_ids=("i0", "new")))
    assert begun.known == {"i0"}
    await store.commit_turn(
        begun, [Item("i0", "t1", 0.0, message("user", "other")), *said("t1", ("user", "q"))], {}, {}, 1
    )
    assert await items_of(store) == ["a", "b", "q"]
    turn = await store.read_turn(T, S, "t1")
    assert turn is not None and contents(turn.items) == ["q"]


# -- forks and files ----------------------------------------------------------------------------


async def test_a_fork_of_a_long_session_is_whole_and_its_own(store: SessionStore) -> None:
    texts = [str(n) for n in range(2 * CHUNK_ITEMS + 3)]
    items = [Item("head", "c", 0.0, message("system", "rules")), *chat(*texts)]
    await store.create_session(T, S, items, metadata={"k": "v"})
    await store.delete_item(T, S, "i5")
    end = await store.end_of_item(T, S, f"i{CHUNK_ITEMS}")
    await store.fork_session(T, S, "part", end=end)
    await store.fork_session(T, S, "whole")
    kept = [text for text in texts if text != "5"]
    assert await items_of(store, "part") == ["rules", *kept[:CHUNK_ITEMS]]
    assert await items_of(store, "whole") == ["rules", *kept]
    await store.add_items(T, "whole", [Item("more", "m", 0.0, message("user", "more"))], "c")
    await store.delete_item(T, "part", "i0")
    assert await items_of(store) == ["rules", *kept]
    begun = await begin(store, T, "part", "t1", wish=Wish(window_bytes=10))
    assert contents(begun.items)[0] == "rules", "a head is one in the fork too"
    assert (await store.session_info(T, "whole")).metadata == {"k": "v"}
    with pytest.raises(SessionExists):
        await store.fork_session(T, S, "part")
    with pytest.raises(SessionNotFound):
        await store.fork_session(T, "nowhere", "x")


async def test_an_export_makes_the_same_session_again(store: SessionStore) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [*chat("a", "b"), Item("call", "c9", 9.0, call, model="m", extra={"x": 1})]
    await store.create_session(T, S, items, kind="conversation", metadata={"k": "v"})
    lines = [line async for line in store.export_session(T, S)]
    assert orjson.loads(lines[0]) | {"created": 0} == {
        "export": 1, "session_id": S, "kind": "conversation", "metadata": {"k": "v"}, "created": 0,
    }  # fmt: skip
    assert await store.import_session("globex", lines) == S
    assert await store.import_session(T, lines, "copy") == "copy"
    for tenant, name in (("globex", S), (T, "copy")):
        assert await store.read_items(tenant, name, 0, 100) == await store.read_items(T, S, 0, 100)
        made, original = await store.session_info(tenant, name), await store.session_info(T, S)
        assert (made.kind, made.metadata, made.created) == (original.kind, original.metadata, original.created)
    with pytest.raises(SessionExists):
        await store.import_session(T, lines)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "line 1"),
        ([b"[]"], "line 1"),
        ([b'{"export":2}'], "line 1: export"),
        ([b'{"export":1}'], "line 1: session_id"),
        ([b'{"export":1,"session_id":"x","kind":"weird"}'], "line 1: kind"),
        ([b'{"export":1,"session_id":"x","metadata":{"a":5}}'], "line 1: metadata"),
        ([b'{"export":1,"session_id":"x","created":1e25}'], "line 1: created"),
        ([HEAD, b"no"], "line 2: not JSON"),
        ([HEAD, b'{"v":2}'], "line 2: id"),
        ([HEAD, b'{"v":1,"id":"a","at":1.0,"item":{}}'], "line 2: v"),
        ([HEAD, b'{"v":2,"id":"a b","at":1.0,"item":{}}'], "line 2: id"),
        ([HEAD, b'{"v":2,"id":"a","at":"x","item":{}}'], "line 2: at"),
        ([HEAD, b'{"v":2,"id":"a","turn":[1],"at":1.0,"item":{}}'], "line 2: turn"),
        ([HEAD, b'{"v":2,"id":"a","at":1.0,"item":{"type":"picture"}}'], "line 2: item a: type"),
        ([HEAD, b'{"v":2,"id":"a","at":1.0,"item":{"type":"message","role":"robot"}}'], "line 2: item a: role"),
        ([HEAD, b'{"v":2,"id":"a","at":1.0,"gone":true,"item":{}}'], "line 2: gone"),
        ([HEAD, GOOD, GOOD], "id a is there twice"),
    ],
)
async def test_an_import_that_fails_leaves_nothing_to_see(store: SessionStore, lines: list[bytes], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        await store.import_session(T, lines)
    with pytest.raises(SessionNotFound):
        await store.session_info(T, "x")
    assert (await store.list_sessions(T)).sessions == ()


async def test_a_load_that_fails_is_in_no_session_of_that_name(store: SessionStore, raw: redis.Redis) -> None:
    many = [item.to_json() for item in chat(*map(str, range(CHUNK_ITEMS + 1)))]
    with pytest.raises(BadRequest):  # after the first chunk
        await store.import_session(T, [HEAD, *many, b"broken"])
    assert raw.keys("co:{acme/x}:*") == []
    assert (await begin(store, T, "x", "t1")).items == ()


async def test_what_is_being_loaded_is_in_no_turn_and_two_loads_do_not_mix(
    store: SessionStore, raw: redis.Redis
) -> None:
    def slowly(mark: str, before: int) -> Iterator[bytes]:
        yield HEAD
        for n, item in enumerate(chat(*(f"{mark}{n}" for n in range(2 * CHUNK_ITEMS)))):
            if n == before:
                seen.append(set(raw.keys("co:{acme/x}:*")))
            yield item.to_json()

    seen: list[set[bytes]] = []
    ended = await asyncio.gather(
        *(store.import_session(T, slowly(mark, CHUNK_ITEMS + 1)) for mark in "ab"), return_exceptions=True
    )
    assert seen and not any(session_keys(T, "x").items.encode() in keys for keys in seen)
    assert sorted(map(str, ended)) == sorted(["x", "there is a session x already"])
    texts = await items_of(store, "x")
    assert len(texts) == 2 * CHUNK_ITEMS and len({text[0] for text in texts}) == 1
    assert {key.decode().rpartition(":")[2] for key in raw.keys("co:{acme/x}:*")} == {"meta", "items", "index"}
    begun = await begin(store, T, "y", "t1")
    assert begun.items == ()
    with pytest.raises(SessionExists):
        await store.import_session(T, slowly("c", 0), "y")
    await store.commit_turn(begun, said("t1", ("user", "q")), {}, {}, 1)
    assert await items_of(store, "y") == ["q"]


async def test_a_session_that_is_deleted_while_it_is_copied_is_not_copied_in_part(store: SessionStore) -> None:
    await store.create_session(T, S, chat(*map(str, range(3 * CHUNK_ITEMS))))
    lines = store.export_session(T, S)
    for _ in range(CHUNK_ITEMS):
        await anext(lines)
    await store.delete_session(T, S)
    with pytest.raises(SessionNotFound):
        async for _ in lines:
            pass


async def test_what_a_turn_would_read_is_read_without_one(store: SessionStore) -> None:
    head = Item("head", "c", 0.0, message("system", "rules"))
    await store.create_session(T, S, [head, *chat(*(f"{n}" + "x" * 200 for n in range(50)))])
    for size in (1_000, 5_000, 100_000):
        begun = await begin(store, T, S, f"t{size}", wish=Wish(window_bytes=size))
        items, unread = await store.read_window(T, S, 51, 4096, size)
        assert (items, unread) == (begun.items, begun.truncated_store) and items[0].item_id == "head"
        await store.abort_turn(begun, "test")
    assert [item.item_id for item in (await store.read_window(T, S, 2, 4096, 100_000))[0]] == ["head", "i0"]
    assert await store.known_items(T, S, ["i3", "nowhere", "head"]) == {"i3", "head"}


# -- chains, cancelling, lifetimes -----------------------------------------------------------------


async def test_a_chain_goes_on_from_its_last_turn_and_forks_from_others(store: SessionStore) -> None:
    chain = Wish(kind="chain")
    await take_turn(store, T, S, "t1", wish=chain)
    await take_turn(store, T, S, "t2", wish=Wish(kind="chain", after="t1", must_exist=True))
    moved = await store.begin_turn(T, S, "t3", **LIMITS, wish=Wish(after="t1"))  # type: ignore[arg-type]
    assert moved == Moved(T, S, "t1", 2)
    begun = await begin(store, T, S, "t4", wish=Wish(after="t2"))
    busy = await store.begin_turn(T, S, "t5", **LIMITS, wish=Wish(after="t2"))  # type: ignore[arg-type]
    assert busy == Moved(T, S, "t2", 4), "a branch need not wait"
    await store.abort_turn(begun, "test")
    with pytest.raises(SessionNotFound):
        await begin(store, T, S, "t6", wish=Wish(after="nowhere"))
    with pytest.raises(SessionNotFound):
        await begin(store, T, "nowhere", "t6", wish=Wish(must_exist=True))
    assert (await store.tenant_usage(T)).running == 0, "what was refused gave its place back"
    await take_turn(store, T, "plain", "t1")
    assert isinstance(await store.begin_turn(T, "plain", "t2", **LIMITS, wish=Wish(after="t1")), Moved)  # type: ignore[arg-type]
    chat = await begin(store, T, "plain", "t3")
    await store.commit_turn(chat, said("t3", ("user", "q")), {}, {"finish_reason": "stop"}, 1)
    with pytest.raises(SessionNotFound):  # not one that was stored to be gone on from
        await begin(store, T, "plain", "t4", wish=Wish(after="t3"))


async def test_a_retry_of_what_was_sent_to_a_fork_is_sent_there_again(store: SessionStore) -> None:
    """Seen with a crash: the chain was busy at the first attempt, and free at the retry, which ran a second time."""
    await take_turn(store, T, S, "t1", wish=Wish(kind="chain"))
    asked = {**LIMITS, "idempotency_key": "k", "request_fingerprint": "f", "wish": Wish(after="t1")}
    other = await begin(store, T, S, "t2", wish=Wish(after="t1"))
    assert isinstance(await store.begin_turn(T, S, "t3", **asked), Moved)  # type: ignore[arg-type]
    await store.abort_turn(other, "gave up")
    assert isinstance(await store.begin_turn(T, S, "t4", **asked), Moved)  # type: ignore[arg-type]
    assert isinstance(await begin(store, T, S, "t5", wish=Wish(after="t1")), Begun), "others go on here"


async def test_a_cancelled_turn_cannot_be_committed_and_is_remembered(store: SessionStore) -> None:
    await take_turn(store, T, S, "t1")
    begun = await begin(store, T, S, "t2")
    assert await store.read_turn(T, S, "t2") == StoredTurn("t2", "running")
    assert await store.cancel_turn(T, S, "t2")
    with pytest.raises(LeaseLost):
        await store.renew(begun)
    with pytest.raises(LeaseLost):
        await store.commit_turn(begun, said("t2", ("user", "q")), {}, {}, 1)
    await store.abort_turn(begun, "not finished")
    assert await store.read_turn(T, S, "t2") == StoredTurn("t2", "cancelled")
    assert not await store.cancel_turn(T, S, "t1")
    assert not await store.cancel_turn(T, "nowhere", "t1")
    assert await store.read_turn(T, S, "t9") is None
    assert isinstance(await begin(store, T, S, "t3"), Begun)


async def test_a_forgotten_turn_takes_its_items_along_where_nothing_comes_after_it(
    store: SessionStore, raw: redis.Redis
) -> None:
    for n, after in (("t1", None), ("t2", "t1"), ("t3", "t2")):
        await take_turn(store, T, S, n, wish=Wish(kind="chain", after=after), idempotency_key=n)
    await store.delete_turn(T, S, "t2")
    assert len(await items_of(store)) == 6, "t3 builds on it"
    await store.delete_turn(T, S, "t3")
    assert await items_of(store) == ["question t1", "answer t1", "question t2", "answer t2"]
    assert not raw.hexists(session_keys(T, S).index, "t3.0")
    with pytest.raises(SessionNotFound):
        await store.delete_turn(T, S, "t3")
    assert isinstance(await store.begin_turn(T, S, "t5", **LIMITS, wish=Wish(after="t1")), Moved)  # type: ignore[arg-type]
    begun = await begin(store, T, S, "t6", idempotency_key="t3")  # the reply is gone, the key is free again
    with pytest.raises(SessionBusy):
        await store.delete_turn(T, S, "t1")
    await store.abort_turn(begun, "test")
    await take_turn(store, T, "one", "t1", wish=Wish(kind="chain"))
    await store.delete_turn(T, "one", "t1")
    assert not raw.keys("co:{acme/one}:*")
    await take_turn(store, T, "plain", "t1")
    await store.delete_turn(T, "plain", "t1")
    assert await items_of(store, "plain") == ["question t1", "answer t1"]


async def test_a_tenants_own_lifetime_is_on_every_key(redis_server: EmbeddedRedis, raw: redis.Redis) -> None:
    store = SessionStore(redis_server.url, session_ttl_seconds=600, tenant_ttl_seconds={T: 100})
    for tenant, seconds in ((T, 100), ("globex", 600)):
        await take_turn(store, tenant, S, "t1")
        await store.add_items(tenant, S, chat("a"), "c")
        await store.fork_session(tenant, S, "fork")
        for name in (S, "fork"):
            for key in session_keys(tenant, name).all():
                if raw.exists(key):
                    assert seconds * 1000 - 5_000 < raw.pttl(key) <= seconds * 1000, key
    await store.close()
    with pytest.raises(ValueError, match="at most 10"):
        SessionStore(redis_server.url, tenant_ttl_seconds={T: 10})


async def test_many_changes_at_once_lose_nothing(store: SessionStore) -> None:
    await store.create_session(T, S)
    added = [[Item(f"{n}", f"{n}", 0.0, message("user", str(n)))] for n in range(50)]
    await asyncio.gather(*(store.add_items(T, S, items, f"c{n}") for n, items in enumerate(added)))
    assert sorted(map(int, await items_of(store))) == list(range(50))
    assert (await store.session_info(T, S)).version == 51
