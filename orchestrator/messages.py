"""Owns the two forms of a conversation: typed items, as they are stored, and messages, as chat templates take them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from session_store.items import Item, message

PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclass(frozen=True, slots=True)
class NewItem:
    """An item on its way in: its body, and the id its client gave it."""

    body: Mapping[str, Any]
    item_id: str | None = None


@dataclass(frozen=True, slots=True)
class Messages:
    """Items as a template takes them."""

    messages: tuple[Mapping[str, Any], ...]
    places: tuple[int | None, ...]  # of each item: the index of its message; None: it is in no prompt

    def of(self, items: Sequence[int]) -> tuple[int, ...]:
        """The messages that these items are in."""
        return tuple(dict.fromkeys(place for item in items if (place := self.places[item]) is not None))


def bodies(message_: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chat message (role, content as text, name, tool_calls, tool_call_id) as item bodies."""
    role, text = message_["role"], message_["content"]
    name = {"name": message_["name"]} if message_.get("name") is not None else {}
    if role == "tool":
        return [{"type": "function_call_output", "call_id": message_["tool_call_id"], "output": text, **name}]
    calls = message_.get("tool_calls") or ()
    said = [message(role, text) | name] if text or not calls else []
    return said + [
        {
            "type": "function_call",
            "call_id": call["id"],
            **{key: call["function"][key] for key in ("name", "arguments")},
        }
        for call in calls
    ]


def to_items(new: Sequence[NewItem], turn_id: str, created: float) -> list[Item]:
    """Named and grouped: what follows an answer is a group of its own, the last one has the turn's id."""
    groups = [0] if new else []
    for before, one in itertools.pairwise(new):
        asks = one.body.get("role") == "user" and before.body.get("role") not in ("user", "system", "developer")
        groups.append(groups[-1] + asks)
    return [
        Item(
            item_id=one.item_id or f"{PREFIXES[one.body['type']]}_{turn_id}_{index}",
            turn_id=turn_id if group == groups[-1] else f"{turn_id}.{group}",
            created=created,
            body=one.body,
        )
        for index, (one, group) in enumerate(zip(new, groups, strict=True))
    ]


def to_messages(items: Sequence[Item]) -> Messages:
    """Function calls join the message of their turn that they follow. Reasoning is for its reader alone."""
    messages: list[dict[str, Any]] = []
    places: list[int | None] = []
    last: Item | None = None  # that is in a message
    for item in items:
        if item.type == "reasoning":
            places.append(None)
            continue
        match item.type:
            case "function_call":
                if last is None or last.role != "assistant" or last.turn_id != item.turn_id:
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                named = {"name": item.body["name"]} if "name" in item.body else {}
                messages.append({"role": "tool", "content": item.text, "tool_call_id": item.call_id, **named})
            case _:
                named = {"name": item.body["name"]} if "name" in item.body else {}
                messages.append({"role": item.role, "content": item.text, **named})
        places.append(len(messages) - 1)
        last = item
    return Messages(tuple(messages), tuple(places))


def _call(item: Item) -> dict[str, Any]:
    function = {"name": item.body["name"], "arguments": item.body["arguments"]}
    return {"id": item.call_id, "type": "function", "function": function}
