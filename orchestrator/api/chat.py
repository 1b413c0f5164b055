"""Owns POST /v1/chat/completions: from a body to an Ask, from a turn's events to JSON or server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError

from engine.protocol import TokenLogprob
from orchestrator.api.wire import ChatRequest, Message, drop_switched_off, explain_invalid, refuse_unsupported
from orchestrator.config import Config, TenantConfig
from orchestrator.metrics import GatewayMetrics
from orchestrator.progress import Progress
from orchestrator.turn import Ask, Done, Event, Piece, Started, TurnRunner
from policies.errors import BadRequest, BodyTooLarge, ModelNotFound, OrchestratorError

KEEPALIVE_SECONDS = 2.0
REQUEST_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")
_END = object()
PIN_SECONDS = 86_400.0  # of prompt_cache_retention "24h"


class ChatRoute:
    """The route's handler and what it needs."""

    def __init__(self, config: Config, runner: TurnRunner, metrics: GatewayMetrics) -> None:
        self._config = config
        self._runner = runner
        self._metrics = metrics
        self._models = {name: model for model in config.models for name in (model.name, *model.aliases)}

    async def answer(self, request: Request, tenant: TenantConfig) -> Response:
        """One chat completion, streamed or whole."""
        raw = await _read(request, int(self._config.http.max_body))
        body = _parse(raw)
        ask = self._ask(body, raw, request.headers, tenant)
        progress = Progress(arrival=ask.arrival)
        call = _Call(ask, body, progress, self._count)
        events = self._watched(self._runner.run(ask, progress), ask)
        if body.stream:
            return await call.stream(events, self._config.http.stream_hold_seconds)
        return await call.whole(events)

    # -- in -------------------------------------------------------------------------

    def _ask(self, body: ChatRequest, raw: bytes, headers: Mapping[str, str], tenant: TenantConfig) -> Ask:
        model = self._models.get(body.model)
        if model is None:
            raise ModelNotFound(f"the model {body.model!r} does not exist; {self._hint(body.model)}", param="model")
        session_id = _session_id(body, headers)
        key = headers.get("idempotency-key")
        _check_together(body, session_id, key)
        limit = body.answer_limit
        if limit is not None and limit >= model.max_model_len:
            raise BadRequest(
                f"max_tokens {limit} leaves no room for a prompt in a window of {model.max_model_len} tokens",
                param="max_tokens",
            )
        return Ask(
            tenant=tenant,
            model=model,
            messages=tuple(_template_message(message) for message in body.messages),
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop=body.stops,
            max_tokens=limit,
            top_k=max(0, body.top_k),
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=tuple(body.logit_bias.items()),
            min_tokens=body.min_tokens,
            logprobs=body.alternatives,
            n=body.n,
            session_id=session_id,
            idempotency_key=key,
            fingerprint=_fingerprint(raw) if key is not None else None,
            keep_alive_seconds=body.keep_alive_seconds,
            pin_seconds=_pin_seconds(body, session_id, tenant),
        )

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._models, n=1)
        return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self._models)}"

    # -- counting --------------------------------------------------------------------

    async def _watched(self, events: AsyncGenerator[Event], ask: Ask) -> AsyncGenerator[Event]:
        self._metrics.running.inc()
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._metrics.running.dec()

    def _count(self, ask: Ask, event: Event, progress: Progress) -> None:
        model, tenant = ask.model.name, ask.tenant.name
        if isinstance(event, Started) and event.replayed_turn is None:
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


