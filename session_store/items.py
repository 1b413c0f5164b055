"""Owns the shape of one conversation item, in memory and as the JSON that lies in Redis.

``body`` is the item in OpenAI's form, without its id: a message with content parts, a function call, its output, or
reasoning. What a body holds beyond what is read here is kept and given back unchanged, and so is what a newer program
wrote beside it (``extra``). Two things are left out of the JSON, for most items have them and they can be told from the
rest: the turn that the item's id names, and the list around a message's one plain part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from policies.errors import BadRequest, OrchestratorError
from policies.types import ItemView

SCHEMA_VERSION = 2
ROLES = frozenset({"system", "developer", "user", "assistant"})
TYPES = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_FIELDS = frozenset({"v", "id", "turn", "at", "item", "model", "pinned", "ids"})
_ROLE_OF_TYPE = {"function_call": "assistant", "function_call_output": "tool", "reasoning": "assistant"}


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a session."""

    item_id: str
    turn_id: str  # what it came with; in a prompt such items stay or go together
    created: float  # seconds since the epoch
    body: Mapping[str, Any]
    model: str | None = None  # which model wrote it
    pinned: bool = False
    ids: str | None = None  # how ``model`` said exactly this text (orchestrator.answers.keep)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"item {self.item_id}: type {self.type!r} is none of {', '.join(sorted(TYPES))}")
        if self.type == "message" and self.body.get("role") not in ROLES:
            raise ValueError(
                f"item {self.item_id}: role {self.body.get('role')!r} is none of {', '.join(sorted(ROLES))}"
            )
        if clash := _FIELDS & self.extra.keys():
            raise ValueError(f"item {self.item_id}: extra may not hold {', '.join(sorted(clash))}")

    @property
    def type(self) -> str:
        return str(self.body.get("type"))

    @property
    def role(self) -> str:
        """Whose item it is: system, developer, user, assistant or tool."""
        return _ROLE_OF_TYPE.get(self.type) or str(self.body["role"])

    @property
    def text(self) -> str:
        """What it says to a model: a message's parts, or a function's output."""
        return text_of(self.body["output"] if self.type == "function_call_output" else self.body.get("content"))

    @property
    def call_id(self) -> str | None:
        """Of a function call, or of the one that an output answers."""
        call_id = self.body.get("call_id")
        return None if call_id is None else str(call_id)

    def to_json(self) -> bytes:
        """The stored form; absent fields are left out. BadRequest if a text is not Unicode (lone surrogates)."""
        record: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "id": self.item_id,
            "at": round(self.created, 3),
            "item": _without_list(self.body),
        }
        named = self.turn_id == _turn_named_by(self.item_id)
        optional = {
            "turn": None if named else self.turn_id,
            "model": self.model,
            "pinned": self.pinned or None,
            "ids": self.ids,
        }
        record.update((name, value) for name, value in optional.items() if value is not None)
        record.update(self.extra)
        try:
            return orjson.dumps(record)
        except orjson.JSONEncodeError as error:
            raise BadRequest(f"item {self.item_id} cannot be stored: {error}", param="input") from error

    @classmethod
    def from_json(cls, data: bytes) -> Item:
        """Parse the stored form. OrchestratorError if it was written by an incompatible version."""
        record = orjson.loads(data)
        if record["v"] != SCHEMA_VERSION:
            raise OrchestratorError(
                f"item {record.get('id')} has schema version {record['v']}, this program reads {SCHEMA_VERSION}: "
                "finish the upgrade of every gateway, or delete the session"
            )
        return cls(
            item_id=record["id"],
            turn_id=record["turn"] if "turn" in record else _turn_named_by(record["id"]),
            created=record["at"],
            body=_with_list(record["item"]),
            model=record.get("model"),
            pinned=record.get("pinned", False),
            ids=record.get("ids"),
            extra={name: value for name, value in record.items() if name not in _FIELDS},
        )

    def view(self) -> ItemView:
        """What truncation decides on."""
        return ItemView(
            item_id=self.item_id,
            turn_id=self.turn_id,
            role=self.role,
            call_ids=(str(self.call_id),) if self.type == "function_call" else (),
            result_of=self.call_id if self.type == "function_call_output" else None,
            pinned=self.pinned,
        )


def message(role: str, text: str) -> dict[str, Any]:
    """The body of a message with one part."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def text_of(content: Any) -> str:
    """The text of a content: plain, or the parts that have one."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content or ())


def _turn_named_by(item_id: str) -> str:
    """The turn whose id stands in the id of an item that came with it: ``msg_<turn>_0``."""
    return item_id.partition("_")[2].rpartition("_")[0]


def _without_list(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is one plain part of the usual kind has that part's text as its content."""
    content = body.get("content")
    if body.get("type") == "message" and isinstance(content, list) and len(content) == 1:
        text = content[0].get("text")
        if content == message(body["role"], text)["content"]:
            return {**body, "content": text}
    return body


def _with_list(body: Mapping[str, Any]) -> Mapping[str, Any]:
    if body.get("type") == "message" and isinstance(body.get("content"), str):
        return {**body, "content": message(body["role"], body["content"])["content"]}
    return body


def tombstone(item_id: str) -> bytes:
    """What takes a deleted item's place in the list, so that no other item's index changes."""
    return orjson.dumps({"v": SCHEMA_VERSION, "id": item_id, "gone": True})


def parse_live(stored: list[bytes]) -> list[Item]:
    """The items among them that have not been deleted."""
    return [Item.from_json(data) for data in stored if not data.endswith(b'"gone":true}')]
