"""Items: the stored JSON, what a newer version added, and what truncation sees."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import BadRequest, OrchestratorError
from session_store.items import ROLES, Item

text = st.text(st.characters(exclude_categories=("Cs",)))
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@given(
    st.builds(
        Item,
        item_id=text,
        turn_id=text,
        role=st.sampled_from(sorted(ROLES)),
        content=text,
        created=st.floats(0, 4e9),
        model=st.none() | text,
        tool_calls=st.lists(st.just(CALL), max_size=2).map(tuple),
        tool_call_id=st.none() | text,
        pinned=st.booleans(),
        ids=st.none() | text,
        extra=st.dictionaries(text.map("x_".__add__), st.integers(-9, 9) | text, max_size=2),
    )
)
def test_json_round_trip(item: Item) -> None:
    assert Item.from_json(item.to_json()) == item


def test_what_a_newer_version_added_is_kept() -> None:
    stored = orjson.loads(Item("i", "t", "user", "hi", 1.0).to_json()) | {"parts": [{"type": "image"}]}
    item = Item.from_json(orjson.dumps(stored))
    assert item.extra == {"parts": [{"type": "image"}]}
    assert orjson.loads(item.to_json()) == stored


def test_absent_fields_take_no_room() -> None:
    stored = orjson.loads(Item("i", "t", "user", "hi", 1.0).to_json())
    assert set(stored) == {"v", "item_id", "turn_id", "role", "content", "created"}


def test_an_unknown_schema_version_is_refused() -> None:
    with pytest.raises(OrchestratorError, match="schema version 2"):
        Item.from_json(b'{"v":2,"item_id":"i"}')


def test_bad_items_are_refused() -> None:
    with pytest.raises(ValueError, match="role 'robot'"):
        Item("i", "t", "robot", "", 1.0)
    with pytest.raises(ValueError, match="extra may not hold role"):
        Item("i", "t", "user", "", 1.0, extra={"role": "system"})
    with pytest.raises(BadRequest, match="cannot be stored"):
        Item("i", "t", "user", "\ud800", 1.0).to_json()


def test_view() -> None:
    view = Item("i", "t", "assistant", "", 1.0, tool_calls=(CALL,), pinned=True).view()
    assert (view.call_ids, view.result_of, view.pinned) == (("c1",), None, True)
    assert Item("r", "t", "tool", "42", 1.0, tool_call_id="c1").view().result_of == "c1"
