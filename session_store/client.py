"""Owns the connection to Redis: scripts in one pipeline, NOSCRIPT fallback, one retry, and what a failure
is called.

Every script is idempotent by turn id. That is why an ambiguous failure (sent, no answer) is simply tried
once more.
"""

from __future__ import annotations

import hashlib
import time
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
CONFIRM_MS = 1_000  # that the key lives which is written to be confirmed
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
    """A pool of connections that runs scripts and plain reads. Close it with ``close()``.

    Args:
        replicas: so many must have what a confirmed script wrote, before it counts as done.
        observe: hears the seconds of every round trip.
    """

    def __init__(
        self,
        url: str,
        command_timeout_seconds: float,
        replicas: int = 0,
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
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
        self._replicas = replicas
        self._wait_ms = int(command_timeout_seconds * 1000 / 2)
        self._observe = observe
        self.round_trips = 0  # so far

    async def run(self, *calls: Call, confirmed: bool = False) -> list[Any]:
        """Answers of the scripts, in one round trip; a refused one is a StoreUnavailable *in* the list.

        Raises StoreUnavailable when no answer came, twice, or the replicas did not confirm.
        """
        wait = confirmed and self._replicas > 0
        *answers, replicas = await self._twice(lambda: self._send(calls, wait=wait))
        if any(isinstance(answer, redis_errors.ReadOnlyError) for answer in answers):
            # the server we know has been made a replica: its name may lead to another one by now
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            *answers, replicas = await self._twice(lambda: self._send(calls, wait=wait))
        if wait:
            self._check_confirmed(replicas)
        return [
            describe(answer, self.where) if isinstance(answer, redis_errors.RedisError) else answer
            for answer in answers
        ]

    async def read(self, build: Callable[[Pipeline], object]) -> list[Any]:
        """Answers of the plain commands that ``build`` puts on a pipeline; they must bear repeating."""

        async def send() -> list[Any]:
            pipe = self._redis.pipeline(transaction=False)
            build(pipe)
            return await self._trip(pipe)

        return await self._twice(send)

    async def confirm(self, key: str) -> None:
        """Wait until the replicas have all that this key's server has written so far. StoreUnavailable."""

        def build(pipe: Pipeline) -> None:
            pipe.set(key, b"1", px=CONFIRM_MS)  # a server tells how far replicas are with what this connection wrote
            self._ask_to_wait(pipe)

        if self._replicas > 0:
            self._check_confirmed((await self.read(build))[-1])

    async def close(self) -> None:
        await self._redis.aclose()

    async def _send(self, calls: tuple[Call, ...], *, wait: bool) -> list[Any]:
        """The answers, and how many replicas have what they wrote."""
        pipe = self._redis.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(_source(call.script)[1], len(call.keys), *call.keys, *call.args)
        if wait:
            self._ask_to_wait(pipe)
        answers = await self._trip(pipe, raise_on_error=False)
        if not wait:
            answers.append(0)
        missing = [i for i, answer in enumerate(answers) if isinstance(answer, redis_errors.NoScriptError)]
        if missing:  # EVAL also loads the script, so this happens once per server start
            for i in missing:
                call = calls[i]
                pipe.eval(_source(call.script)[0], len(call.keys), *call.keys, *call.args)
            if wait:
                self._ask_to_wait(pipe)
            again = await self._trip(pipe, raise_on_error=False)
            for i, answer in zip([*missing, *([len(calls)] if wait else [])], again, strict=True):
                answers[i] = answer
        return answers

    def _ask_to_wait(self, pipe: Pipeline) -> None:
        pipe.execute_command("WAIT", self._replicas, self._wait_ms)

    def _check_confirmed(self, replicas: Any) -> None:
        if not isinstance(replicas, int) or replicas < self._replicas:
            raise StoreUnavailable(
                f"Redis at {self.where}: {replicas} of {self._replicas} replicas (redis.replicas) have confirmed the "
                f"write within {self._wait_ms / 1000:g} s; it is lost if the primary is lost now: send it again",
                retry_after_seconds=1.0,
            )

    async def _trip(self, pipe: Pipeline, *, raise_on_error: bool = True) -> list[Any]:
        begin = time.perf_counter()
        self.round_trips += 1
        try:
            answers: list[Any] = await pipe.execute(raise_on_error=raise_on_error)
            return answers
        finally:
            self._observe(time.perf_counter() - begin)

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
