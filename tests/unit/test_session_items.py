"""Items: the stored JSON, what a newer version added, and what truncation sees."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import BadRequest, OrchestratorError
from session_store.items import ROLES, Item, message, parse_live, tombstone

text = st.text(st.characters(exclude_categories=("Cs",)))
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
bodies = st.builds(message, st.sampled_from(sorted(ROLES)), text) | st.sampled_from(
    [CALL, OUTPUT, {"type": "reasoning", "summary": []}]
)


@given(
    st.builds(
        Item,
        item_id=text,
        turn_id=text,
        created=st.floats(0, 4e9).map(lambda seconds: round(seconds, 3)),
        body=bodies,
        model=st.none() | text,
        pinned=st.booleans(),
        ids=st.none() | text,
        extra=st.dictionaries(text.map("x_".__add__), st.integers(-9, 9) | text, max_size=2),
    )
)
def test_json_round_trip(item: Item) -> None:
    assert Item.from_json(item.to_json()) == item


def hi(**more: Any) -> Item:
    return Item("i", "t", 1.0, message("user", "hi"), **more)


def test_what_a_newer_version_added_is_kept() -> None:
    stored = orjson.loads(hi().to_json()) | {"seen_by": ["x"]}
    item = Item.from_json(orjson.dumps(stored))
    assert item.extra == {"seen_by": ["x"]}
    assert orjson.loads(item.to_json()) == stored


def test_what_a_body_holds_beyond_what_is_read_is_kept() -> None:
    body = {**message("assistant", "hi"), "phase": "final", "content": [{"type": "output_text", "text": "hi", "x": 1}]}
    assert Item.from_json(Item("i", "t", 1.0, body).to_json()).body == body


def test_absent_fields_take_no_room() -> None:
    assert set(orjson.loads(hi().to_json())) == {"v", "id", "turn", "at", "item"}
    usual = Item("msg_1234_0", "1234", 1.0, message("user", "hi"))
    assert orjson.loads(usual.to_json()) == {
        "v": 2, "id": "msg_1234_0", "at": 1.0, "item": {"type": "message", "role": "user", "content": "hi"},
    }  # fmt: skip
    assert Item.from_json(usual.to_json()) == usual
    marked = message("assistant", "hi")
    marked["content"][0]["annotations"] = []
    assert Item.from_json(Item("i", "t", 1.0, marked).to_json()).body == marked


def test_an_unknown_schema_version_is_refused() -> None:
    with pytest.raises(OrchestratorError, match="schema version 1"):
        Item.from_json(b'{"v":1,"id":"i"}')


def test_what_cannot_be_an_item() -> None:
    with pytest.raises(ValueError, match="robot"):
        Item("i", "t", 1.0, message("robot", ""))
    with pytest.raises(ValueError, match="picture"):
        Item("i", "t", 1.0, {"type": "picture"})
    with pytest.raises(ValueError, match="extra may not hold item"):
        hi(extra={"item": {}})
    with pytest.raises(BadRequest, match="cannot be stored"):
        Item("i", "t", 1.0, message("user", "\ud800")).to_json()


def test_view() -> None:
    view = Item("i", "t", 1.0, CALL, pinned=True).view()
    assert (view.role, view.call_ids, view.result_of, view.pinned) == ("assistant", ("c1",), None, True)
    view = Item("r", "t", 1.0, OUTPUT).view()
    assert (view.role, view.call_ids, view.result_of) == ("tool", (), "c1")


def test_a_deleted_item_is_told_from_one_that_speaks_of_it() -> None:
    sly = Item("i", "t", 1.0, message("user", '"gone":true}'), extra={"z": "gone"})
    assert parse_live([tombstone("x"), sly.to_json()]) == [sly]
