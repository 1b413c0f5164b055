"""Owns the picture of an engine for people: who holds its memory, who waits for it, and who ended how. Torch-free.

A snapshot is plain frozen data: it shares nothing with the engine, and crosses process borders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.blocks import Books, Place
from engine.context import EVENTS_KEPT, NO_BLOCK, Context, Edge
from engine.kv_cache import Away
from engine.protocol import DiskStats, EngineLimits
from engine.scheduler import Scheduler
from engine.tiers import HostBooks
from policies.types import ContextState

ENDED_KEPT = 64
EARLIER = "earlier"  # than the edges kept: in which states that time was spent is not known any more

Ending = Literal["eos", "stop string", "length", "cancelled", "failed", "expired"]
WaitReason = Literal["batch_full", "blocks", "behind", "same_prompt", "next_step"]
# the contexts that hold it, or what it is instead
BlockUse = tuple[int, ...] | Literal["free", "cached", "pinned", "fenced", "arriving", "retired", "unexplained"]


@dataclass(frozen=True, slots=True)
class Wait:
    """What a waiting context waits for."""

    position: int  # in the queue; 1 is the next to start
    reason: WaitReason
    blocks_wanted: int  # new ones it is expected to take until its end
    blocks_free: int  # cached ones included
    blocks_promised: int  # of them: what those that run are expected to take
    said: str


@dataclass(frozen=True, slots=True)
class ContextSnapshot:
    """One live generation. ``memory_bytes`` counts a shared block for each of its holders."""

    context_id: int
    request_id: str
    generation: int
    session: str | None
    tenant: str
    tier: str
    state: ContextState
    prompt_tokens: int
    tokens: int
    computed_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    max_token_limit: int
    blocks_held: int
    blocks_shared: int  # of them
    memory_bytes: int
    estimated_memory_bytes: int  # at ``max_token_limit``
    preemptions: int
    age_seconds: float
    state_seconds: float  # in its state, without a break
    seconds_in: dict[str, float]  # state → all time spent in it
    edges: tuple[Edge, ...]  # the last ones; ``at`` on the clock of ``EngineSnapshot.at``
    wait: Wait | None


@dataclass(frozen=True, slots=True)
class EndedContext:
    """How a generation ended."""

    context_id: int
    request_id: str
    generation: int
    session: str | None
    tenant: str
    at: float  # monotonic seconds
    how: Ending
    reason: str
    prompt_tokens: int
    generated_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Everything an operator may want to know of one engine at one moment."""

    at: float  # monotonic seconds
    wall: float  # the same moment, seconds since the epoch
    awake: bool
    limits: EngineLimits
    max_running: int  # what the limits come to
    block_bytes: int
    pool: Books
    host: HostBooks
    disk: DiskStats
    supply: tuple[int, ...]  # bytes of the device that could be freed at or below each price of policies.pricing
    states: dict[str, int]  # state → live contexts in it
    contexts: tuple[ContextSnapshot, ...]  # those that run, then the queue in its order
    blocks: tuple[BlockUse, ...]
    unfreed_blocks: int  # with references that no live context explains: a bug of ours if not 0
    ended: tuple[EndedContext, ...]  # oldest first


def take_snapshot(
    scheduler: Scheduler,
    contexts: Iterable[Context],
    ended: Iterable[EndedContext],
    *,
    block_bytes: int,
    disk: DiskStats,
    supply: tuple[int, ...],
    awake: bool,
    now: float,
    wall: float,
) -> EngineSnapshot:
    """Picture an engine between two steps.

    Args:
        contexts: all that live, whatever the scheduler thinks of them.
        block_bytes: of one KV block.
        now: monotonic seconds.
        wall: seconds since the epoch; ages the queue as the scheduler does.
    """
    pool, size, live = scheduler.kv.pool, scheduler.limits.block_size, list(contexts)
    references = pool.references()
    arriving = scheduler.kv.arriving_blocks
    waits = _waits(scheduler, wall)
    live.sort(key=lambda c: waits[c.context_id].position if c.context_id in waits else 0)
    owners = _owners(live, len(references))
    return EngineSnapshot(
        at=now,
        wall=wall,
        awake=awake,
        limits=scheduler.limits,
        max_running=scheduler.most_running,
        block_bytes=block_bytes,
        pool=pool.books(),
        host=scheduler.kv.host.books(),
        disk=disk,
        supply=supply,
        states={str(state): count for state, count in Counter(c.state for c in live).items()},
        contexts=tuple(_context(c, references, block_bytes, size, waits.get(c.context_id), now) for c in live),
        blocks=tuple(
            _use(place, held_by, block in arriving)
            for block, (place, held_by) in enumerate(zip(pool.places(), owners, strict=True))
        ),
        unfreed_blocks=sum(
            refs > len(held_by) + (block in arriving)
            for block, (refs, held_by) in enumerate(zip(references, owners, strict=True))
        ),
        ended=tuple(ended),
    )


