"""Owns the meaning of what the scripts return: raw answers in, records or errors out. No I/O."""

from __future__ import annotations

from typing import Any

import orjson

from policies.errors import SessionBusy, StoreUnavailable, TenantLimit
from policies.truncation import is_head
from session_store.items import Item, parse_live
from session_store.records import Replay

UNLIMITED = -1  # how a missing limit is written for reserve.lua
RETRY_AFTER_MAX_SECONDS = 1.0
_RETRY_AFTER_MIN_SECONDS = 0.05


def status(answer: Any) -> str:
    """The first word of a script's answer; "" for a refused script."""
    return "" if isinstance(answer, StoreUnavailable) else answer[0].decode()


def raise_refusal(*results: Any) -> None:
    """Raise the first answer that is an error."""
    for answer in results:
        if isinstance(answer, StoreUnavailable):
            raise answer


def begun(answer: Any, window_items: int, window_bytes: int) -> dict[str, Any]:
    """The fields of ``Begun`` that a granted begin's answer has."""
    _, token, version, _, start, head_data, read, known = answer
    items, unread = cut_window(start, head_data, read, window_items, window_bytes)
    return {
        "fencing_token": int(token),
        "version": int(version),
        "items": items,
        "truncated_store": unread,
        "known": frozenset(item_id.decode() for item_id in known),
    }


def cut_window(
    start: int, head_data: list[bytes], read: list[bytes], window_items: int, window_bytes: int
) -> tuple[tuple[Item, ...], int]:
    """(items, how many older ones stay behind) of what was read from index ``start`` on, and the heads before it.

    If the window would start inside a turn, the rest of that turn stays behind too, unless nothing else would be left;
    heads always come.
    """
    heads = parse_live(head_data)
    unread = start - len(head_data)
    items = parse_live(read)
    probed = start > 0 or len(read) > window_items or sum(map(len, read)) > window_bytes
    if probed and items:  # the first item is there to tell whose turn the window starts in
        cut = next((i for i, item in enumerate(items) if item.turn_id != items[0].turn_id), min(1, len(items) - 1))
        saved = [item for item in items[:cut] if is_head(item.view())]
        unread += cut - len(saved)
        heads += saved
        items = items[cut:]
    return (*heads, *items), unread


def replay(tenant: str, session_id: str, answer: Any) -> Replay:
    """The stored outcome behind an idempotency key."""
    _, turn_id, record, items = answer
    *_, stored = turn_record(record)
    return Replay(
        tenant=tenant,
        session_id=session_id,
        turn_id=turn_id.decode(),
        version=int(record.split(b" ", 2)[1]),
        items=tuple(parse_live(items)),
        reply=stored["reply"],
        truncation=stored["truncation"],
    )


def turn_record(record: bytes) -> tuple[int, int, bool, dict[str, Any]]:
    """(index of its first item, how many it appended, whether another may go on from it, {reply, truncation})."""
    place, _, body = record.partition(b"\n")
    _, _, first, count, goes_on = place.split()
    return int(first), int(count), goes_on == b"1", orjson.loads(body)


def busy(session_id: str, answer: Any) -> SessionBusy:
    remaining_seconds = answer[1] / 1000
    return SessionBusy(
        f"session {session_id} is running another turn (its lease ends in {remaining_seconds:.1f} s unless "
        "renewed): wait for it to finish",
        retry_after_seconds=_retry_after(remaining_seconds),
    )


def tenant_limit(tenant: str, answer: Any, wanted_tokens: int) -> TenantLimit:
    """Which limit of the tenant was reached, with the numbers."""
    _, used, limit, hint_ms = answer
    if status(answer) == "places":
        said = f"tenant {tenant} has {used} requests running, its limit is {limit}: wait for one to finish"
    elif hint_ms < 0:
        said = (
            f"this request could use {wanted_tokens} tokens, tenant {tenant} may reserve {limit}: "
            "lower max_tokens or shorten the prompt"
        )
    else:
        said = (
            f"this request could use {wanted_tokens} tokens, tenant {tenant} has reserved {used} of {limit}: "
            "wait for a request to finish"
        )
    return TenantLimit(said, retry_after_seconds=_retry_after(hint_ms / 1000) if hint_ms >= 0 else None)


def _retry_after(seconds: float) -> float:
    return min(max(seconds, _RETRY_AFTER_MIN_SECONDS), RETRY_AFTER_MAX_SECONDS)
