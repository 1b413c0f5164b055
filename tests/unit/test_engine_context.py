"""A context's state machine and counters."""

from __future__ import annotations

import itertools

import pytest

from engine.context import EDGES, EVENTS_KEPT, TERMINAL, Context
from policies.errors import IllegalTransition
from policies.types import ContextState
from tests.engine_helpers import request


def make(delivered: tuple[int, ...] = ()) -> Context:
    return Context(request("r", [1, 2, 3], 5, delivered=delivered), b"", 10.0)


def test_the_table_names_every_state_and_terminal_ones_have_no_way_out() -> None:
    assert set(EDGES) == set(ContextState)
    assert {state for state, edges in EDGES.items() if not edges} == TERMINAL


@pytest.mark.parametrize(("old", "new"), list(itertools.product(ContextState, ContextState)))
def test_only_edges_of_the_table_can_be_taken(old: ContextState, new: ContextState) -> None:
    context = make()
    context.state = old
    if new in EDGES[old]:
        context.move(new, 1.0, "why")
        assert context.state is new
        assert (context.events[-1].old, context.events[-1].new, context.events[-1].reason) == (old, new, "why")
    else:
        with pytest.raises(IllegalTransition, match=f"{old} → {new}"):
            context.move(new, 1.0, "why")
        assert context.state is old and not context.events


def test_only_the_last_events_are_kept() -> None:
    context = make()
    context.move(ContextState.RUNNING, 0.0, "admitted")
    for at in range(EVENTS_KEPT):
        context.move(ContextState.PREEMPTED, at, "blocks")
        context.move(ContextState.WAITING, at, "recompute")
        context.move(ContextState.RUNNING, at, "admitted")
    assert len(context.events) == EVENTS_KEPT


def test_delivered_tokens_are_generated_tokens() -> None:
    context = make(delivered=(7, 8))
    assert context.token_ids == [1, 2, 3, 7, 8]
    assert (context.num_generated, context.remaining_tokens, context.max_token_limit) == (2, 3, 8)
    assert context.usage().completion_tokens == 2


def test_times_of_a_context_that_never_started_are_zero() -> None:
    usage = make().usage()
    assert (usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds) == (0.0, 0.0, 0.0)
