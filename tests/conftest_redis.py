"""Fixtures around a real Redis or Valkey: one private server for the whole run, emptied before each test."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import redis

from policies.errors import StoreUnavailable
from session_store.embedded import EmbeddedRedis, find_server
from session_store.items import Item, message
from session_store.records import Begun, Replay
from session_store.store import SessionStore

LIMITS = {"owner": "gateway-1", "reserve_tokens": 100, "max_concurrent": 8, "max_reserved_tokens": 10_000}
Begin = Callable[..., Awaitable[Begun | Replay]]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A running private server. Skips where none is installed, but fails in CI."""
    require_server()
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


def require_server() -> None:
    try:
        find_server()
    except StoreUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(error.message)


@pytest.fixture
def raw(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    """An independent plain client on the emptied server: what is really stored."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
async def store(redis_server: EmbeddedRedis, raw: redis.Redis) -> AsyncIterator[SessionStore]:
    session_store = SessionStore(redis_server.url)
    yield session_store
    await session_store.close()


def said(turn_id: str, *pairs: tuple[str, str]) -> list[Item]:
    """Items of one turn from (role, content) pairs."""
    return [
        Item(f"{turn_id}.{n}", turn_id, 1.5e9 + n, message(role, content)) for n, (role, content) in enumerate(pairs)
    ]


async def begin(store: SessionStore, tenant: str, session_id: str, turn_id: str, **more: object) -> Begun:
    """``begin_turn`` that must be granted."""
    begun = await store.begin_turn(tenant, session_id, turn_id, **{**LIMITS, **more})  # type: ignore[arg-type]
    assert isinstance(begun, Begun)
    return begun


async def take_turn(store: SessionStore, tenant: str, session_id: str, turn_id: str, **more: object) -> int:
    """A whole turn: one user and one assistant item."""
    begun = await begin(store, tenant, session_id, turn_id, **more)
    items = said(turn_id, ("user", f"question {turn_id}"), ("assistant", f"answer {turn_id}"))
    return await store.commit_turn(begun, items, {"reason": ""}, {"finish_reason": "stop"}, 10, goes_on=True)


def contents(items: tuple[Item, ...]) -> list[str]:
    return [item.text for item in items]


class Wire:
    """A proxy in front of Redis that counts round trips and can lose answers."""

    def __init__(self) -> None:
        self.url = ""
        self.round_trips = 0
        self.lose_answers = 0  # deliver this many requests, then cut the line instead of answering
        self.hold_answers = asyncio.Event()  # cleared: answers wait
        self.hold_answers.set()
        self.delay_seconds = 0.0  # before each answer
        self._asked = False

    async def _serve(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_redis_reader, to_redis = await asyncio.open_connection(host, port)
        there = asyncio.create_task(self._requests(reader, to_redis))
        try:
            while data := await to_redis_reader.read(1 << 16):
                self._asked = False
                await self.hold_answers.wait()
                await asyncio.sleep(self.delay_seconds)
                if self.lose_answers:
                    self.lose_answers -= 1
                    break
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            there.cancel()
            to_redis.close()
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, to_redis: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.round_trips += not self._asked
            self._asked = True
            to_redis.write(data)
            await to_redis.drain()
        to_redis.close()


@asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[Wire]:
    """A Wire in front of the server of ``url``."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    wire = Wire()
    running: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        await wire._serve(host, port, reader, writer)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    wire.url = url.replace(f":{port}/", f":{listener.sockets[0].getsockname()[1]}/")
    try:
        yield wire
    finally:
        listener.close()
        wire.hold_answers.set()
        await asyncio.gather(*running, return_exceptions=True)
