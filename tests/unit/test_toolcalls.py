"""Function calls in a stream of text: found however it is cut, and what is none is text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.toolcalls import ToolCall, ToolSplitter

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
FOUND = ToolCall("f", '{"x":1}')


def split(pieces: list[str], most: int = 128) -> tuple[str, list[ToolCall]]:
    splitter = ToolSplitter(most)
    shown = "".join(splitter.feed(piece) for piece in pieces) + splitter.finish()
    return shown, splitter.calls


@pytest.mark.parametrize(
    ("said", "shown", "calls"),
    [
        ("hello", "hello", 0),
        (CALL, "", 1),
        (f"Let me look. {CALL}", "Let me look. ", 1),
        (f"{CALL}{CALL} done", " done", 2),
        ("<tool_call>{not json}</tool_call> x", "<tool_call>{not json}</tool_call> x", 0),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', 0),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", 0),
        ("a <tool_call>{", "a <tool_call>{", 0),  # the answer ended within it
        ("a < b <tool", "a < b <tool", 0),
    ],
)
@given(data=st.data())
def test_however_the_text_is_cut(said: str, shown: str, calls: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    assert split(pieces) == (shown, [FOUND] * calls)


def test_nothing_of_a_call_is_shown_while_it_comes_in() -> None:
    splitter = ToolSplitter(1)
    assert [splitter.feed(letter) for letter in f"x{CALL}"] == ["x"] + [""] * len(CALL)


def test_no_more_calls_than_are_wanted() -> None:
    assert split([f"a {CALL} b {CALL}"], most=1) == ("a ", [FOUND])
    assert split([f"a {CALL}", f" b {CALL}"], most=1) == ("a ", [FOUND])
