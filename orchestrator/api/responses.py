"""Owns /v1/responses: turns as OpenAI's Responses API has them. Their history lies in sessions, like every other.

A response's id says where it lies: ``resp_<session>_<turn>``, or ``resp_<turn>`` where the turn has begun the session.
A response without a conversation is a turn of a *chain*: a session that only ``previous_response_id`` goes on with.
Whoever goes on from another turn than the last one gets a fork of it.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import orjson
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.api.conversations import check_metadata, check_name, page_of
from orchestrator.api.delivery import Count, Counting, Delivery
from orchestrator.api.intake import Models, fingerprint, most_calls, parse_object, pin_seconds, read_body, validate
from orchestrator.api.items import read_items, shown, shown_list
from orchestrator.api.wire import KeepAlive
from orchestrator.asks import Ask, Called, Done, Event, Piece, Place, Started
from orchestrator.config import Config, TenantConfig
from orchestrator.metrics import GatewayMetrics
from orchestrator.progress import Progress
from orchestrator.turn import TurnRunner
from policies.errors import BadRequest, OrchestratorError, ResponseNotFound, SessionNotFound
from session_store.records import StoredTurn
from session_store.store import SessionStore

RESPONSE_ID = re.compile(r"resp_(?:([A-Za-z0-9._:-]{1,128})_)?([0-9a-f]{32})")
# Fields of the OpenAI API that are known and not built, with the only values that mean "off".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "image": (),
    "context_management": ([],),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "multi_agent": (),
    "prompt": (),
    "prompt_cache_options": (),
    "reasoning": ({}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "text": (
        {},
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "top_logprobs": (0,),
}
READING_UNSUPPORTED = {"stream": ("false",), "starting_after": (), "include": (), "include[]": ()}
NOT_KEPT = {"stream", "stream_options", "input", "keep_alive", "conversation", "previous_response_id"}


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ConversationParam(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    id: str


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_obfuscation: Literal[False] = False


class ResponseRequest(KeepAlive):
    """Body of POST /v1/responses. The README's table says what each field means; a test compares the two."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    input: str | list[Any] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationParam | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    truncation: Literal["auto", "disabled"] = "disabled"
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] = "in_memory"

    @model_validator(mode="after")
    def _one_history(self) -> ResponseRequest:
        if self.previous_response_id is not None and self.conversation is not None:
            raise ValueError("previous_response_id and conversation: send one of the two")
        return self

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation


class Reading(BaseModel):
    """The query of a read."""

    model_config = ConfigDict(extra="forbid")


