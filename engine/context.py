"""Owns the record of one generation: its metadata and its state machine (design section 5). Torch-free."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from engine.protocol import GenerationRequest, Usage
from policies.types import ContextState, check_edge

S = ContextState
TERMINAL = frozenset({S.FINISHED, S.CANCELLED, S.FAILED, S.EXPIRED})
EDGES: dict[ContextState, frozenset[ContextState]] = {
    S.WAITING: frozenset({S.RUNNING, S.SWAPPED}) | TERMINAL,
    S.RUNNING: frozenset({S.PREEMPTED, S.SWAPPING_OUT}) | TERMINAL,
    S.PREEMPTED: frozenset({S.WAITING}),
    S.SWAPPING_OUT: frozenset({S.SWAPPED, S.PREEMPTED}) | TERMINAL,
    S.SWAPPED: frozenset({S.SWAPPING_IN, S.WAITING}) | TERMINAL,
    S.SWAPPING_IN: frozenset({S.RUNNING, S.PREEMPTED}) | TERMINAL,
    **{state: frozenset() for state in TERMINAL},
}
EVENTS_KEPT = 32
NO_BLOCK = -1  # in a block table: it lay before every layer's window, and was let go

_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Edge:
    """One state change of one context."""

    at: float
    old: ContextState
    new: ContextState
    reason: str


@dataclass(slots=True, eq=False)
class Context:
    """One generation. ``num_computed`` catches up with ``num_tokens``; there is no prefill or decode phase.

    Token ids, sampling parameters and the request are our own copies (frozen data), never the caller's objects.
    """

    request: GenerationRequest
    namespace: bytes  # root of its block keys
    added: float  # monotonic seconds
    context_id: int = field(default_factory=lambda: next(_ids))
    state: ContextState = S.WAITING
    token_ids: list[int] = field(init=False)
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids known so far
    num_computed: int = 0
    num_published: int = 0  # leading blocks already offered to the prefix cache
    max_computed: int = 0  # high-water mark: what is computed again below it is recomputed
    cached_tokens: int | None = None  # prompt tokens found in the cache at first admission
    recomputed_tokens: int = 0
    preemptions: int = 0
    bypassed: int = 0  # later ones that were started before it
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    events: deque[Edge] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.delivered_token_ids]

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.request.generation

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def generated_ids(self) -> list[int]:
        """Wherever they were generated: here, or on a host that died."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def max_token_limit(self) -> int:
        """Most tokens this context can come to hold."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @property
    def remaining_tokens(self) -> int:
        return self.max_token_limit - len(self.token_ids)

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    def move(self, new: ContextState, at: float, reason: str) -> None:
        """Take one edge of the table and record it; IllegalTransition if there is none."""
        check_edge(EDGES, self.state, new, f"context {self.context_id} ({self.request.request_id})")
        self.events.append(Edge(at, self.state, new, reason))
        self.state = new

    def usage(self) -> Usage:
        started = self.started if self.started is not None else self.added
        first = self.first_token if self.first_token is not None else started
        last = self.last_token if self.last_token is not None else first
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=self.num_generated,
            cached_tokens=self.cached_tokens or 0,
            recomputed_tokens=self.recomputed_tokens,
            queue_seconds=started - self.added,
            prefill_seconds=first - started,
            decode_seconds=last - first,
        )
