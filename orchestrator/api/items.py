"""Owns the wire models of typed items, as OpenAI's Responses and Conversations APIs have them: in, and out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from orchestrator.api.wire import explain_invalid
from orchestrator.messages import NewItem
from policies.errors import BadRequest, UnsupportedField
from session_store.items import Item, message

ID = r"^[A-Za-z0-9._:-]{1,128}$"
MOST_ITEMS = 10_000
NO_TEXT = frozenset({"input_image", "input_file", "input_audio", "computer_screenshot", "image_url"})
MOST_CHARACTERS = 1024  # of a function's name and of a call's id
Status = Literal["in_progress", "completed", "incomplete"]


class Part(BaseModel):
    """A content part: what is said, or the refusal to say it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="after")
    def _says_it(self) -> Part:
        needed = "refusal" if self.type == "refusal" else "text"
        if getattr(self, needed) is None:
            raise ValueError(f"a part of type {self.type} needs {needed}")
        return self


class _Common(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    id: str | None = Field(None, pattern=ID)
    status: Status | None = None


class MessageItem(_Common):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    phase: str | None = None
    name: str | None = None  # of the speaker, as chat completions have it


class FunctionCall(_Common):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    name: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    arguments: str


class FunctionCallOutput(_Common):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    output: str | list[Part]
    name: str | None = None


class SummaryPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["summary_text", "reasoning_text"]
    text: str


class Reasoning(_Common):
    type: Literal["reasoning"]
    summary: list[SummaryPart]
    content: list[SummaryPart] | None = None
    encrypted_content: str | None = None


class Reference(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["item_reference"]
    id: str = Field(pattern=ID)


KINDS: Mapping[str, type[BaseModel]] = {
    "message": MessageItem,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
    "item_reference": Reference,
}


def read_items(said: Any, param: str, most_bytes: int) -> tuple[tuple[NewItem, ...], tuple[str, ...]]:
    """(new items, ids that are referred to) of an ``input`` or ``items``. BadRequest naming the field at fault."""
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    if not isinstance(said, list):
        raise BadRequest(f"{param}: must be a text or a list of items", param=param)
    if len(said) > MOST_ITEMS:
        raise BadRequest(f"{param}: has {len(said)} items, the limit of one request is {MOST_ITEMS}", param=param)
    found = [_read_item(one, f"{param}.{index}", most_bytes) for index, one in enumerate(said)]
    new = tuple(one for one in found if isinstance(one, NewItem))
    ids = Counter(one.item_id for one in new if one.item_id is not None)
    if ids and ids.most_common(1)[0][1] > 1:
        raise BadRequest(f"{param}: the id {ids.most_common(1)[0][0]} is there twice", param=param)
    return new, tuple(one for one in found if isinstance(one, str))


def check_stored(item: Item, most_bytes: int) -> None:
    """BadRequest for an item from elsewhere that these APIs would not have taken."""
    read_item({**item.body, "id": item.item_id}, most_bytes)


def shown(item: Item) -> dict[str, Any]:
    """An item as the APIs show it."""
    body = dict(item.body)
    if item.type == "message":
        body["content"] = [_shown_part(part) for part in body["content"]]
    if item.type != "reasoning":
        body.setdefault("status", "completed")
    return {"id": item.item_id, **body}


def shown_list(items: Sequence[Item], *, more: bool) -> dict[str, Any]:
    """A page of a list."""
    data = [shown(item) for item in items]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


def read_item(said: Mapping[str, Any], most_bytes: int) -> NewItem:
    """One item that is the whole body. BadRequest naming the field at fault."""
    new = _read_item(dict(said), "", most_bytes)
    if isinstance(new, str):
        raise BadRequest("an item_reference cannot be stored", param="type")
    return new


def _read_item(said: Any, param: str, most_bytes: int) -> NewItem | str:
    if not isinstance(said, dict):
        raise BadRequest(f"{param}: must be an object", param=param)
    name = said.get("type", "message")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        where = f"{param}.type" if param else "type"
        raise UnsupportedField(f"{where}: {name!r} is none of {', '.join(KINDS)}", param=where)
    _refuse_pictures(said, param)
    try:
        item = kind.model_validate({key: value for key, value in said.items() if value is not None})
    except ValidationError as error:
        raise explain_invalid(error.errors(), param) from error
    if isinstance(item, Reference):
        return item.id
    body = item.model_dump(exclude_none=True, exclude={"id"})
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        body["content"] = message(item.role, item.content)["content"]
    size = _bytes(body, param)
    if size > most_bytes:
        raise BadRequest(f"{param}: has {size} bytes, the limit of one item is {most_bytes}", param=param)
    item_id: str | None = getattr(item, "id", None)
    return NewItem(body, item_id)


def _refuse_pictures(said: Mapping[str, Any], param: str) -> None:
    for field in ("content", "output"):
        parts = said.get(field)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and part.get("type") in NO_TEXT:
                where = ".".join([*([param] if param else []), field, str(index), "type"])
                raise UnsupportedField(f"{where}: {part['type']} is not supported: these models read text", param=where)


def _shown_part(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"annotations": [], "logprobs": [], **part} if part["type"] == "output_text" else dict(part)


def _bytes(body: Mapping[str, Any], param: str) -> int:
    try:
        return len(orjson.dumps(body))
    except orjson.JSONEncodeError as error:  # half a surrogate pair
        raise BadRequest(f"{param}: {error}", param=param) from error