class ResponsesRoute:
    """The routes' handlers and what they need."""

    def __init__(self, config: Config, runner: TurnRunner, store: SessionStore, metrics: GatewayMetrics) -> None:
        self._config = config
        self._runner = runner
        self._store = store
        self._counting = Counting(metrics)
        self._models = Models(config)

    async def create(self, request: Request, tenant: TenantConfig) -> Response:
        """One response, streamed or whole."""
        said = parse_object(await read_body(request, int(self._config.http.max_body)))
        body = validate(ResponseRequest, said, UNSUPPORTED)
        ask = self._ask(body, said, request.headers.get("idempotency-key"), tenant)
        try:
            if body.previous_response_id is not None and not body.store:
                ask = await self._without_trace(ask)
            progress = Progress(arrival=ask.arrival)
            call = _ResponseDelivery(ask, body, progress, self._counting.count)
            events = self._counting.watched(self._runner.run(ask, progress))
            if body.stream:
                return await call.stream(events, self._config.http.stream_hold_seconds)
            return await call.whole(events)
        except SessionNotFound as error:
            if body.previous_response_id is None:
                raise
            raise _not_found(body.previous_response_id, "previous_response_id") from error

    async def input_tokens(self, request: Request, tenant: TenantConfig) -> dict[str, Any]:
        """How many tokens the prompt of such a request would have."""
        said = parse_object(await read_body(request, int(self._config.http.max_body)))
        body = validate(ResponseRequest, said, UNSUPPORTED)
        ask = self._ask(body, said, None, tenant)
        ask = await self._without_trace(ask)
        return {"object": "response.input_tokens", "input_tokens": await self._runner.count(ask)}

    async def read(self, request: Request, tenant: str, response_id: str) -> dict[str, Any]:
        """What has been said; of one that runs or came to no end, how it is."""
        validate(Reading, dict(request.query_params), READING_UNSUPPORTED)
        return await self._read(tenant, response_id)

    async def _read(self, tenant: str, response_id: str) -> dict[str, Any]:
        session_id, turn = await self._turn(tenant, response_id)
        if turn.status == "completed":
            return stored_response(session_id, turn)
        if turn.status == "running":
            return _head(session_id, turn.turn_id, {}, "in_progress")
        cancelled = turn.status == "cancelled"
        error = (
            None if cancelled else {"code": "server_error", "message": f"the response came to no end: {turn.status}"}
        )
        return _head(session_id, turn.turn_id, {}, "cancelled" if cancelled else "failed") | {"error": error}

    async def cancel(self, tenant: str, response_id: str) -> dict[str, Any]:
        """End a response that runs: it will not be in the history. BadRequest if it does not run."""
        session_id, turn = await self._turn(tenant, response_id)
        if turn.status == "running" and await self._store.cancel_turn(tenant, session_id, turn.turn_id):
            self._runner.cancel(turn.turn_id)
        elif turn.status != "cancelled":
            raise BadRequest(f"cannot cancel {response_id}: it does not run any more", param="response_id")
        return await self._read(tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> dict[str, Any]:
        """It cannot be read or gone on from any more. What it added to a conversation stays there."""
        session_id, turn = await self._turn(tenant, response_id)
        if turn.status == "completed":
            await self._store.delete_turn(tenant, session_id, turn.turn_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def input_items(self, request: Request, tenant: str, response_id: str) -> dict[str, Any]:
        """What the request brought, not what its conversation had before."""
        asked = page_of(request)
        _, turn = await self._turn(tenant, response_id)
        items = [item for item in turn.items if item.model is None]
        if asked.order == "desc":
            items.reverse()
        if asked.after is not None:
            ids = [item.item_id for item in items]
            if asked.after not in ids:
                raise BadRequest(f"after: there is no item {asked.after} in {response_id}", param="after")
            items = items[ids.index(asked.after) + 1 :]
        return shown_list(items[: asked.limit], more=len(items) > asked.limit)

    # -- inside ----------------------------------------------------------------------

    def _ask(self, body: ResponseRequest, said: Mapping[str, Any], key: str | None, tenant: TenantConfig) -> Ask:
        model = self._models.find(body.model, body.max_output_tokens, "max_output_tokens")
        items, references = read_items(body.input, "input", int(self._config.sessions.max_item))
        turn_id = uuid.uuid4().hex
        place = _place(body, turn_id, key)
        if place is None and references:
            raise BadRequest("input: an item_reference needs a conversation or previous_response_id", param="input")
        kept = body.model_dump(exclude=NOT_KEPT, exclude_defaults=True)
        previous = {"previous_response_id": body.previous_response_id} if body.previous_response_id else {}
        talk = {"conversation": {"id": body.conversation_id}} if body.conversation_id else {}
        check_metadata(body.metadata)
        return Ask(
            tenant=tenant,
            model=model,
            items=items,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=None,
            stop=(),
            max_tokens=body.max_output_tokens,
            place=place,
            instructions=body.instructions or None,
            references=references,
            most_calls=most_calls(body.tools, body.tool_choice, model, parallel=body.parallel_tool_calls),
            may_truncate=body.truncation == "auto",
            reply={"response": {**kept, **previous, **talk}} if body.store else {},
            idempotency_key=key,
            fingerprint=fingerprint(said) if key is not None else None,
            keep_alive_seconds=body.keep_alive_seconds,
            pin_seconds=pin_seconds(body.prompt_cache_retention, place, tenant),
            turn_id=turn_id,
        )

    async def _turn(self, tenant: str, response_id: str) -> tuple[str, StoredTurn]:
        session_id, turn_id = split_id(response_id)
        turn = await self._store.read_turn(tenant, session_id, turn_id)
        if turn is None or (turn.status == "completed" and "response" not in turn.reply):
            raise _not_found(response_id, "response_id")
        return session_id, turn

    async def _without_trace(self, ask: Ask) -> Ask:
        """The same on a history that is read and not added to."""
        place, tenant = ask.place, ask.tenant.name
        if place is None or not place.must_exist:
            return replace(ask, place=None)
        end = (await self._store.session_info(tenant, place.session_id)).items
        if place.after is not None:
            end = await self._store.end_of_turn(tenant, place.session_id, place.after)
        start = max(0, end - self._config.sessions.window_items)
        history = await self._store.read_items(tenant, place.session_id, start, max(1, end - start))
        return replace(ask, place=None, history=history)


class _ResponseDelivery(Delivery):
    def __init__(self, ask: Ask, body: ResponseRequest, progress: Progress, count: Count) -> None:
        super().__init__(ask, progress, count)
        self._body = body
        self._number = -1
        self._said = False  # the message has been begun

    def body(self, done: Done) -> dict[str, Any]:
        if self.started is not None and self.started.replay is not None:
            turn_id, items, reply = self.started.replay
            return stored_response(str(self.started.session_id), StoredTurn(turn_id, "completed", items, reply))
        return self._response(done)

    def chunks(self, event: Event) -> list[bytes]:
        match event:
            case Started():
                begun = self._response(None)
                return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]
            case Piece(text=text) if text:
                begin = [] if self._said else self._begin_message()
                return [*begin, self._event("response.output_text.delta", **self._part, delta=text, logprobs=[])]
            case Done():
                return self._end(event)
        return []

    def failure(self, error: OrchestratorError) -> bytes:
        """OpenAI's client raises what has an ``error``."""
        said = error.envelope()["error"]
        return self._event("error", code=said["code"], message=said["message"], param=said["param"], error=said)

    # -- what there is to say ---------------------------------------------------------

    @property
    def _turn_id(self) -> str:
        """A replayed answer keeps the ids it had."""
        replay = self.started.replay if self.started is not None else None
        return self.ask.turn_id if replay is None else replay[0]

    @property
    def _part(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._turn_id}_a", "output_index": 0, "content_index": 0}

    def _begin_message(self) -> list[bytes]:
        self._said = True
        item = {**self._message(""), "content": [], "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._part, part=self._message("")["content"][0]),
        ]

    def _end(self, done: Done) -> list[bytes]:
        response = self.body(done)
        out: list[bytes] = []
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                text = item["content"][0]["text"]
                out += [] if self._said else self._begin_message()
                out += [
                    self._event("response.output_text.done", **self._part, text=text, logprobs=[]),
                    self._event("response.content_part.done", **self._part, part=item["content"][0]),
                ]
            else:
                place = {"item_id": item["id"], "output_index": index}
                begun = {**item, "arguments": "", "status": "in_progress"}
                said = item["arguments"]
                out += [
                    self._event("response.output_item.added", output_index=index, item=begun),
                    self._event("response.function_call_arguments.delta", **place, delta=said),
                    self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=said),
                ]
            out.append(self._event("response.output_item.done", output_index=index, item=item))
        timing = f": server-timing {self.timing(done)}\n\n".encode()
        return [timing, *out, self._event(f"response.{response['status']}", response=response)]

    def _response(self, done: Done | None) -> dict[str, Any]:
        session_id = self.started.session_id if self.started is not None else None
        asked = self.ask.reply.get("response") or self._body.model_dump(exclude=NOT_KEPT, exclude_defaults=True)
        head = _head(session_id, self._turn_id, asked, "in_progress", created=self.ask.arrival)
        head |= {"model": self.ask.model.name, "store": self._body.store}
        if self._body.conversation_id:
            head["conversation"] = {"id": self._body.conversation_id}
        if done is None:
            return head
        said = self.texts[0]
        output = [self._message(said)] if said.strip() or self.called is None else []
        output += [] if self.called is None else _calls(self.called, self._turn_id)
        return head | _ended(done.finish_reasons[0]) | {"output": output, "usage": _usage(_counts(done))}

    def _message(self, text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {
            "id": f"msg_{self._turn_id}_a",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        data = {"type": kind, "sequence_number": self._number, **fields}
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def stored_response(session_id: str, turn: StoredTurn) -> dict[str, Any]:
    """A response that has come to its end, from what the store keeps of it."""
    reply = turn.reply
    said = [item for item in turn.items if item.model is not None]
    created = min((item.created for item in turn.items), default=0.0)
    head = _head(session_id, turn.turn_id, reply.get("response", {}), "completed", created=created)
    return (
        head
        | _ended(reply["finish_reason"])
        | {"model": reply["model"], "output": [shown(item) for item in said], "usage": _usage(reply)}
    )


def response_id(session_id: str | None, turn_id: str) -> str:
    return f"resp_{turn_id}" if session_id in (None, turn_id) else f"resp_{session_id}_{turn_id}"


def split_id(text: str, param: str = "response_id") -> tuple[str, str]:
    """(session, turn) of a response's id. ResponseNotFound if it is none."""
    found = RESPONSE_ID.fullmatch(text)
    if found is None:
        raise _not_found(text, param)
    return found[1] or found[2], found[2]


def _place(body: ResponseRequest, turn_id: str, key: str | None) -> Place | None:
    """Where the response has its history; a retry under an idempotency key has to look in the same place."""
    if body.conversation_id is not None:
        return Place(check_name(body.conversation_id), must_exist=True)
    named = turn_id if key is None else hashlib.sha256(key.encode()).hexdigest()[:32]
    if body.previous_response_id is not None:
        session_id, turn = split_id(body.previous_response_id, "previous_response_id")
        return Place(session_id, must_exist=True, after=turn, fork_id=named)
    if body.store:
        return Place(named, kind="chain")
    if key is not None:
        raise BadRequest("Idempotency-Key with store: false: there is nothing to repeat it from", param="store")
    return None


def _head(
    session_id: str | None, turn_id: str, asked: Mapping[str, Any], status: str, created: float = 0.0
) -> dict[str, Any]:
    """The fields of a response that do not depend on what was said."""
    usual: dict[str, Any] = {
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "previous_response_id": None,
        "conversation": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "truncation": "disabled",
        "tools": [],
        "tool_choice": "auto",
        "metadata": {},
        "user": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "store": True,
        "prompt_cache_retention": "in_memory",
    }
    return {
        "id": response_id(session_id, turn_id),
        "object": "response",
        "created_at": int(created),
        "status": status,
        "background": False,
        "model": asked.get("model", ""),
        "output": [],
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}},
        "usage": None,
        **usual,
        **asked,
    }


def _ended(finish_reason: str) -> dict[str, Any]:
    if finish_reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed"}


def _calls(called: Called, turn_id: str) -> list[dict[str, Any]]:
    calls = zip(called.calls, called.call_ids, strict=True)
    return [
        {
            "id": f"fc_{turn_id}_{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call_id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for number, (call, call_id) in enumerate(calls, 1)
    ]


def _counts(done: Done) -> dict[str, int]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "cached_tokens": done.cached_tokens,
    }


def _usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": counts["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["prompt_tokens"] + counts["completion_tokens"],
    }


def _not_found(response_id: str, param: str) -> ResponseNotFound:
    return ResponseNotFound(f"there is no response {response_id[:300]}", param=param)
