"""Owns what is said of a response: its object, whether it has just been made or is read from the store, and its events.

Its id says where it lies: ``resp_<session>_<turn>``, or ``resp_<turn>`` where the turn has begun the session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from orchestrator.api.delivery import Count, Delivery
from orchestrator.api.items import shown
from orchestrator.api.response_wire import ResponseRequest
from orchestrator.asks import Ask, Called, Done, Event, Piece, Started
from orchestrator.progress import Progress
from policies.errors import OrchestratorError, ResponseNotFound
from session_store.items import text_of
from session_store.records import StoredTurn

RESPONSE_ID = re.compile(r"resp_(?:([A-Za-z0-9._:-]{1,128})_)?([0-9a-f]{32})")
NOT_KEPT = {"stream", "stream_options", "input", "keep_alive", "conversation", "previous_response_id"}


class ResponseDelivery(Delivery):
    def __init__(self, ask: Ask, body: ResponseRequest, progress: Progress, count: Count) -> None:
        super().__init__(ask, progress, count)
        self._body = body
        self._number = -1
        self._said = False  # the message has been begun

    def body(self, done: Done) -> dict[str, Any]:
        if self.started is not None and self.started.replay is not None:
            turn_id, items, reply = self.started.replay
            stored = stored_response(str(self.started.session_id), StoredTurn(turn_id, "completed", items, reply))
            talk = {"id": self._body.conversation_id} if self._body.conversation_id else None
            return stored | {"store": self._body.store, "conversation": talk}
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
                text = text_of(item["content"])  # one part, unless it has been edited since
                out += [] if self._said else self._begin_message()
                out += [
                    self._event("response.output_text.done", **self._part, text=text, logprobs=[]),
                    self._event("response.content_part.done", **self._part, part=self._message(text)["content"][0]),
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
        made = head(session_id, self._turn_id, asked, "in_progress", created=self.ask.arrival)
        made |= {"model": self.ask.model.name, "store": self._body.store}
        if self._body.conversation_id:
            made["conversation"] = {"id": self._body.conversation_id}
        if done is None:
            return made
        said = self.texts[0]
        output = [self._message(said)] if said.strip() or self.called is None else []
        output += [] if self.called is None else _calls(self.called, self._turn_id)
        return made | _ended(done.finish_reasons[0]) | {"output": output, "usage": _usage(_counts(done))}

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
    made = head(session_id, turn.turn_id, reply.get("response", {}), "completed", created=created)
    return (
        made
        | _ended(reply["finish_reason"])
        | {"model": reply["model"], "output": [shown(item) for item in said], "usage": _usage(reply)}
    )


def response_id(session_id: str | None, turn_id: str) -> str:
    return f"resp_{turn_id}" if session_id in (None, turn_id) else f"resp_{session_id}_{turn_id}"


def split_id(text: str, param: str = "response_id") -> tuple[str, str]:
    """(session, turn) of a response's id. ResponseNotFound if it is none."""
    found = RESPONSE_ID.fullmatch(text)
    if found is None:
        raise not_found(text, param)
    return found[1] or found[2], found[2]


def head(
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


def not_found(response_id: str, param: str) -> ResponseNotFound:
    return ResponseNotFound(f"there is no response {response_id[:300]}", param=param)
