"""Owns POST /v1/chat/completions: from a body to an Ask, from a turn's events to JSON or chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from engine.protocol import TokenLogprob
from orchestrator.api.delivery import Count, Counting, Delivery
from orchestrator.api.intake import Models, fingerprint, most_calls, parse_object, pin_seconds, read_body, validate
from orchestrator.api.wire import UNSUPPORTED, ChatRequest, Message
from orchestrator.asks import Ask, Called, Done, Event, Piece, Place, Started
from orchestrator.config import Config, TenantConfig
from orchestrator.messages import NewItem, bodies
from orchestrator.metrics import GatewayMetrics
from orchestrator.progress import Progress
from orchestrator.turn import TurnRunner
from policies.errors import BadRequest, OrchestratorError


class ChatRoute:
    """The route's handler and what it needs."""

    def __init__(self, config: Config, runner: TurnRunner, metrics: GatewayMetrics) -> None:
        self._config = config
        self._runner = runner
        self._counting = Counting(metrics)
        self._models = Models(config)

    async def answer(self, request: Request, tenant: TenantConfig) -> Response:
        """One chat completion, streamed or whole."""
        said = parse_object(await read_body(request, int(self._config.http.max_body)))
        body = validate(ChatRequest, said, UNSUPPORTED)
        ask = self._ask(body, said, request.headers, tenant)
        progress = Progress(arrival=ask.arrival)
        call = _ChatDelivery(ask, body, progress, self._counting.count)
        events = self._counting.watched(self._runner.run(ask, progress))
        if body.stream:
            return await call.stream(events, self._config.http.stream_hold_seconds)
        return await call.whole(events)

    def _ask(self, body: ChatRequest, said: Mapping[str, Any], headers: Mapping[str, str], tenant: TenantConfig) -> Ask:
        model = self._models.find(body.model, body.answer_limit)
        session_id = _session_id(body, headers)
        key = headers.get("idempotency-key")
        _check_together(body, session_id, key)
        place = None if session_id is None else Place(session_id)
        return Ask(
            tenant=tenant,
            model=model,
            items=tuple(NewItem(one) for message in body.messages for one in bodies(_template_message(message))),
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop=body.stops,
            max_tokens=body.answer_limit,
            top_k=max(0, body.top_k),
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=tuple(body.logit_bias.items()),
            min_tokens=body.min_tokens,
            logprobs=body.alternatives,
            n=body.n,
            place=place,
            most_calls=most_calls(body.tools, body.tool_choice, model, parallel=body.parallel_tool_calls),
            idempotency_key=key,
            fingerprint=fingerprint(said) if key is not None else None,
            keep_alive_seconds=body.keep_alive_seconds,
            pin_seconds=pin_seconds(body.prompt_cache_retention, place, tenant),
        )


class _ChatDelivery(Delivery):
    def __init__(self, ask: Ask, body: ChatRequest, progress: Progress, count: Count) -> None:
        super().__init__(ask, progress, count)
        options = body.stream_options
        self._include_usage = options is not None and options.include_usage

    def body(self, done: Done) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": self._message(index),
                    "logprobs": self._logprobs(self.logprobs[index]),
                    "finish_reason": reason,
                }
                for index, reason in enumerate(done.finish_reasons)
            ],
            "usage": _usage(done),
        }

    def chunks(self, event: Event) -> list[bytes]:
        match event:
            case Started():
                return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self.ask.n)]
            case Piece():
                return [self._chunk(event.index, {"content": event.text}, logprobs=self._logprobs(event.logprobs))]
            case Called():
                calls = [{"index": at, **call} for at, call in enumerate(_tool_calls(event))]
                return [self._chunk(0, {"tool_calls": calls})]
            case Done():
                chunks = [self._chunk(index, {}, reason) for index, reason in enumerate(event.finish_reasons)]
                if self._include_usage:
                    usage = {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(event)}
                    chunks.append(_data(usage))
                # the whole timing, as a comment: the headers left before most of it had happened
                timing = f": server-timing {self.timing(event)}\n\n" if self.started else ""
                return [timing.encode(), *chunks, b"data: [DONE]\n\n"]

    def failure(self, error: OrchestratorError) -> bytes:
        return _data(error.envelope())

    def _message(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.texts[index], "refusal": None}
        if index == 0 and self.called is not None:
            message |= {"content": self.texts[0] or None, "tool_calls": _tool_calls(self.called)}
        return message

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        body = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return _data(body)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.ask.logprobs is None:
            return None
        content = [{**_scored(token), "top_logprobs": [_scored(other) for other in token.top]} for token in tokens]
        return {"content": content, "refusal": None}

    def _head(self, kind: str) -> dict[str, Any]:
        """A replayed answer keeps the id it had."""
        replay = self.started.replay if self.started is not None else None
        return {
            "id": f"chatcmpl-{self.ask.turn_id if replay is None else replay[0]}",
            "object": kind,
            "created": int(self.ask.arrival),
            "model": self.ask.model.name,
            "system_fingerprint": None,
        }


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


def _template_message(message: Message) -> dict[str, Any]:
    return {"content": message.text(), **message.model_dump(exclude={"content", "refusal"}, exclude_none=True)}


def _tool_calls(called: Called) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call, call_id in zip(called.calls, called.call_ids, strict=True)
    ]


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
