"""Owns what keeping KV is worth: the seconds its loss would cost the tenants, times the chance that they want it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from policies.types import Tier

HORIZON_SECONDS = 600.0  # wanted later than this is not wanted
TIER_WEIGHT = {Tier.INTERACTIVE: 4.0, Tier.STANDARD: 2.0, Tier.BATCH: 1.0}
NOBODYS_CHANCE = 0.05  # that KV which belongs to no session is wanted again
FIRST_GAP_SECONDS = 60.0  # between two turns, before two were seen
BUCKETS = 32
CHEAPEST, DEAREST = 1e-3, 1e4  # edges of the buckets, in weighted seconds per GiB


@dataclass(frozen=True, slots=True)
class SessionUse:
    """What has been seen of one session on one host."""

    tier: Tier
    turns: int
    gap_seconds: float | None  # between its turns, a running mean; None: there was one turn
    last_used: float  # monotonic seconds


def chance(use: SessionUse, now: float, horizon_seconds: float = HORIZON_SECONDS) -> float:
    """How likely the session's next turn comes within the horizon.

    Turns are taken to come at random at its own pace. Silence longer than that pace makes it the pace, and with n turns
    seen there is another one with n / (n + 1) (Laplace's rule of succession).
    """
    pace = max(use.gap_seconds or FIRST_GAP_SECONDS, now - use.last_used, 1e-3)
    return -math.expm1(-horizon_seconds / pace) * use.turns / (use.turns + 1)


def worth_seconds(uses: Iterable[SessionUse], now: float, lost_seconds: float) -> float:
    """What the tenants would lose by losing KV, in weighted seconds: the sum over the sessions that use it.

    Args:
        lost_seconds: to bring it back, or to compute it again.
    """
    wanted = [chance(use, now) * TIER_WEIGHT[use.tier] for use in uses]
    return lost_seconds * (sum(wanted) if wanted else NOBODYS_CHANCE)


def bucket(price: float) -> int:
    """The bucket ``0..BUCKETS-1`` of a price; the buckets are spaced evenly on a logarithmic scale."""
    if price <= CHEAPEST:
        return 0
    step = (math.log(DEAREST) - math.log(CHEAPEST)) / (BUCKETS - 1)
    return min(BUCKETS - 1, 1 + int((math.log(price) - math.log(CHEAPEST)) / step))


def supply_curve(priced: Iterable[tuple[float, int]]) -> tuple[int, ...]:
    """Bytes that could be freed at or below the price of each bucket: never falling, the last is all of them.

    Args:
        priced: (price in weighted seconds per GiB, bytes) of each piece.
    """
    amounts = [0] * BUCKETS
    for price, size in priced:
        amounts[bucket(price)] += size
    total, curve = 0, []
    for amount in amounts:
        total += amount
        curve.append(total)
    return tuple(curve)
