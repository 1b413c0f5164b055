"""Owns the decision which items of a session go into one prompt.

Heads (system, developer, pinned) always go. The rest forms groups: a whole turn, or several turns that a
tool call and its results tie together. A prompt is the heads and the longest run of newest groups that
fits, so a call is never sent without its results nor a result without its call (langchain#33245, #34282).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.errors import BadRequest, ContextLengthExceeded
from policies.types import ItemView, TruncationRecord

HEAD_ROLES = frozenset({"system", "developer"})
Count = Callable[[tuple[int, ...]], int]


@dataclass(frozen=True, slots=True)
class Group:
    """Items that stay or go together, as ascending indices."""

    indices: tuple[int, ...]
    turn_ids: tuple[str, ...]
    orphan_result: str | None = None  # a tool call that is answered here but made nowhere in the items
    open_call: str | None = None  # one that is made here and answered nowhere


def is_head(item: ItemView) -> bool:
    """Whether the item belongs into every prompt of its session."""
    return item.pinned or item.role in HEAD_ROLES


def group_turns(items: Sequence[ItemView]) -> tuple[Group, ...]:
    """Group everything but the heads, ordered by each group's newest item."""
    calls = _calls_answered(items)
    answered = {(call, items[index].result_of) for index, call in calls.items()}
    heads = _heads(items, calls)
    union = {item.turn_id: item.turn_id for item in items}
    for index, call in calls.items():
        if call is not None and index not in heads:
            _join(union, items[call].turn_id, items[index].turn_id)
    members: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        if index not in heads:
            members.setdefault(_root(union, item.turn_id), []).append(index)
    return tuple(
        Group(
            indices=tuple(indices),
            turn_ids=tuple(dict.fromkeys(items[i].turn_id for i in indices)),
            orphan_result=next((items[i].result_of for i in indices if calls.get(i, i) is None), None),
            open_call=next((call for i in indices for call in items[i].call_ids if (i, call) not in answered), None),
        )
        for indices in sorted(members.values(), key=lambda indices: indices[-1])
    )


def fit(items: Sequence[ItemView], budget_tokens: int, count: Count) -> tuple[tuple[int, ...], TruncationRecord]:
    """Choose the items of a prompt of at most ``budget_tokens``.

    Args:
        items: the session's window in order, the new message last.
        budget_tokens: what the prompt may take: the model's window less the answer's limit.
        count: prompt tokens of exactly these items (ascending indices) in the model's template; may be
            non-additive, should not shrink as older groups join. Called O(log groups) times.

    Returns:
        The ascending indices to send, and the record of what was cut. ``full_tokens`` counts everything
        that could have been sent, which an orphaned tool result could not.

    Raises:
        ContextLengthExceeded: heads and the newest group alone do not fit.
        BadRequest: the newest group answers a tool call that is not among the items, or it, or the one before it,
            makes one that is not answered.
    """
    groups = group_turns(items)
    _check_newest(groups, len(items))
    _check_answered(groups[-2:])
    grouped = {index for group in groups for index in group.indices}
    heads = tuple(index for index in range(len(items)) if index not in grouped)
    sendable = [group for group in groups if group.orphan_result is None and group.open_call is None]
    kept, prompt_tokens, full_tokens = _longest_suffix(heads, sendable, budget_tokens, count)
    reasons = []
    if full_tokens > budget_tokens:
        reasons.append(f"{full_tokens} tokens exceed the budget of {budget_tokens}")
    if len(sendable) < len(groups):
        reasons.append("a tool result without its call, or a call without its result, cannot be sent")
    stays = set(kept)
    dropped = [item for index, item in enumerate(items) if index not in stays]
    return kept, TruncationRecord(
        budget_tokens=budget_tokens,
        prompt_tokens=prompt_tokens,
        full_tokens=full_tokens,
        dropped_turns=len({item.turn_id for item in dropped}),
        dropped_items=tuple(item.item_id for item in dropped),
        reason="; ".join(reasons),
    )


def check_calls(items: Sequence[ItemView]) -> None:
    """BadRequest where the newest items answer a call that was not made, or a call is not answered."""
    groups = group_turns(items)
    _check_newest(groups, len(items))
    _check_answered(groups[-2:])


def _check_newest(groups: Sequence[Group], item_count: int) -> None:
    if groups and groups[-1].orphan_result is not None:
        raise BadRequest(
            f"the tool result for call {groups[-1].orphan_result} answers no call in the last {item_count} "
            "items of this conversation: send it with the assistant message that made the call",
            param="messages",
        )


def _check_answered(newest: Sequence[Group]) -> None:
    """As OpenAI's API does it: a conversation does not go on past a call that nobody has answered."""
    for group in newest:
        if group.open_call is not None:
            raise BadRequest(f"No tool output found for function call {group.open_call}.", param="messages")


def _longest_suffix(
    heads: tuple[int, ...], groups: Sequence[Group], budget_tokens: int, count: Count
) -> tuple[tuple[int, ...], int, int]:
    """(indices, their tokens, tokens of all) of the heads and as many newest groups as fit."""

    def prompt(first: int) -> tuple[int, ...]:
        return tuple(sorted(heads + tuple(i for group in groups[first:] for i in group.indices)))

    best = prompt(0)
    best_tokens = full_tokens = count(best)
    if full_tokens <= budget_tokens:
        return best, best_tokens, full_tokens
    fits = max(len(groups) - 1, 0)  # the newest group always goes
    if fits > 0:
        best = prompt(fits)
        best_tokens = count(best)
    if best_tokens > budget_tokens:
        raise ContextLengthExceeded(
            f"the newest message with its pinned and system items takes {best_tokens} tokens, "
            f"{budget_tokens} are left for the prompt: shorten it, or lower max_tokens",
            param="messages",
        )
    too_long = 0
    while fits - too_long > 1:  # whatever is returned has been counted itself, monotone or not
        middle = (too_long + fits) // 2
        candidate = prompt(middle)
        tokens = count(candidate)
        if tokens <= budget_tokens:
            fits, best, best_tokens = middle, candidate, tokens
        else:
            too_long = middle
    return best, best_tokens, full_tokens


def _calls_answered(items: Sequence[ItemView]) -> dict[int, int | None]:
    """Index of each tool result → index of the call it answers: the nearest one before, as models reuse
    call ids."""
    made_at: dict[str, int] = {}
    answered: dict[int, int | None] = {}
    for index, item in enumerate(items):
        if item.result_of is not None:
            answered[index] = made_at.get(item.result_of)
        made_at.update(dict.fromkeys(item.call_ids, index))
    return answered


def _heads(items: Sequence[ItemView], calls: dict[int, int | None]) -> set[int]:
    """Heads, and the calls and results they are tied to. An orphaned result is never one: it cannot be
    sent."""
    heads = {index for index, item in enumerate(items) if is_head(item) and calls.get(index, index) is not None}
    tied = {call for index, call in calls.items() if call is not None and heads & {index, call}}
    return heads | tied | {index for index, call in calls.items() if call in tied}


def _root(union: dict[str, str], turn_id: str) -> str:
    while union[turn_id] != turn_id:
        turn_id = union[turn_id]
    return turn_id


def _join(union: dict[str, str], one: str, other: str) -> None:
    union[_root(union, one)] = _root(union, other)