class _Call:
    """One answer being written."""

    def __init__(self, ask: Ask, body: ChatRequest, progress: Progress, count: Any) -> None:
        self._ask = ask
        self._body = body
        self._progress = progress
        self._count = count
        self._started: Started | None = None
        self._created = int(ask.arrival)
        self._id = f"chatcmpl-{ask.turn_id}"

    async def whole(self, events: AsyncGenerator[Event]) -> Response:
        started, done = None, None
        texts: list[list[str]] = [[] for _ in range(self._ask.n)]
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(self._ask.n)]
        async with contextlib.aclosing(events):
            async for event in events:
                self._count(self._ask, event, self._progress)
                match event:
                    case Started():
                        started = event
                        self._begin(event)
                    case Piece():
                        texts[event.index].append(event.text)
                        logprobs[event.index] += event.logprobs
                    case Done():
                        done = event
        assert done is not None
        body = {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
                    "logprobs": self._logprobs(logprobs[index]),
                    "finish_reason": reason,
                }
                for index, reason in enumerate(done.finish_reasons)
            ],
            "usage": _usage(done),
        }
        return Response(orjson.dumps(body), media_type="application/json", headers=self._headers(started, done))

    async def stream(self, events: AsyncGenerator[Event], hold_seconds: float) -> Response:
        """No header leaves before the first token or the hold; until then a failure has its true status code."""
        first = asyncio.ensure_future(anext(events, _END))
        try:
            await asyncio.wait({first}, timeout=hold_seconds)
        except asyncio.CancelledError:
            await _abandon(first, events)
            raise
        head = first.result() if first.done() else None  # raises the true error
        started = head if isinstance(head, Started) else None
        return StreamingResponse(
            self._sse(first, events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", **self._headers(started)},
        )

    async def _sse(self, first: asyncio.Future[Any], events: AsyncGenerator[Event]) -> AsyncIterator[bytes]:
        pending = first
        try:
            if not first.done():
                yield self._comment()
            while True:
                done, _ = await asyncio.wait({pending}, timeout=KEEPALIVE_SECONDS)
                if not done:
                    yield self._comment()
                    continue
                event = pending.result()
                if event is _END:
                    return
                self._count(self._ask, event, self._progress)
                for chunk in self._chunks(event):
                    yield chunk
                pending = asyncio.ensure_future(anext(events, _END))
        except OrchestratorError as error:  # after the headers: one error event, and nothing that looks like success
            yield b"data: " + orjson.dumps(error.envelope()) + b"\n\n"
        finally:
            await _abandon(pending, events)

    def _begin(self, event: Started) -> None:
        """A replayed answer keeps the id it had."""
        self._started = event
        if event.replayed_turn is not None:
            self._id = f"chatcmpl-{event.replayed_turn}"

    def _comment(self) -> bytes:
        waited = time.time() - self._ask.arrival
        return f": {self._progress.state}; model {self._ask.model.name}; waited {waited:.1f} s\n\n".encode()

    def _chunks(self, event: Event) -> list[bytes]:
        match event:
            case Started():
                self._begin(event)
                return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._ask.n)]
            case Piece():
                return [self._chunk(event.index, {"content": event.text}, logprobs=self._logprobs(event.logprobs))]
            case Done():
                chunks = [self._chunk(index, {}, reason) for index, reason in enumerate(event.finish_reasons)]
                if self._include_usage:
                    usage = {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(event)}
                    chunks.append(_data(usage))
                # the whole timing, as a comment: the headers left before most of it had happened
                timing = f": server-timing {self._timing(self._started, event)}\n\n" if self._started else ""
                return [timing.encode(), *chunks, b"data: [DONE]\n\n"]

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        body = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return _data(body)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._ask.logprobs is None:
            return None
        content = [{**_scored(token), "top_logprobs": [_scored(other) for other in token.top]} for token in tokens]
        return {"content": content, "refusal": None}

    @property
    def _include_usage(self) -> bool:
        return self._body.stream_options is not None and self._body.stream_options.include_usage

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._ask.model.name,
            "system_fingerprint": None,
        }

    def _headers(self, started: Started | None, done: Done | None = None) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self._ask.session_id is not None:
            headers["X-Session-ID"] = self._ask.session_id
        truncation = self._progress.truncation if started is None else started.truncation
        if truncation is not None and truncation.cut:
            headers["X-Context-Truncated"] = truncation.header()
        if started is not None:
            headers["Server-Timing"] = self._timing(started, done)
            if started.replayed_turn is not None:
                headers["X-Idempotent-Replayed"] = "true"
        return headers

    def _timing(self, started: Started, done: Done | None) -> str:
        """Milliseconds: waiting for the model, in the engine's queue, prefill, decode."""
        usage = (done.usage if done is not None else None) or started.first
        parts = {"load": started.load_seconds}
        if usage is not None:
            parts |= {"queue": usage.queue_seconds, "prefill": usage.prefill_seconds}
            if done is not None:
                parts["decode"] = usage.decode_seconds
        return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in parts.items())


