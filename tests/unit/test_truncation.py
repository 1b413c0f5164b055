"""Truncation: what is kept, what goes together, and how few times the prompt is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import BadRequest, ContextLengthExceeded
from policies.truncation import fit, group_turns, is_head
from policies.types import ItemView


def item(name: str, turn: str, role: str = "user", **more: object) -> ItemView:
    return ItemView(item_id=name, turn_id=turn, role=role, **more)  # type: ignore[arg-type]


def one_each(indices: tuple[int, ...]) -> int:
    return len(indices)


def names(items: Sequence[ItemView], indices: tuple[int, ...]) -> list[str]:
    return [items[i].item_id for i in indices]


CALLING = (
    item("s", "t0", "system"),
    item("u1", "t1"),
    item("a1", "t1", "assistant"),
    item("u2", "t2"),
    item("a2", "t2", "assistant", call_ids=("c1", "c2")),
    item("r1", "t3", "tool", result_of="c1"),  # the results come in as the next request
    item("r2", "t3", "tool", result_of="c2"),
    item("a3", "t3", "assistant"),
    item("u4", "t4"),
)


def test_a_call_and_its_parallel_results_are_one_group_across_turns() -> None:
    assert [g.turn_ids for g in group_turns(CALLING)] == [("t1",), ("t2", "t3"), ("t4",)]


@pytest.mark.parametrize(("budget", "kept"), [(9, 9), (8, 7), (7, 7), (6, 2), (2, 2)])
def test_the_cut_never_falls_among_a_call_and_its_results(budget: int, kept: int) -> None:
    indices, record = fit(CALLING, budget, one_each)
    assert len(indices) == record.prompt_tokens == kept
    assert names(CALLING, indices)[0] == "s"
    assert {"a2", "r1", "r2"}.issubset(names(CALLING, indices)) == (kept >= 7)


def test_the_record_says_what_was_cut_and_why() -> None:
    _, record = fit(CALLING, 7, one_each)
    assert record.dropped_items == ("u1", "a1")
    assert record.header() == "turns=1, items=2, tokens=2"
    assert record.reason == "9 tokens exceed the budget of 7"
    assert not fit(CALLING, 9, one_each)[1].cut


def test_heads_and_the_newest_group_that_do_not_fit_raise_with_the_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"takes 2 tokens, 1 are left") as raised:
        fit(CALLING, 1, one_each)
    assert raised.value.param == "messages"


def test_pinned_items_stay_and_take_their_results_along() -> None:
    items = (
        item("u1", "t1"),
        item("a1", "t1", "assistant", call_ids=("c",), pinned=True),
        item("r1", "t1", "tool", result_of="c"),
        item("u2", "t2"),
        item("u3", "t3"),
    )
    indices, _ = fit(items, 3, one_each)
    assert names(items, indices) == ["a1", "r1", "u3"]


def test_an_orphaned_result_goes_with_its_turn_even_if_everything_fits() -> None:
    items = (item("r", "t1", "tool", result_of="gone"), item("a", "t1", "assistant"), item("u", "t2"))
    indices, record = fit(items, 100, one_each)
    assert names(items, indices) == ["u"]
    assert record.dropped_items == ("r", "a")
    assert "without its call" in record.reason


def test_an_orphaned_result_as_the_new_message_is_the_clients_error() -> None:
    with pytest.raises(BadRequest, match="call gone answers no call"):
        fit((item("u", "t1"), item("r", "t2", "tool", result_of="gone")), 100, one_each)


@pytest.mark.parametrize("turn", ["t1", "t2"])
def test_a_call_that_nobody_has_answered_is_the_clients_error(turn: str) -> None:
    """Whether the client sends it or the session ended with it: the model waits for the output."""
    call = item("a", turn, "assistant", call_ids=("c1", "c2"))
    items = (item("u1", "t1"), call, item("r", "t2", "tool", result_of="c1"), item("u2", "t2"))
    with pytest.raises(BadRequest, match="No tool output found for function call c2"):
        fit(items, 100, one_each)


def test_a_call_of_long_ago_without_its_result_goes_with_its_turn() -> None:
    items = (item("u1", "t1"), item("a1", "t1", "assistant", call_ids=("c",)), item("u2", "t2"), item("u3", "t3"))
    indices, record = fit(items, 100, one_each)
    assert names(items, indices) == ["u2", "u3"]
    assert record.dropped_items == ("u1", "a1") and "a call without its result" in record.reason


def test_a_reused_call_id_means_the_nearest_call_before() -> None:
    items = (
        item("a1", "t1", "assistant", call_ids=("call_0",)),
        item("r1", "t1", "tool", result_of="call_0"),
        item("a2", "t2", "assistant", call_ids=("call_0",)),
        item("r2", "t2", "tool", result_of="call_0"),
    )
    assert [g.turn_ids for g in group_turns(items)] == [("t1",), ("t2",)]


def test_heads_alone_and_nothing_at_all() -> None:
    assert fit((item("s", "t", "system"),), 1, one_each)[0] == (0,)
    assert fit((), 0, one_each)[0] == ()
    with pytest.raises(ContextLengthExceeded):
        fit((item("s", "t", "system"),), 0, one_each)


CALLS = st.sampled_from(["c1", "c2", "c3", "c4"])


@st.composite
def conversations(draw: st.DrawFn) -> tuple[ItemView, ...]:
    items: list[ItemView] = []
    for turn in range(draw(st.integers(1, 12))):
        for _ in range(draw(st.integers(1, 4))):
            role = draw(st.sampled_from(["system", "user", "user", "assistant", "assistant", "tool"]))
            calls = tuple(draw(st.lists(CALLS, max_size=2, unique=True))) if role == "assistant" else ()
            items.append(
                ItemView(
                    item_id=f"i{len(items)}",
                    turn_id=f"t{turn}",
                    role=role,
                    call_ids=calls,
                    result_of=draw(CALLS) if role == "tool" else None,
                    pinned=draw(st.integers(0, 9)) == 0,
                )
            )
    return tuple(items)


def call_of(items: Sequence[ItemView], result: int) -> int | None:
    """Oracle: the nearest earlier item that makes the call."""
    wanted = items[result].result_of
    return next((i for i in range(result - 1, -1, -1) if wanted in items[i].call_ids), None)


class Counter:
    """Tokens of a prompt: weights, a fixed frame, and whole blocks of three (so it is not additive)."""

    def __init__(self, weights: list[int]) -> None:
        self.weights = weights
        self.calls = 0

    def __call__(self, indices: tuple[int, ...]) -> int:
        assert list(indices) == sorted(set(indices))
        self.calls += 1
        return 4 + 3 * math.ceil(sum(self.weights[i % len(self.weights)] for i in indices) / 3)


@given(conversations(), st.integers(0, 200), st.lists(st.integers(1, 9), min_size=1, max_size=7))
def test_fit_keeps_the_invariants(items: tuple[ItemView, ...], budget: int, weights: list[int]) -> None:
    count = Counter(weights)
    groups = group_turns(items)
    try:
        indices, record = fit(items, budget, count)
    except ContextLengthExceeded:
        assert count.calls <= 2
        return
    except BadRequest:
        assert groups[-1].orphan_result is not None or any(group.open_call for group in groups[-2:])
        return
    kept = set(indices)
    assert count.calls <= 2 + math.ceil(math.log2(max(len(groups), 1)))
    assert record.prompt_tokens == count(indices) <= budget
    assert record.dropped_items == tuple(v.item_id for i, v in enumerate(items) if i not in kept)

    tied: set[int] = set()
    for i, view in enumerate(items):
        if view.result_of is None:
            continue
        call = call_of(items, i)
        assert (i in kept) == (call is not None and call in kept)  # a result goes exactly with its call
        if call is not None:
            tied |= {i, call}
    for i, view in enumerate(items):
        if is_head(view) and view.role != "tool":
            assert i in kept
    for turn in {view.turn_id for view in items}:
        plain = {i for i, v in enumerate(items) if v.turn_id == turn and not is_head(v) and i not in tied}
        assert plain <= kept or not plain & kept  # a turn is not split
    if groups:
        assert set(groups[-1].indices) <= kept


@given(conversations(), st.integers(0, 200), st.lists(st.integers(1, 9), min_size=1, max_size=7))
def test_fit_keeps_the_longest_suffix(items: tuple[ItemView, ...], budget: int, weights: list[int]) -> None:
    count = Counter(weights)
    try:
        indices, _ = fit(items, budget, count)
    except BadRequest:
        return
    sendable = [g for g in group_turns(items) if g.orphan_result is None and g.open_call is None]
    dropped = [g for g in sendable if not set(g.indices) <= set(indices)]
    assert dropped == sendable[: len(dropped)]
    if dropped:
        assert count(tuple(sorted({*indices, *dropped[-1].indices}))) > budget


@given(st.integers(1, 60), st.data())
def test_a_count_that_is_not_monotone_still_gives_a_counted_answer(size: int, data: st.DataObject) -> None:
    items = tuple(item(f"i{n}", f"t{n}") for n in range(size))
    tokens = data.draw(st.lists(st.integers(0, 20), min_size=size + 1, max_size=size + 1))
    try:
        indices, record = fit(items, 10, lambda kept: tokens[len(kept)])
    except ContextLengthExceeded:
        assert tokens[min(size, 1)] > 10
        return
    assert record.prompt_tokens == tokens[len(indices)] <= 10
