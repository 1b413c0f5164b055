"""Owns reading sessions back, listing and deleting them. None of it takes a lease.

A session exists once it has a committed turn, or was made without one. Another tenant's session is another
key: it is as if it did not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from redis.asyncio.client import Pipeline

from policies.errors import BadRequest, ItemNotFound, SessionNotFound
from session_store import answers
from session_store.client import ScriptClient
from session_store.items import Item, parse_live
from session_store.keys import session_keys, tenant_keys, turn_key
from session_store.records import ItemPage, SessionInfo, SessionPage, StoredTurn, TenantUsage

_META = ("version", "created_ms", "updated_ms", "kind", "metadata")
READ_AT_ONCE = 64  # items
_META_ANSWERS = 5  # commands that _ask_info sends


class SessionReader:
    """The half of the store that changes nothing in a turn."""

    def __init__(self, client: ScriptClient) -> None:
        self._client = client

    @property
    def round_trips(self) -> int:
        """To Redis, so far."""
        return self._client.round_trips

    async def ping(self) -> None:
        """StoreUnavailable unless Redis answers."""
        await self._client.read(lambda pipe: pipe.ping())

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def read_items(self, tenant: str, session_id: str, start: int = 0, count: int = 100) -> tuple[Item, ...]:
        """``count`` items from index ``start`` (0 = the oldest). SessionNotFound."""
        if start < 0 or count < 1:
            raise BadRequest(f"start must be 0 or more and count 1 or more, not {start} and {count}")
        keys = session_keys(tenant, session_id)

        def build(pipe: Pipeline) -> None:
            pipe.hget(keys.meta, "version")
            pipe.lrange(keys.items, start, start + count - 1)

        version, data = await self._client.read(build)
        _check_exists(session_id, version)
        return tuple(parse_live(data))

    async def read_page(
        self, tenant: str, session_id: str, after: str | None = None, count: int = 100, *, newest_first: bool = False
    ) -> ItemPage:
        """``count`` items behind the one with the id ``after``. SessionNotFound; BadRequest if there is none."""
        keys = session_keys(tenant, session_id)

        def ask(pipe: Pipeline) -> None:
            pipe.hget(keys.meta, "version")
            pipe.llen(keys.items)
            pipe.hget(keys.index, after or "")

        version, total, index = await self._client.read(ask)
        _check_exists(session_id, version)
        if after is not None and index is None:
            raise BadRequest(f"after: there is no item {after} in {session_id}", param="after")
        step = -1 if newest_first else 1
        at = (total - 1 if newest_first else 0) if index is None else int(index) + step
        found: list[Item] = []
        while len(found) <= count and 0 <= at < total:  # deleted items leave gaps
            wanted = count + 1 - len(found)
            first, last = (max(0, at - wanted + 1), at) if newest_first else (at, min(total, at + wanted) - 1)
            found += parse_live(await self._slice(keys.items, first, last))[::step]
            at = first - 1 if newest_first else last + 1
        return ItemPage(tuple(found[:count]), len(found) > count)

    async def read_item(self, tenant: str, session_id: str, item_id: str) -> Item:
        """SessionNotFound, ItemNotFound."""
        return Item.from_json(await self.read_stored(tenant, session_id, item_id))

    async def read_stored(self, tenant: str, session_id: str, item_id: str) -> bytes:
        """An item as it lies there. SessionNotFound, ItemNotFound."""
        keys = session_keys(tenant, session_id)

        def ask(pipe: Pipeline) -> None:
            pipe.hget(keys.meta, "version")
            pipe.hget(keys.index, item_id)

        version, index = await self._client.read(ask)
        _check_exists(session_id, version)
        found = await self._slice(keys.items, int(index), int(index)) if index is not None else []
        if not parse_live(found):
            raise item_not_found(session_id, item_id)
        return found[0]

    async def read_named(self, tenant: str, session_id: str, item_ids: Sequence[str]) -> tuple[Item, ...]:
        """The items of these ids that are there, in this order. SessionNotFound."""
        keys = session_keys(tenant, session_id)

        def ask(pipe: Pipeline) -> None:
            pipe.hget(keys.meta, "version")
            pipe.hmget(keys.index, list(item_ids))

        version, places = await self._client.read(ask)
        _check_exists(session_id, version)
        found = [int(place) for place in places if place is not None]

        def read(pipe: Pipeline) -> None:
            for place in found:
                pipe.lindex(keys.items, place)

        return tuple(parse_live(await self._client.read(read))) if found else ()

    async def read_window(
        self, tenant: str, session_id: str, end: int, window_items: int, window_bytes: int
    ) -> tuple[tuple[Item, ...], int]:
        """(items, how many older ones stayed unread): what a turn would read of the items before index ``end``."""
        keys = session_keys(tenant, session_id)
        start, size, newest = end, 0, list[bytes]()
        while start > 0 and len(newest) <= window_items and size <= window_bytes:
            first = max(0, start - READ_AT_ONCE)
            for data in reversed(await self._slice(keys.items, first, start - 1)):
                if len(newest) > window_items or (size > window_bytes and len(newest) > 1):
                    break
                newest.append(data)
                size += len(data)
                start -= 1
        (places,) = await self._client.read(lambda pipe: pipe.lrange(keys.heads, 0, -1))
        older = [int(place) for place in places if int(place) < start]

        def read(pipe: Pipeline) -> None:
            for place in older:
                pipe.lindex(keys.items, place)

        heads = await self._client.read(read) if older else []
        return answers.cut_window(start, heads, newest[::-1], window_items, window_bytes)

    async def known_items(self, tenant: str, session_id: str, item_ids: Sequence[str]) -> frozenset[str]:
        """Those of the ids whose items are stored."""
        if not item_ids:
            return frozenset()
        key = session_keys(tenant, session_id).index
        (places,) = await self._client.read(lambda pipe: pipe.hmget(key, list(item_ids)))
        return frozenset(one for one, place in zip(item_ids, places, strict=True) if place is not None)

    async def read_turn(self, tenant: str, session_id: str, turn_id: str) -> StoredTurn | None:
        """What became of a turn; None if nothing is known of it."""
        keys = session_keys(tenant, session_id)

        def ask(pipe: Pipeline) -> None:
            pipe.hget(keys.turns, turn_id)
            pipe.hget(keys.lease, "turn")
            pipe.lrange(keys.incomplete, 0, -1)

        record, running, incomplete = await self._client.read(ask)
        if record is not None:
            first, count, _, stored = answers.turn_record(record)
            items = tuple(parse_live(await self._slice(keys.items, first, first + count - 1))) if count else ()
            return StoredTurn(turn_id, "completed", items, stored.get("reply", {}), stored.get("truncation", {}))
        if running is not None and running.decode() == turn_id:
            return StoredTurn(turn_id, "running")
        attempts = [attempt for attempt in map(orjson.loads, incomplete) if attempt["turn_id"] == turn_id]
        return StoredTurn(turn_id, attempts[0]["reason"]) if attempts else None  # the first says why

    async def end_of_turn(self, tenant: str, session_id: str, turn_id: str) -> int:
        """The index behind the last item of a turn that another may go on from. SessionNotFound if it is none."""
        key = session_keys(tenant, session_id).turns
        (record,) = await self._client.read(lambda pipe: pipe.hget(key, turn_id))
        first, count, goes_on, _ = answers.turn_record(record) if record is not None else (0, 0, False, {})
        if not goes_on:
            raise not_found(session_id)
        return first + count

    async def _slice(self, key: str, first: int, last: int) -> list[bytes]:
        (data,) = await self._client.read(lambda pipe: pipe.lrange(key, first, last))
        return list(data)

    async def read_incomplete(self, tenant: str, session_id: str) -> tuple[dict[str, Any], ...]:
        """The remembered attempts that were not committed, oldest first: turn_id, reason, used_tokens."""
        keys = session_keys(tenant, session_id)
        (attempts,) = await self._client.read(lambda pipe: pipe.lrange(keys.incomplete, 0, -1))
        return tuple(orjson.loads(attempt) for attempt in attempts)

    async def session_info(self, tenant: str, session_id: str) -> SessionInfo:
        """SessionNotFound if it has no committed turn."""
        info = _info(tenant, session_id, await self._client.read(lambda pipe: _ask_info(pipe, tenant, session_id)))
        if info is None:
            raise not_found(session_id)
        return info

    async def list_sessions(self, tenant: str, cursor: str | None = None, count: int = 100) -> SessionPage:
        """Sessions of a tenant, last used first. One that is used while paging may appear on no later
        page."""
        newest = "+inf" if cursor is None else f"({_check_cursor(cursor)}"
        index = tenant_keys(tenant).sessions
        (rows,) = await self._client.read(
            lambda pipe: pipe.zrevrangebyscore(index, newest, "-inf", start=0, num=count, withscores=True)
        )
        ids = [session_id.decode() for session_id, _ in rows]

        def build(pipe: Pipeline) -> None:
            for session_id in ids:
                _ask_info(pipe, tenant, session_id)

        got = await self._client.read(build) if ids else []
        infos = (
            _info(tenant, session_id, got[i * _META_ANSWERS : (i + 1) * _META_ANSWERS])
            for i, session_id in enumerate(ids)
        )
        sessions = tuple(info for info in infos if info is not None)  # the index may outlive a session
        return SessionPage(sessions, f"{rows[-1][1]:.0f}" if len(rows) == count else None)

    async def delete_session(self, tenant: str, session_id: str) -> None:
        """Drop a session whole; a turn that runs on it, be it the first, will find its lease lost. SessionNotFound."""
        keys = session_keys(tenant, session_id)

        def build(pipe: Pipeline) -> None:
            pipe.hget(keys.meta, "version")
            pipe.exists(keys.lease)
            pipe.delete(*keys.all())
            pipe.zrem(tenant_keys(tenant).sessions, session_id)

        version, runs, _, _ = await self._client.read(build)
        if not runs:
            _check_exists(session_id, version)

    async def missing(self, sessions: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of (tenant, session id) that are not here: they have no committed turn, and none runs."""
        if not sessions:
            return []

        def build(pipe: Pipeline) -> None:
            for tenant, session_id in sessions:
                keys = session_keys(tenant, session_id)
                pipe.exists(keys.meta, keys.lease)

        found = await self._client.read(build)
        return [session for session, there in zip(sessions, found, strict=True) if not there]

    async def take_turn(self, work: str, seconds: float) -> bool:
        """May this process do some work that one of all is enough for? Then no other may, for so long."""
        key = turn_key(work)
        (taken,) = await self._client.read(lambda pipe: pipe.set(key, "1", nx=True, px=int(seconds * 1000)))
        return bool(taken)

    async def tenant_usage(self, tenant: str) -> TenantUsage:
        """What a tenant has used so far, and what it holds now (lapsed places may count until the next
        reserve)."""
        keys = tenant_keys(tenant)

        def build(pipe: Pipeline) -> None:
            pipe.hmget(keys.usage, "tokens", "turns")
            pipe.hvals(keys.reserved)

        (tokens, turns), reserved = await self._client.read(build)
        return TenantUsage(int(tokens or 0), int(turns or 0), len(reserved), sum(map(int, reserved)))