async def _abandon(pending: asyncio.Future[Any], events: AsyncGenerator[Event]) -> None:
    """End a turn nobody reads any more."""
    pending.cancel()
    with contextlib.suppress(asyncio.CancelledError, OrchestratorError, StopAsyncIteration):
        await pending
    await events.aclose()


async def _read(request: Request, most_bytes: int) -> bytes:
    """The body, as long as it is no longer than ``most_bytes``."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > most_bytes:
            raise BodyTooLarge(f"the body is larger than {most_bytes} bytes, the limit of this service")
    return bytes(raw)


def _parse(raw: bytes) -> ChatRequest:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    refuse_unsupported(body)
    try:
        return ChatRequest.model_validate(drop_switched_off(body))
    except ValidationError as error:
        raise explain_invalid(error.errors()) from error


def _session_id(body: ChatRequest, headers: Mapping[str, str]) -> str | None:
    # some proxies and frameworks write header names with underscores
    header = next((v for name, v in headers.items() if name.lower().replace("_", "-") == "x-session-id"), None)
    if header is not None and body.session_id is not None and header != body.session_id:
        raise BadRequest(
            f"X-Session-ID {header!r} and session_id {body.session_id!r} differ: send one", param="session_id"
        )
    return header if header is not None else body.session_id


def _check_together(body: ChatRequest, session_id: str | None, key: str | None) -> None:
    """BadRequest for wishes that are fine alone."""
    if key is not None and session_id is None:
        raise BadRequest(
            "Idempotency-Key needs a session: send X-Session-ID too, or leave it out", param="Idempotency-Key"
        )
    if session_id is not None and body.n > 1:
        raise BadRequest(
            f"n {body.n} with a session: a turn has one answer, which the next turn builds on; "
            "ask without the session, or with n 1",
            param="n",
        )
    if key is not None and body.logprobs:
        raise BadRequest(
            "logprobs with an Idempotency-Key: the reply stored for a retry has no log probabilities; "
            "leave out one of the two",
            param="logprobs",
        )


def _pin_seconds(body: ChatRequest, session_id: str | None, tenant: TenantConfig) -> float:
    """How long the session's KV is to be evicted last; BadRequest where nothing could be kept."""
    if body.prompt_cache_retention == "in_memory":
        return 0.0
    name = "prompt_cache_retention"
    if session_id is None:
        raise BadRequest(f"{name} {body.prompt_cache_retention!r} needs a session: send X-Session-ID too", param=name)
    if not tenant.kv_pin:
        raise BadRequest(
            f"{name} {body.prompt_cache_retention!r}: tenant {tenant.name} has no kv_pin in the config", param=name
        )
    return PIN_SECONDS


def _template_message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.text()}
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    return plain


def _fingerprint(raw: bytes) -> str:
    """Of what the request asks, however it is to be delivered."""
    body = orjson.loads(raw)
    for name in ("stream", "stream_options"):
        body.pop(name, None)
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _scored(token: TokenLogprob) -> dict[str, Any]:
    raw = None if token.raw is None else list(token.raw)
    return {"token": token.text, "logprob": token.logprob, "bytes": raw}


def _usage(done: Done) -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def request_id_of(request: Request, fallback: str) -> str:
    """The client's X-Request-ID if it is a plain one."""
    offered = request.headers.get("x-request-id", "")
    return offered if REQUEST_ID.match(offered) else fallback
