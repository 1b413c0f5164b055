"""Owns the order in which waiting requests are served."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


def tier_then_arrival(
    tier: int, arrival: float, now: float = 0.0, aging_seconds: float = math.inf
) -> tuple[int, float]:
    """Sort key: best tier first, then first come. A request moves up one tier per ``aging_seconds`` it waited.

    Ageing bounds starvation: a BATCH request (tier 2) that waited ``2 * aging_seconds`` sorts with the interactive
    ones, before all that came after it. The default does not age.
    """
    steps = math.floor(max(0.0, now - arrival) / aging_seconds)
    return max(0, int(tier) - steps), arrival


@dataclass(frozen=True, slots=True)
class OrderView:
    """What an order sees of one generation."""

    tier: int
    arrival: float  # wall-clock seconds
    tokens_left: int  # at most: still to be computed, those it may yet say included
    bypassed: int = 0  # later ones that were started before it


class Ordering(Protocol):
    """A sort key: the smallest is started first, and gives its blocks up last."""

    def __call__(self, view: OrderView, now: float) -> tuple[float, ...]: ...


class FirstCome:
    """``fcfs``: by arrival alone."""

    def __call__(self, view: OrderView, now: float) -> tuple[float, ...]:
        return (view.arrival,)


class ShortestFirst:
    """``sjf``: by what is left to do. Who was bypassed ``most_bypassed`` times goes first, by arrival."""

    def __init__(self, most_bypassed: int = 16) -> None:
        self._most_bypassed = most_bypassed

    def __call__(self, view: OrderView, now: float) -> tuple[float, ...]:
        if view.bypassed >= self._most_bypassed:
            return 0, view.arrival
        return 1, view.tokens_left, view.arrival


class TierFirst:
    """``priority``: by tier, then arrival; waiting lifts the tier (see ``tier_then_arrival``)."""

    def __init__(self, aging_seconds: float = 60.0) -> None:
        self._aging_seconds = aging_seconds

    def __call__(self, view: OrderView, now: float) -> tuple[float, ...]:
        return tier_then_arrival(view.tier, view.arrival, now, self._aging_seconds)
