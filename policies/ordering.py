"""Owns the order in which waiting requests are served."""

from __future__ import annotations

import math


def tier_then_arrival(
    tier: int, arrival: float, now: float = 0.0, aging_seconds: float = math.inf
) -> tuple[int, float]:
    """Sort key: best tier first, then first come. A request moves up one tier per ``aging_seconds`` it waited.

    Ageing bounds starvation: a BATCH request (tier 2) that waited ``2 * aging_seconds`` sorts with the interactive
    ones, before all that came after it. The default does not age.
    """
    steps = math.floor(max(0.0, now - arrival) / aging_seconds)
    return max(0, int(tier) - steps), arrival
