"""Owns changes of a session that are no turns: made, added to, an item superseded or deleted, forked, imported.

A session that a turn runs on is not changed: SessionBusy. A change is one script, and bears being sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

from policies.errors import BadRequest, SessionBusy, SessionExists, StoreUnavailable
from policies.truncation import is_head
from session_store import answers
from session_store.client import Call, ScriptClient
from session_store.files import EXPORT_VERSION, FileHead, FileItem, parse_line
from session_store.items import Item, parse_live, tombstone
from session_store.keys import check_session_id, load_keys, session_keys, tenant_keys
from session_store.reading import SessionReader, item_not_found, not_found
from session_store.records import SessionInfo

OLD_KEPT = 32
CHUNK_ITEMS = 200
_POLL_SECONDS = (0.02, 0.25)  # first and longest pause while waiting for a busy session
_Result = TypeVar("_Result")


def to_ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


async def when_free(deadline_seconds: float, work: Callable[[], Awaitable[_Result]]) -> _Result:
    """What ``work`` gives, asking again for up to so long while the session is busy; then SessionBusy."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_seconds
    pause_seconds, longest_seconds = _POLL_SECONDS
    while True:
        try:
            return await work()
        except SessionBusy:
            left_seconds = deadline - loop.time()
            if left_seconds <= 0:
                raise
        await asyncio.sleep(min(left_seconds, pause_seconds * random.uniform(0.5, 1.0)))
        pause_seconds = min(pause_seconds * 1.5, longest_seconds)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long an unused session is kept: each tenant's own time, else everybody's."""

    seconds: float
    of_tenant: Mapping[str, float]

    def ms(self, tenant: str) -> int:
        return to_ms(self.of_tenant.get(tenant, self.seconds))


class SessionChanger(SessionReader):
    """Sessions, changed outside of turns."""

    def __init__(self, client: ScriptClient, lifetimes: Lifetimes) -> None:
        super().__init__(client)
        self._lifetimes = lifetimes

    async def create_session(
        self,
        tenant: str,
        session_id: str,
        items: Sequence[Item] = (),
        *,
        kind: str = "session",
        metadata: Mapping[str, str] | None = None,
    ) -> SessionInfo:
        """Make a session, empty or with items. SessionExists."""
        said = orjson.dumps(dict(metadata or {}))
        await self._append(tenant, session_id, items, (kind, said), change=f"made-{uuid.uuid4().hex}")
        return await self.session_info(tenant, session_id)

    async def add_items(self, tenant: str, session_id: str, items: Sequence[Item], change: str) -> None:
        """Append items that are not there yet, all or none. ``change`` names it: the same one again adds nothing.

        SessionNotFound, SessionBusy.
        """
        await self._append(tenant, session_id, items, ("", b""), change)

    async def replace_item(self, tenant: str, session_id: str, item_id: str, body: Mapping[str, Any]) -> Item:
        """Let this body supersede the item's, in its place. It stays of its type, role and call, and its model's.

        SessionNotFound, ItemNotFound, SessionBusy, BadRequest.
        """
        while True:
            stored = await self.read_stored(tenant, session_id, item_id)
            before = Item.from_json(stored)
            item = replace(before, body=body, ids=None)
            if (item.type, item.role, item.call_id) != (before.type, before.role, before.call_id):
                raise BadRequest(f"{item_id} is a {before.role} {before.type} and stays one, of its call", param="type")
            if await self._change(tenant, session_id, item_id, item.to_json(), stored):
                return item  # else somebody has changed it since we read it

    async def delete_item(self, tenant: str, session_id: str, item_id: str) -> None:
        """Take one out of the history. SessionNotFound, ItemNotFound, SessionBusy."""
        await self._change(tenant, session_id, item_id, tombstone(item_id))

    async def delete_turn(self, tenant: str, session_id: str, turn_id: str) -> None:
        """Forget a turn; in a chain its items too, where no turn comes after it. SessionNotFound, SessionBusy."""
        call = Call("delete_turn", session_keys(tenant, session_id).all(), (turn_id, self._lifetimes.ms(tenant)))
        self._changed(tenant, session_id, (await self._client.run(call, confirmed=True))[0])

    async def set_metadata(self, tenant: str, session_id: str, metadata: Mapping[str, str]) -> SessionInfo:
        """Replace a session's metadata. SessionNotFound."""
        keys = session_keys(tenant, session_id)
        call = Call("set_metadata", keys.all(), (orjson.dumps(dict(metadata)), self._lifetimes.ms(tenant)))
        self._changed(tenant, session_id, (await self._client.run(call, confirmed=True))[0])
        return await self.session_info(tenant, session_id)

    async def fork_session(
        self, tenant: str, session_id: str, new_id: str, *, end: int | None = None, kind: str = "session"
    ) -> None:
        """A new session with the items before index ``end`` (None: all). SessionNotFound, SessionExists.

        What happens to either afterwards does not touch the other.
        """
        info = await self.session_info(tenant, session_id)
        items = self._items(tenant, session_id, info.items if end is None else end)
        await self._load(tenant, new_id, items, kind=kind, metadata=info.metadata)

    async def end_of_item(self, tenant: str, session_id: str, item_id: str) -> int:
        """The index behind an item, to fork there. SessionNotFound, ItemNotFound."""
        await self.session_info(tenant, session_id)
        key = session_keys(tenant, session_id).index
        (index,) = await self._client.read(lambda pipe: pipe.hget(key, item_id))
        if index is None:
            raise item_not_found(session_id, item_id)
        return int(index) + 1

    # -- files --------------------------------------------------------------------------

    async def export_session(self, tenant: str, session_id: str) -> AsyncIterator[bytes]:
        """JSON lines: the session, then its items, oldest first. SessionNotFound."""
        info = await self.session_info(tenant, session_id)
        head = {
            "export": EXPORT_VERSION,
            "session_id": session_id,
            "kind": info.kind,
            "metadata": dict(info.metadata),
            "created": info.created,
        }
        yield orjson.dumps(head, option=orjson.OPT_APPEND_NEWLINE)
        async for item in self._items(tenant, session_id, info.items):
            yield item.to_json() + b"\n"

    async def import_session(
        self,
        tenant: str,
        lines: Iterable[bytes],
        session_id: str | None = None,
        check: Callable[[Item], None] = lambda item: None,
    ) -> str:
        """Make the exported session again, under its own name or another. Returns the name.

        ``check`` raises BadRequest for an item that no API would take. SessionExists, BadRequest (with the line's
        number); nothing is visible before all of it is there.
        """
        source = iter(lines)
        head = parse_line(1, next(source, b""), FileHead)
        name = check_session_id(session_id or head.session_id)

        async def items() -> AsyncIterator[Item]:
            for number, line in enumerate(source, 2):
                if line.strip():
                    parse_line(number, line, FileItem)
                    try:
                        item = Item.from_json(line)
                        check(item)
                    except (BadRequest, ValueError) as error:
                        raise BadRequest(f"line {number}: {error}", param="file") from error
                    yield item

        created_ms = "" if head.created is None else str(to_ms(head.created))
        await self._load(tenant, name, items(), kind=head.kind, metadata=head.metadata, created_ms=created_ms)
        return name

    # -- inside -------------------------------------------------------------------------

    async def _append(
        self, tenant: str, session_id: str, items: Sequence[Item], new: tuple[str, bytes], change: str
    ) -> None:
        args = (change, self._lifetimes.ms(tenant), *new, *_triples(items))
        append = Call("append_items", session_keys(tenant, session_id).all(), args)
        answer, listed = await self._client.run(append, self._list_call(tenant, session_id), confirmed=True)
        self._changed(tenant, session_id, answer)
        answers.raise_refusal(listed)

    async def _change(self, tenant: str, session_id: str, item_id: str, data: bytes, stored: bytes = b"") -> bool:
        """False if what lies there is not ``stored``; without it the item is deleted, whatever it is."""
        args = (item_id, data, "" if stored else "1", OLD_KEPT, self._lifetimes.ms(tenant), stored)
        call = Call("change_item", session_keys(tenant, session_id).all(), args)
        (answer,) = await self._client.run(call, confirmed=True)
        if answers.status(answer) == "no item":
            raise item_not_found(session_id, item_id)
        self._changed(tenant, session_id, answer)
        return answers.status(answer) != "changed"

    async def _items(self, tenant: str, session_id: str, end: int) -> AsyncIterator[Item]:
        """SessionNotFound if it is deleted meanwhile: a part of it is not it."""
        key = session_keys(tenant, session_id).items
        for start in range(0, end, CHUNK_ITEMS):
            last = min(end, start + CHUNK_ITEMS) - 1
            data = await self._slice(key, start, last)
            if len(data) <= last - start:
                raise not_found(session_id)
            for item in parse_live(data):
                yield item

    async def _load(
        self,
        tenant: str,
        session_id: str,
        items: AsyncIterator[Item],
        *,
        kind: str,
        metadata: Mapping[str, str],
        created_ms: str = "",
    ) -> None:
        """Append chunk by chunk to keys that nobody looks at, then make a session of them."""
        load_id, ttl_ms = uuid.uuid4().hex, self._lifetimes.ms(tenant)
        loading = load_keys(tenant, session_id, load_id)
        at, chunk = 0, list[Item]()

        async def append() -> None:
            nonlocal at
            call = Call("load_items", loading, (at, ttl_ms, *_triples(chunk)))
            self._changed(tenant, session_id, (await self._client.run(call))[0])
            at += len(chunk)
            chunk.clear()

        try:
            async for item in items:
                chunk.append(item)
                if len(chunk) == CHUNK_ITEMS:
                    await append()
            await append()
            keys = (*session_keys(tenant, session_id).all(), *loading)
            args = (load_id, ttl_ms, kind, orjson.dumps(dict(metadata)), created_ms, at)
            answer, listed = await self._client.run(
                Call("open_session", keys, args), self._list_call(tenant, session_id), confirmed=True
            )
            self._changed(tenant, session_id, answer)
            answers.raise_refusal(listed)
        finally:  # what has not become the session's
            with contextlib.suppress(StoreUnavailable):  # else it lapses
                await asyncio.shield(self._client.read(lambda pipe: pipe.delete(*loading)))

    def _list_call(self, tenant: str, session_id: str) -> Call:
        return Call("list_session", tenant_keys(tenant).all(), (session_id, self._lifetimes.ms(tenant)))

    def _changed(self, tenant: str, session_id: str, answer: Any) -> None:
        """Nothing, or the error that the script's answer means."""
        answers.raise_refusal(answer)
        match answers.status(answer):
            case "missing":
                raise not_found(session_id)
            case "exists":
                raise SessionExists(f"there is a session {session_id} already", param="session_id")
            case "busy":
                raise answers.busy(session_id, answer)
            case "twice":
                raise BadRequest(f"the item id {answer[1].decode()} is there twice", param="file")
            case "lost":
                raise StoreUnavailable(
                    f"what was loaded of {session_id} has lapsed: try again", retry_after_seconds=1.0
                )


def _triples(items: Sequence[Item]) -> list[Any]:
    return [value for item in items for value in triple(item)]


def triple(item: Item) -> tuple[str, str, bytes]:
    """An item as the scripts take it: its id, "1" if it belongs into every prompt, its JSON."""
    return item.item_id, "1" if is_head(item.view()) else "", item.to_json()
