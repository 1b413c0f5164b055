"""Owns the tickets: requests that wait for a model, and placements whose request has not arrived at its host yet."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from model_pool.effects import HostRef, Placement
from policies.ordering import tier_then_arrival
from policies.types import Tier


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request for a model. Keeps its place by its original arrival."""

    ticket_id: str
    model: str
    arrival: float
    deadline: float
    tier: Tier = Tier.STANDARD


class TicketDesk:
    """A ticket is waiting, placed, or unknown."""

    def __init__(self, models: Iterable[str], aging_seconds: float = math.inf) -> None:
        self._aging_seconds = aging_seconds
        self._waiting: dict[str, dict[str, Ticket]] = {model: {} for model in models}
        self._placed: dict[str, tuple[Ticket, Placement]] = {}
        self._model_of: dict[str, str] = {}  # of waiting tickets

    def knows(self, ticket_id: str) -> bool:
        return ticket_id in self._model_of or ticket_id in self._placed

    def add(self, ticket: Ticket) -> None:
        self._waiting[ticket.model][ticket.ticket_id] = ticket
        self._model_of[ticket.ticket_id] = ticket.model

    def drop(self, ticket_id: str) -> Placement | None:
        """Forget a ticket; where it was placed, if it was."""
        model = self._model_of.pop(ticket_id, None)
        if model is not None:
            del self._waiting[model][ticket_id]
        return self.redeem(ticket_id)

    def redeem(self, ticket_id: str) -> Placement | None:
        """Forget a placed ticket; where it was placed. A waiting one waits on: its host died meanwhile."""
        placed = self._placed.pop(ticket_id, None)
        return placed[1] if placed else None

    def waiting(self, model: str) -> int:
        return len(self._waiting[model])

    def queue(self, model: str, now: float) -> list[Ticket]:
        """Waiting tickets in the order they are served."""
        return sorted(
            self._waiting[model].values(),
            key=lambda t: tier_then_arrival(t.tier, t.arrival, now, self._aging_seconds),
        )

    def overdue(self, now: float) -> list[Ticket]:
        return [t for queue in self._waiting.values() for t in queue.values() if t.deadline <= now]

    def place(self, ticket: Ticket, placement: Placement) -> None:
        self.drop(ticket.ticket_id)
        self._placed[ticket.ticket_id] = (ticket, placement)

    def unredeemed(self, host: HostRef, now: float) -> tuple[str, ...]:
        """Tickets placed on a host and still to be served by it."""
        return tuple(
            ticket_id
            for ticket_id, (_, placement) in self._placed.items()
            if placement.host == host and placement.expires > now
        )

    def forget_host(self, host: HostRef) -> list[Ticket]:
        """Drop all placements on a host; their tickets."""
        gone = [ticket for ticket, placement in self._placed.values() if placement.host == host]
        for ticket in gone:
            del self._placed[ticket.ticket_id]
        return gone

    def expire(self, now: float) -> None:
        """Drop placements that were not redeemed in time."""
        for ticket_id in [tid for tid, (_, p) in self._placed.items() if p.expires <= now]:
            del self._placed[ticket_id]
