"""Owns the meaning of what the scripts return: raw answers in, records or errors out. No I/O."""

from __future__ import annotations

from typing import Any

import orjson

from policies.errors import SessionBusy, StoreUnavailable, TenantLimit
from policies.truncation import is_head
from session_store.items import Item
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


def window(answer: Any, window_items: int) -> tuple[int, int, tuple[Item, ...], int]:
    """(token, version, items, how many older items stayed in the store) of a granted begin.

    The answer holds one item more than the window. If the window would start inside a turn, the rest of
    that turn stays behind too, unless nothing else would be left; heads always come.
    """
    _, token, version, total, _, head_data, window_data = answer
    heads = [Item.from_json(data) for data in head_data]
    items = [Item.from_json(data) for data in window_data]
    if len(items) > window_items:
        cut = next((i for i, item in enumerate(items) if item.turn_id != items[0].turn_id), 1)
        heads += [item for item in items[:cut] if is_head(item.view())]
        items = items[cut:]
    kept = (*heads, *items)
    return int(token), int(version), kept, total - len(kept)


def replay(tenant: str, session_id: str, answer: Any) -> Replay:
    """The stored outcome behind an idempotency key."""
    _, turn_id, record, items = answer
    place, _, body = record.partition(b"\n")
    stored = orjson.loads(body)
    return Replay(
        tenant=tenant,
        session_id=session_id,
        turn_id=turn_id.decode(),
        version=int(place.split()[1]),
        items=tuple(Item.from_json(data) for data in items),
        reply=stored["reply"],
        truncation=stored["truncation"],
    )


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