def ended_context(context: Context, *, said_end: bool) -> EndedContext:
    """The record of a context in a terminal state; ``said_end``: its last token was the model's end token."""
    how: Ending
    reason = context.events[-1].reason
    if context.state is ContextState.FINISHED:
        how = "length" if reason == "length" else "eos" if said_end else "stop string"
    elif context.state is ContextState.CANCELLED:
        how = "cancelled"
    else:
        how = "expired" if context.state is ContextState.EXPIRED else "failed"
    request = context.request
    return EndedContext(
        context_id=context.context_id,
        request_id=request.request_id,
        generation=request.generation,
        session=request.session,
        tenant=request.tenant,
        at=context.events[-1].at,
        how=how,
        reason=reason,
        prompt_tokens=len(request.prompt_token_ids),
        generated_tokens=context.num_generated,
        preemptions=context.preemptions,
    )


def seconds_in_states(context: Context, now: float) -> dict[str, float]:
    """State → seconds spent in it; they add up to the context's age."""
    found: dict[str, float] = {}
    since = context.added
    forgotten = len(context.events) == EVENTS_KEPT  # edges before the first kept, perhaps
    for edge in context.events:
        state = EARLIER if forgotten else edge.old.value
        found[state] = found.get(state, 0.0) + edge.at - since
        since, forgotten = edge.at, False
    state = context.state.value
    found[state] = found.get(state, 0.0) + now - since
    return found


# -- inside ----------------------------------------------------------------------

_WORDS: dict[Place, BlockUse] = {
    Place.FREE: "free",
    Place.CACHED: "cached",
    Place.PINNED: "pinned",
    Place.FENCED: "fenced",
    Place.RETIRED: "retired",
}


def _context(
    context: Context, references: Sequence[int], block_bytes: int, block_size: int, wait: Wait | None, now: float
) -> ContextSnapshot:
    request, table = context.request, [block for block in context.block_table if block != NO_BLOCK]
    return ContextSnapshot(
        context_id=context.context_id,
        request_id=request.request_id,
        generation=request.generation,
        session=request.session,
        tenant=request.tenant,
        tier=request.tier.name.lower(),
        state=context.state,
        prompt_tokens=len(request.prompt_token_ids),
        tokens=context.num_tokens,
        computed_tokens=context.num_computed,
        cached_tokens=context.cached_tokens or 0,
        recomputed_tokens=context.recomputed_tokens,
        generated_tokens=context.num_generated,
        max_token_limit=context.max_token_limit,
        blocks_held=len(table),
        blocks_shared=sum(references[block] > 1 for block in table),
        memory_bytes=len(table) * block_bytes,
        estimated_memory_bytes=-(-context.max_token_limit // block_size) * block_bytes,
        preemptions=context.preemptions,
        age_seconds=now - context.added,
        state_seconds=now - (context.events[-1].at if context.events else context.added),
        seconds_in=seconds_in_states(context, now),
        edges=tuple(context.events),
        wait=wait,
    )


def _owners(contexts: Iterable[Context], num_blocks: int) -> list[list[int]]:
    owners: list[list[int]] = [[] for _ in range(num_blocks)]
    for context in contexts:
        for block in (block for block in context.block_table if block != NO_BLOCK):
            owners[block].append(context.context_id)
    return owners


def _use(place: Place, owners: Sequence[int], arriving: bool) -> BlockUse:
    if place is Place.HELD:
        return tuple(owners) or ("arriving" if arriving else "unexplained")
    return _WORDS[place]


def _waits(scheduler: Scheduler, wall: float) -> dict[int, Wait]:
    """Context id → what it waits for, by the scheduler's own order and bounds."""
    queue = sorted(scheduler.waiting, key=lambda context: scheduler.order(context, wall))
    promised = sum(max(0, scheduler.expected_blocks(c) - len(c.block_table)) for c in scheduler.running)
    free = scheduler.kv.pool.num_free
    found: dict[int, Wait] = {}
    for position, context in enumerate(queue, 1):
        wanted = scheduler.expected_blocks(context)
        reason: WaitReason = "behind"
        said = f"{position - 1} before it; wants {wanted} blocks"
        if position == 1:
            reason, wanted, said = _first_waits(scheduler, context, wanted, promised)
        found[context.context_id] = Wait(position, reason, wanted, free, promised, said)
    return found


def _first_waits(scheduler: Scheduler, context: Context, expected: int, promised: int) -> tuple[WaitReason, int, str]:
    """Why the first of the queue does not run yet, and the blocks it wants beside those found in the cache."""
    found = scheduler.kv.find(context)
    wanted = expected - sum(not isinstance(place, Away) for place in found)
    running = len(scheduler.running) + len(scheduler.arriving)
    if running >= scheduler.most_running:
        return "batch_full", wanted, f"a place: {running} of {scheduler.most_running} run"
    if not scheduler.fits(context, found):
        return "blocks", wanted, f"{wanted} blocks: {scheduler.kv.pool.num_free} free, {promised} of them promised"
    if scheduler.awaits_another(context):
        return "same_prompt", wanted, "tokens that another is computing"
    return "next_step", wanted, "the next step"
