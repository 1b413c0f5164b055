"""Owns /v1/responses: turns as OpenAI's Responses API has them. Their history lies in sessions, like every other.

A response without a conversation is a turn of a *chain*: a session that only ``previous_response_id`` goes on with.
Whoever goes on from another turn than the last one gets a fork of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from orchestrator.api.conversations import check_name, page_of
from orchestrator.api.delivery import Counting
from orchestrator.api.intake import Models, fingerprint, most_calls, parse_object, pin_seconds, read_body, validate
from orchestrator.api.items import read_items, shown_list
from orchestrator.api.response_bodies import NOT_KEPT, ResponseDelivery, head, not_found, split_id, stored_response
from orchestrator.api.response_wire import READING_UNSUPPORTED, UNSUPPORTED, Reading, ResponseRequest
from orchestrator.asks import Ask, History, Place
from orchestrator.config import Config, TenantConfig
from orchestrator.metrics import GatewayMetrics
from orchestrator.progress import Progress
from orchestrator.turn import TurnRunner, window_bytes
from policies.errors import BadRequest, SessionBusy, SessionNotFound
from session_store.records import StoredTurn
from session_store.store import SessionStore


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
        with _in_its_words(body):
            if body.previous_response_id is not None and not body.store:
                ask = await self._without_trace(ask)
            progress = Progress(arrival=ask.arrival)
            call = ResponseDelivery(ask, body, progress, self._counting.count)
            events = self._counting.watched(self._runner.run(ask, progress))
            if body.stream:
                return await call.stream(events, self._config.http.stream_hold_seconds)
            return await call.whole(events)

    async def input_tokens(self, request: Request, tenant: TenantConfig) -> dict[str, Any]:
        """How many tokens the prompt of such a request would have."""
        said = parse_object(await read_body(request, int(self._config.http.max_body)))
        body = validate(ResponseRequest, said, UNSUPPORTED)
        ask = self._ask(body, said, None, tenant)
        with _in_its_words(body):
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
            return head(session_id, turn.turn_id, {}, "in_progress")
        cancelled = turn.status == "cancelled"
        error = (
            None if cancelled else {"code": "server_error", "message": f"the response came to no end: {turn.status}"}
        )
        return head(session_id, turn.turn_id, {}, "cancelled" if cancelled else "failed") | {"error": error}

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
        if turn.status == "running":
            raise SessionBusy(f"{response_id} runs: cancel it, or wait for its end", retry_after_seconds=1.0)
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
            raise not_found(response_id, "response_id")
        return session_id, turn

    async def _without_trace(self, ask: Ask) -> Ask:
        """The same on a history that is read and not added to."""
        place, tenant = ask.place, ask.tenant.name
        if place is None or not place.must_exist:
            return replace(ask, place=None)
        end = (await self._store.session_info(tenant, place.session_id)).items
        if place.after is not None:
            end = await self._store.end_of_turn(tenant, place.session_id, place.after)
        items, unread = await self._store.read_window(
            tenant, place.session_id, end, self._config.sessions.window_items, window_bytes(ask.model.max_model_len)
        )
        named = [*ask.references, *(item.item_id for item in ask.items if item.item_id is not None)]
        known = await self._store.known_items(tenant, place.session_id, named)
        return replace(ask, place=None, history=History(items, unread, known))


def _place(body: ResponseRequest, turn_id: str, key: str | None) -> Place | None:
    """Where the response has its history; a retry under an idempotency key has to look in the same place."""
    if body.conversation_id is not None:
        return Place(check_name(body.conversation_id), must_exist=True)
    named = turn_id if key is None else hashlib.sha256(f"{key}\n{body.previous_response_id}".encode()).hexdigest()[:32]
    if body.previous_response_id is not None:
        session_id, turn = split_id(body.previous_response_id, "previous_response_id")
        return Place(session_id, must_exist=True, after=turn, fork_id=named)
    if body.store:
        return Place(named, kind="chain")
    if key is not None:
        raise BadRequest("Idempotency-Key with store: false: there is nothing to repeat it from", param="store")
    return None


@contextlib.contextmanager
def _in_its_words(body: ResponseRequest) -> Iterator[None]:
    """What is wrong with a turn, as this API calls it."""
    try:
        yield
    except SessionNotFound as error:
        if body.previous_response_id is not None:
            raise not_found(body.previous_response_id, "previous_response_id") from error
        error.param = "conversation"
        raise
    except BadRequest as error:
        error.param = "input" if error.param == "messages" else error.param
        raise
