"""Owns how a turn's events reach a client: whole or as server-sent events, with true status codes and headers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any

import orjson
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.protocol import TokenLogprob
from orchestrator.asks import Ask, Called, Done, Event, Piece, Started
from orchestrator.detached import start_detached
from orchestrator.logs import note_bug
from orchestrator.metrics import GatewayMetrics
from orchestrator.progress import Progress
from orchestrator.ray_errors import client_left
from policies.errors import OrchestratorError

KEEPALIVE_SECONDS = 2.0
_END = object()

Count = Callable[[Ask, Event, Progress], None]


class Counting:
    """What the metrics hear of turns."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    async def watched(self, events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        self._metrics.running.inc()
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._metrics.running.dec()

    def count(self, ask: Ask, event: Event, progress: Progress) -> None:
        model, tenant = ask.model.name, ask.tenant.name
        if isinstance(event, Started) and event.replay is None:
            start = "switched" if progress.load_seconds > 0 else "resident"
            self._metrics.ttft_seconds.labels(model, start).observe(time.time() - ask.arrival)
            if event.first is not None:
                self._metrics.queue_seconds.labels(model, tenant).observe(event.first.queue_seconds)
            if event.truncation is not None and event.truncation.cut:
                self._metrics.truncated_turns.labels(model).inc()
        if isinstance(event, Done) and event.usage is not None:
            self._metrics.prompt_tokens.labels(model, tenant).inc(event.prompt_tokens)
            self._metrics.cached_tokens.labels(model, tenant).inc(event.cached_tokens)
            self._metrics.completion_tokens.labels(model, tenant).inc(event.completion_tokens)


class Delivery(ABC):
    """One answer being written. A route says what its bodies and its chunks look like."""

    def __init__(self, ask: Ask, progress: Progress, count: Count) -> None:
        self.ask = ask
        self._progress = progress
        self._count = count
        self.started: Started | None = None
        self.texts: list[str] = [""] * ask.n
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in range(ask.n)]
        self.called: Called | None = None

    @abstractmethod
    def body(self, done: Done) -> dict[str, Any]:
        """The whole answer; texts, logprobs and called are complete."""

    @abstractmethod
    def chunks(self, event: Event) -> list[bytes]:
        """What a stream says of one event."""

    @abstractmethod
    def failure(self, error: OrchestratorError) -> bytes:
        """What a stream says of an error after its headers have gone: nothing that looks like success."""

    async def whole(self, events: AsyncGenerator[Event]) -> Response:
        done = None
        async with contextlib.aclosing(events):
            async for event in events:
                self._take(event)
                if isinstance(event, Done):
                    done = event
        assert done is not None
        return Response(orjson.dumps(self.body(done)), media_type="application/json", headers=self._headers(done))

    async def stream(self, events: AsyncGenerator[Event], hold_seconds: float) -> Response:
        """No header leaves before the first token or the hold; until then a failure has its true status code."""
        reading = _Reading(events)
        try:
            await asyncio.wait({reading.next}, timeout=hold_seconds)
        except asyncio.CancelledError:
            start_detached(reading.abandon())
            raise
        head = reading.next.result() if reading.next.done() else None  # raises the true error
        self.started = head if isinstance(head, Started) else None
        headers = {"Cache-Control": "no-cache", **self._headers()}
        return _EventStream(self._sse(reading), reading.abandon, headers)

    def timing(self, done: Done | None) -> str:
        """Milliseconds: waiting for the model, in the engine's queue, prefill, decode."""
        if self.started is None:
            return ""
        usage = (done.usage if done is not None else None) or self.started.first
        parts = {"load": self.started.load_seconds}
        if usage is not None:
            parts |= {"queue": usage.queue_seconds, "prefill": usage.prefill_seconds}
            if done is not None:
                parts["decode"] = usage.decode_seconds
        return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in parts.items())

    def _take(self, event: Event) -> None:
        self._count(self.ask, event, self._progress)
        match event:
            case Started():
                self.started = event
            case Piece():
                self.texts[event.index] += event.text
                self.logprobs[event.index] += event.logprobs
            case Called():
                self.called = event

    async def _sse(self, reading: _Reading) -> AsyncIterator[bytes]:
        try:
            if not reading.next.done():
                yield self._comment()
            while True:
                done, _ = await asyncio.wait({reading.next}, timeout=KEEPALIVE_SECONDS)
                if not done:
                    yield self._comment()
                    continue
                event = reading.next.result()
                if event is _END:
                    return
                self._take(event)
                for chunk in self.chunks(event):
                    yield chunk
                reading.go_on()
        except OrchestratorError as error:
            yield self.failure(error)
        except Exception as error:  # noqa: BLE001 — boundary: a bug must not look like the end of an answer
            if not client_left(error):
                note_bug(error, turn=self.ask.turn_id)
            yield self.failure(OrchestratorError(f"internal error in {self.ask.turn_id}: {type(error).__name__}"))

    def _comment(self) -> bytes:
        waited = time.time() - self.ask.arrival
        return f": {self._progress.state}; model {self.ask.model.name}; waited {waited:.1f} s\n\n".encode()

    def _headers(self, done: Done | None = None) -> dict[str, str]:
        headers: dict[str, str] = {}
        started = self.started
        session_id = started.session_id if started is not None else self.ask.place and self.ask.place.session_id
        if session_id:
            headers["X-Session-ID"] = session_id
        truncation = self._progress.truncation if started is None else started.truncation
        if truncation is not None and truncation.cut:
            headers["X-Context-Truncated"] = truncation.header()
        if started is not None:
            headers["Server-Timing"] = self.timing(done)
            if started.replay is not None:
                headers["X-Idempotent-Replayed"] = "true"
        return headers


class _Reading:
    """A turn's events, the next one asked for already, so that waiting for it can be interrupted."""

    def __init__(self, events: AsyncGenerator[Event]) -> None:
        self._events = events
        self.go_on()

    def go_on(self) -> None:
        self.next: asyncio.Future[Any] = asyncio.ensure_future(anext(self._events, _END))

    async def abandon(self) -> None:
        """End a turn nobody reads any more."""
        if not self.next.done():  # else its outcome has been heard
            self.next.cancel()
            with contextlib.suppress(asyncio.CancelledError, OrchestratorError, StopAsyncIteration):
                await self.next
        await self._events.aclose()


class _EventStream(StreamingResponse):
    """Server-sent events whose source is ended however the sending ends.

    A client may leave while a chunk is sent, or the headers are: Starlette then drops the source where it stands, and
    its ``finally`` would wait for a garbage collection. Detached: the request that left is being cancelled.
    """

    def __init__(
        self, chunks: AsyncIterator[bytes], end: Callable[[], Coroutine[Any, Any, None]], headers: Any
    ) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            start_detached(self._end())
