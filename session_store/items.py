"""Owns the shape of one conversation item, in memory and as the JSON that lies in Redis.

The JSON carries a schema version ``v``. Keys this version does not know (content parts)
are kept in ``extra`` and written back unchanged, so an older gateway does not lose what a newer one stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from policies.errors import BadRequest, OrchestratorError
from policies.types import ItemView

SCHEMA_VERSION = 1
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_FIELDS = frozenset(
    {
        "v", "item_id", "turn_id", "role", "content", "created",
        "model", "name", "tool_calls", "tool_call_id", "pinned", "ids",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a session. ``tool_calls`` are in OpenAI's form: ``{"id", "type", "function": {…}}``."""

    item_id: str
    turn_id: str
    role: str
    content: str
    created: float  # seconds since the epoch
    model: str | None = None  # which model wrote it
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None  # which call a tool item answers
    pinned: bool = False
    name: str | None = None  # of the speaker or the tool, for templates that show it
    ids: str | None = None  # how ``model`` said exactly this content (orchestrator.answers.keep)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"item {self.item_id}: role {self.role!r} is none of {', '.join(sorted(ROLES))}")
        if clash := _FIELDS & self.extra.keys():
            raise ValueError(f"item {self.item_id}: extra may not hold {', '.join(sorted(clash))}")

    def to_json(self) -> bytes:
        """The stored form; absent fields are left out. BadRequest if a text is not Unicode (lone
        surrogates)."""
        record: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "item_id": self.item_id,
            "turn_id": self.turn_id,
            "role": self.role,
            "content": self.content,
            "created": self.created,
        }
        optional = {
            "model": self.model,
            "name": self.name,
            "tool_calls": self.tool_calls or None,
            "tool_call_id": self.tool_call_id,
            "pinned": self.pinned or None,
            "ids": self.ids,
        }
        record.update((name, value) for name, value in optional.items() if value is not None)
        record.update(self.extra)
        try:
            return orjson.dumps(record)
        except orjson.JSONEncodeError as error:
            raise BadRequest(f"item {self.item_id} cannot be stored: {error}", param="messages") from error

    @classmethod
    def from_json(cls, data: bytes) -> Item:
        """Parse the stored form. OrchestratorError if it was written by an incompatible version."""
        record = orjson.loads(data)
        if record["v"] != SCHEMA_VERSION:
            raise OrchestratorError(
                f"item {record.get('item_id')} has schema version {record['v']}, this program reads "
                f"{SCHEMA_VERSION}: finish the upgrade of every gateway"
            )
        return cls(
            item_id=record["item_id"],
            turn_id=record["turn_id"],
            role=record["role"],
            content=record["content"],
            created=record["created"],
            model=record.get("model"),
            tool_calls=tuple(record.get("tool_calls", ())),
            tool_call_id=record.get("tool_call_id"),
            pinned=record.get("pinned", False),
            name=record.get("name"),
            ids=record.get("ids"),
            extra={name: value for name, value in record.items() if name not in _FIELDS},
        )

    def view(self) -> ItemView:
        """What truncation decides on."""
        return ItemView(
            item_id=self.item_id,
            turn_id=self.turn_id,
            role=self.role,
            call_ids=tuple(call["id"] for call in self.tool_calls if "id" in call),
            result_of=self.tool_call_id if self.role == "tool" else None,
            pinned=self.pinned,
        )
