"""Owns the finding of function calls in what a model says: ``<tool_call>{"name", "arguments"}</tool_call>``.

Engines that are asked to call functions write so (Hermes and Qwen templates ask for it); the fake engine is the one
that may be asked today.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str  # JSON


class ToolSplitter:
    """Tells text from calls while it comes in; what may be the beginning of a call is held back."""

    def __init__(self, most: int) -> None:
        """``most``: calls that are taken; what comes after them is left out, text too."""
        self._most = most
        self._held = ""
        self.calls: list[ToolCall] = []

    def feed(self, text: str) -> str:
        """What of the text so far may be shown."""
        if len(self.calls) == self._most:
            return ""
        self._held += text
        shown = ""
        while BEGIN in self._held:
            before, _, rest = self._held.partition(BEGIN)
            inside, end, after = rest.partition(END)
            if not end:
                self._held = BEGIN + rest
                return shown + before
            call = _parse(inside)
            shown += before if call else f"{before}{BEGIN}{inside}{END}"
            self.calls += [call] if call else []
            self._held = after
            if len(self.calls) == self._most:
                self._held = ""
        keep = next((n for n in range(len(BEGIN) - 1, 0, -1) if self._held.endswith(BEGIN[:n])), 0)
        shown += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back and is no call."""
        rest, self._held = self._held, ""
        return rest


def _parse(text: str) -> ToolCall | None:
    try:
        found = orjson.loads(text)
        arguments = found.get("arguments", {})
        return ToolCall(found["name"], arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode())
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return None
