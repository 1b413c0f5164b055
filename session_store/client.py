"""Owns the connection to Redis: scripts in one pipeline, NOSCRIPT fallback, one retry, and what a failure
is called.

Every script is idempotent by turn id. That is why an ambiguous failure (sent, no answer) is simply tried
once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from policies.errors import NotReachable, StoreUnavailable

MAX_CONNECTIONS = 64
_AMBIGUOUS = (redis_errors.ConnectionError, redis_errors.TimeoutError)
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Call:
    """One script with its keys and arguments, as its header in ``lua/`` lists them."""

    script: str
    keys: tuple[str, ...]
    args: tuple[Any, ...]


@cache
def _source(script: str) -> tuple[str, str]:
    """(text, sha1) of ``lua/<script>.lua``."""
    text = (files("session_store") / "lua" / f"{script}.lua").read_text(encoding="utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def describe(error: redis_errors.RedisError, where: str) -> StoreUnavailable:
    """One clear sentence for whatever Redis or the way to it said."""
    text = str(error)
    if isinstance(error, redis_errors.AuthenticationError):
        said = f"refused our password ({text})"
    elif isinstance(error, redis_errors.TimeoutError):
        said = "did not answer in time"
    elif isinstance(error, redis_errors.BusyLoadingError):
        said = "is still loading its data"
    elif isinstance(error, redis_errors.ConnectionError):
        said = f"cannot be reached ({text})"
    elif isinstance(error, redis_errors.OutOfMemoryError) or "OOM " in text:
        said = "is full (maxmemory): nothing was written; raise maxmemory or delete sessions"
    elif isinstance(error, redis_errors.ReadOnlyError) or "READONLY " in text:
        said = "is a read-only replica: nothing was written; point the store at the primary"
    else:
        said = f"refused a command: {text}"
    return StoreUnavailable(f"Redis at {where} {said}", retry_after_seconds=1.0)


def check_reachable(url: str) -> None:
    """One blocking PING, before anything is started on this server; NotReachable says what is wrong."""
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=3, socket_timeout=3) as client:
            client.ping()
    except (redis_errors.RedisError, ValueError) as error:
        where = url.rsplit("@", 1)[-1]  # never the password
        raise NotReachable(f"Redis at {where} is not reachable: {error}") from error


class ScriptClient:
    """A pool of connections that runs scripts and plain reads. Close it with ``close()``."""

    def __init__(self, url: str, command_timeout_seconds: float) -> None:
        parts = urlsplit(url)
        self.where = f"{parts.hostname}:{parts.port or 6379}"  # never the password
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=command_timeout_seconds,
            socket_timeout=command_timeout_seconds,
            socket_connect_timeout=command_timeout_seconds,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._redis = Redis.from_pool(pool)
        self.round_trips = 0  # so far

    async def run(self, *calls: Call) -> list[Any]:
        """Answers of the scripts, in one round trip; a refused one is a StoreUnavailable *in* the list.

        Raises StoreUnavailable when no answer came, twice.
        """
        answers = await self._twice(lambda: self._send(calls))
        return [
            describe(answer, self.where) if isinstance(answer, redis_errors.RedisError) else answer
            for answer in answers
        ]

    async def read(self, build: Callable[[Pipeline], object]) -> list[Any]:
        """Answers of the plain commands that ``build`` puts on a pipeline; they must bear repeating."""

        async def send() -> list[Any]:
            pipe = self._redis.pipeline(transaction=False)
            build(pipe)
            self.round_trips += 1
            return await pipe.execute()

        return await self._twice(send)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _send(self, calls: tuple[Call, ...]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(_source(call.script)[1], len(call.keys), *call.keys, *call.args)
        self.round_trips += 1
        answers = await pipe.execute(raise_on_error=False)
        missing = [i for i, answer in enumerate(answers) if isinstance(answer, redis_errors.NoScriptError)]
        if missing:  # EVAL also loads the script, so this happens once per server start
            for i in missing:
                call = calls[i]
                pipe.eval(_source(call.script)[0], len(call.keys), *call.keys, *call.args)
            for i, answer in zip(missing, await pipe.execute(raise_on_error=False), strict=True):
                answers[i] = answer
        return answers

    async def _twice(self, attempt: Callable[[], Awaitable[_Answer]]) -> _Answer:
        try:
            try:
                return await attempt()
            except redis_errors.AuthenticationError:
                raise
            except _AMBIGUOUS:
                return await attempt()
        except redis_errors.RedisError as error:
            raise describe(error, self.where) from error
