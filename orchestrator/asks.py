"""Owns what a route asks of a turn, and what it hears of it. Knows nothing of HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import TokenLogprob, Usage
from orchestrator.config import ModelConfig, TenantConfig
from orchestrator.messages import NewItem
from orchestrator.toolcalls import ToolCall
from policies.types import TruncationRecord
from session_store.items import Item


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the store a turn has its history. None at all: a stateless request."""

    session_id: str
    kind: str = "session"  # of a session that the turn makes
    must_exist: bool = False
    after: str | None = None  # the turn of a chain that this one goes on from; where it cannot, it forks
    fork_id: str = ""  # the name of that fork


@dataclass(frozen=True, slots=True)
class History:
    """What a turn goes on from."""

    items: tuple[Item, ...]
    unread: int  # older ones
    known: frozenset[str]  # ids that the request names, of items that are stored


@dataclass(frozen=True, slots=True)
class Ask:
    """A validated request."""

    tenant: TenantConfig
    model: ModelConfig
    items: tuple[NewItem, ...]
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    max_tokens: int | None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None  # alternatives per token; None: no log probabilities
    n: int = 1  # answers; more than one only without a session
    place: Place | None = None
    instructions: str | None = None  # a system message of this turn alone: not stored
    history: History | None = None  # of a stateless request; a session has its own
    references: tuple[str, ...] = ()  # ids of items that must be stored in the session
    most_calls: int = 0  # of functions in the answer; 0: none are looked for
    may_truncate: bool = True  # else a history that does not fit is an error
    reply: Mapping[str, Any] = field(default_factory=dict)  # kept with the turn, for who reads it later
    idempotency_key: str | None = None
    fingerprint: str | None = None  # of the body, to tell a retry from another request under the same key
    keep_alive_seconds: float | None = None  # the model stays awake for so long after it; None: as configured
    pin_seconds: float = 0.0  # the session's KV is evicted last for so long
    turn_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrival: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Started:
    """The first token is there; headers may go."""

    truncation: TruncationRecord | None
    first: Usage | None
    load_seconds: float
    session_id: str | None = None  # where it is stored
    replay: tuple[str, tuple[Item, ...], Mapping[str, Any]] | None = None  # a finished turn, its items and reply


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one of the answers."""

    text: str
    index: int = 0  # of the answer
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Called:
    """The first answer wants functions called."""

    calls: tuple[ToolCall, ...]
    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The turn is committed."""

    finish_reasons: tuple[str, ...]  # of each answer: stop, length or tool_calls
    prompt_tokens: int
    completion_tokens: int  # of all answers
    cached_tokens: int
    usage: Usage | None  # of the first answer
    hosts: tuple[str, ...] = ()


Event = Started | Piece | Called | Done