def _ask_info(pipe: Pipeline, tenant: str, session_id: str) -> None:
    keys = session_keys(tenant, session_id)
    pipe.hmget(keys.meta, *_META)
    pipe.pttl(keys.meta)
    pipe.llen(keys.items)
    pipe.llen(keys.incomplete)
    pipe.hget(keys.lease, "turn")


def _info(tenant: str, session_id: str, got: list[Any]) -> SessionInfo | None:
    (version, created_ms, updated_ms, kind, metadata), ttl_ms, items, incomplete, turn_id = got
    if not int(version or 0):
        return None
    return SessionInfo(
        tenant=tenant,
        session_id=session_id,
        version=int(version),
        items=items,
        incomplete=incomplete,
        created=int(created_ms) / 1000,
        updated=int(updated_ms) / 1000,
        expires_in_seconds=ttl_ms / 1000,
        running_turn_id=turn_id.decode() if turn_id else None,
        kind=kind.decode(),
        metadata=orjson.loads(metadata or b"{}"),
    )


def _check_exists(session_id: str, version: bytes | None) -> None:
    if not int(version or 0):
        raise not_found(session_id)


def not_found(session_id: str) -> SessionNotFound:
    return SessionNotFound(f"there is no session {session_id}", param="session_id")


def item_not_found(session_id: str, item_id: str) -> ItemNotFound:
    return ItemNotFound(f"there is no item {item_id} in {session_id}", param="item_id")


def _check_cursor(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 20):
        raise BadRequest("cursor must be one that an earlier page returned", param="cursor")
    return int(cursor)
