"""Owns /v1/conversations: sessions as OpenAI's Conversations API has them, and two things it has not: edit and fork."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.intake import parse_object, read_body, validate
from orchestrator.api.items import read_item, read_items, shown, shown_list
from orchestrator.config import Config
from orchestrator.messages import to_items
from policies.errors import BadRequest
from session_store.changing import when_free
from session_store.files import Pairs
from session_store.items import Item
from session_store.keys import is_session_id
from session_store.records import SessionInfo
from session_store.store import SessionStore

_Result = TypeVar("_Result")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


_Body = TypeVar("_Body", bound=Body)


class Create(Body):
    items: list[Any] = Field(default_factory=list)
    metadata: Pairs = Field(default_factory=dict)


class Update(Body):
    metadata: Pairs


class AddItems(Body):
    items: list[Any] = Field(min_length=1)


class Fork(Body):
    after: str | None = None  # the last item to take along; none: all of them


class Page(Body):
    """The parameters of a list."""

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    include: list[str] = Field(default_factory=list)


class ConversationsRoute:
    """The routes' handlers and what they need."""

    def __init__(self, config: Config, store: SessionStore) -> None:
        self._config = config
        self._store = store

    async def create(self, request: Request, tenant: str) -> dict[str, Any]:
        body = await self._body(request, Create)
        items = self._items(body.items)
        name = f"conv_{uuid.uuid4().hex}"
        info = await self._store.create_session(tenant, name, items, kind="conversation", metadata=body.metadata)
        return conversation(info)

    async def read(self, tenant: str, name: str) -> dict[str, Any]:
        return conversation(await self._store.session_info(tenant, check_name(name)))

    async def update(self, request: Request, tenant: str, name: str) -> dict[str, Any]:
        body = await self._body(request, Update)
        return conversation(await self._store.set_metadata(tenant, check_name(name), body.metadata))

    async def delete(self, tenant: str, name: str) -> dict[str, Any]:
        await self._store.delete_session(tenant, check_name(name))
        return {"id": name, "object": "conversation.deleted", "deleted": True}

    async def fork(self, request: Request, tenant: str, name: str) -> dict[str, Any]:
        body = await self._body(request, Fork)
        check_name(name)
        end = None if body.after is None else await self._store.end_of_item(tenant, name, body.after)
        new = f"conv_{uuid.uuid4().hex}"
        await self._store.fork_session(tenant, name, new, end=end, kind="conversation")
        return conversation(await self._store.session_info(tenant, new))

    async def add(self, request: Request, tenant: str, name: str) -> dict[str, Any]:
        body = await self._body(request, AddItems)
        check_name(name)
        change = uuid.uuid4().hex
        items = self._items(body.items, change)
        await self._when_free(lambda: self._store.add_items(tenant, name, items, change))
        return shown_list(await self._store.read_named(tenant, name, [item.item_id for item in items]), more=False)

    async def items(self, request: Request, tenant: str, name: str) -> dict[str, Any]:
        asked = page_of(request)
        page = await self._store.read_page(
            tenant, check_name(name), asked.after, asked.limit, newest_first=asked.order == "desc"
        )
        return shown_list(page.items, more=page.more)

    async def item(self, tenant: str, name: str, item_id: str) -> dict[str, Any]:
        return shown(await self._store.read_item(tenant, check_name(name), item_id))

    async def replace(self, request: Request, tenant: str, name: str, item_id: str) -> dict[str, Any]:
        """PUT: the item supersedes the one of this id, in its place."""
        said = parse_object(await read_body(request, int(self._config.http.max_body)))
        new = read_item({**said, "id": item_id}, int(self._config.sessions.max_item))
        check_name(name)
        return shown(await self._when_free(lambda: self._store.replace_item(tenant, name, item_id, new.body)))

    async def remove(self, tenant: str, name: str, item_id: str) -> dict[str, Any]:
        await self._when_free(lambda: self._store.delete_item(tenant, check_name(name), item_id))
        return await self.read(tenant, name)

    # -- inside ----------------------------------------------------------------------

    async def _body(self, request: Request, kind: type[_Body]) -> _Body:
        return validate(kind, parse_object(await read_body(request, int(self._config.http.max_body))), {})

    def _items(self, said: list[Any], change: str | None = None) -> list[Item]:
        new, references = read_items(said, "items", int(self._config.sessions.max_item))
        if references:
            raise BadRequest("items: an item_reference is for the input of a response", param="items")
        return to_items(new, change or uuid.uuid4().hex, time.time())

    async def _when_free(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Do it once no turn runs; SessionBusy after as long as a turn would wait."""
        return await when_free(self._config.http.busy_session_seconds, work)


def page_of(request: Request) -> Page:
    """The query of a list; BadRequest."""
    asked: dict[str, Any] = dict(request.query_params)
    limit = asked.get("limit", "")
    if limit.isascii() and limit.isdecimal() and len(limit) < 10:
        asked["limit"] = int(limit)
    include = request.query_params.getlist("include") + request.query_params.getlist("include[]")
    asked = {name: value for name, value in asked.items() if name not in ("include", "include[]")}
    return validate(Page, asked | ({"include": include} if include else {}), {})


def conversation(info: SessionInfo) -> dict[str, Any]:
    return {
        "id": info.session_id,
        "object": "conversation",
        "created_at": int(info.created),
        "metadata": dict(info.metadata),
    }


def check_name(name: str) -> str:
    if not is_session_id(name):
        raise BadRequest(f"{name[:140]!r} is no conversation id", param="conversation")
    return name
