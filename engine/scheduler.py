"""Owns which tokens are computed in the next step, and who holds which blocks. Pure, deterministic, torch-free.

There is no prefill or decode phase: each step gives every running context some of the tokens it still has to compute.
That one rule covers chunked prefill, prefix hits and resuming after a preemption (vLLM v1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.context import NO_BLOCK, Context
from engine.kv_cache import Away, KVCache, Place
from engine.protocol import EngineLimits
from engine.tiers import Move, Spill, Way
from policies import preemption
from policies.admission import admit, estimate_blocks
from policies.errors import QueueFull, RequestTooLarge
from policies.ordering import OrderView
from policies.registry import ORDERING
from policies.types import ContextState

EXPECTED_SHARE = 0.6  # of max_tokens a generation is expected to use; the rest is met by preemption
WORTH_WAITING_TOKENS = 64  # that somebody else is computing already: fewer are computed twice


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start..start+count-1`` of a context, to be computed in one step."""

    context: Context
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Does this chunk reach the context's end, so that a new token comes out of it?"""
        return self.start + self.count == self.context.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    chunks: tuple[Chunk, ...]
    expired: tuple[Context, ...] = ()
    moves: tuple[Move | Spill, ...] = ()  # to be carried out first


class Scheduler:
    """Owns every live context's state and block table."""

    def __init__(self, limits: EngineLimits, kv: KVCache) -> None:
        self.limits = limits
        self.kv = kv
        self._ordering = ORDERING.make(limits.ordering)
        self.waiting: list[Context] = []
        self.running: list[Context] = []
        self.arriving: list[Context] = []  # hold blocks that are being filled from disk
        self.preemptions = 0

    @property
    def capacity_tokens(self) -> int:
        return len(self.kv.pool) * self.limits.block_size

    @property
    def most_running(self) -> int:
        """A token each must fit into a step: the activation peak was measured for ``step_tokens``."""
        return min(self.limits.max_running, self.limits.step_tokens)

    def contexts(self) -> Iterable[Context]:
        return [*self.running, *self.arriving, *self.waiting]

    def add(self, context: Context) -> None:
        """Queue a context. Refuses what could never run, by the bound that admission itself uses."""
        limit = min(self.limits.max_model_len, self.capacity_tokens)
        if context.max_token_limit > limit:
            raise RequestTooLarge(
                f"{len(context.request.prompt_token_ids)} prompt tokens + max_tokens "
                f"{context.request.sampling.max_tokens} = {context.max_token_limit} tokens; at most {limit} can ever "
                f"be held (window {self.limits.max_model_len}, KV pool {self.capacity_tokens} tokens)",
                param="max_tokens",
            )
        if len(self.waiting) >= self.limits.max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} generations are waiting for this engine (limit {self.limits.max_waiting})",
                retry_after_seconds=1.0,
            )
        self.waiting.append(context)

    def schedule(self, now: float, wall: float) -> StepPlan:
        """Plan one step.

        Args:
            now: monotonic seconds, for the contexts' events.
            wall: wall-clock seconds, for deadlines.
        """
        step = self.kv.begin_step()
        self._take_up(now)
        expired = self._expire(now, wall)
        self.running.sort(key=lambda context: self.order(context, wall))
        decoding = sum(c.num_tokens - c.num_computed == 1 for c in self.running)
        # at least 1 if anybody else runs: see most_running
        budget = self.limits.step_tokens - decoding if decoding else self.limits.largest_step
        chunks: list[Chunk] = []
        position = 0
        while position < len(self.running):  # preemption shortens the list from its end
            context = self.running[position]
            pending = context.num_tokens - context.num_computed
            count = 1 if pending == 1 else min(pending, budget)
            if count and self._make_room(context, count, now, wall):
                chunks.append(Chunk(context, context.num_computed, count))
                budget -= count if pending > 1 else 0
            position += context.state is ContextState.RUNNING
        if len(chunks) == len(self.running):  # nobody is short of blocks or budget
            self._admit(chunks, budget, now, wall)
        return StepPlan(step, tuple(chunks), expired, self.kv.planned_moves())

    def moves_failed(self, plan: StepPlan, now: float, why: str) -> StepPlan:
        """KV could not be copied: what lies in host memory is dropped, and who counted on it computes it again."""
        filled = {_filled(move) for move in plan.moves if isinstance(move, Move)} - {NO_BLOCK}
        hurt = [chunk.context for chunk in plan.chunks if not filled.isdisjoint(chunk.context.block_table)]
        hurt += [context for context in self.arriving if not filled.isdisjoint(context.block_table)]
        self.kv.host_failed(filled)
        for context in hurt:
            self._preempt(context, now, f"its KV could not be copied: {why}", keep=False)
        return replace(plan, chunks=tuple(chunk for chunk in plan.chunks if chunk.context not in hurt), moves=())

    def computed(self, plan: StepPlan) -> None:
        """The step's KV is written: advance its contexts, offer their full blocks to the cache, lift the fence."""
        for chunk in plan.chunks:
            context = chunk.context
            if context.terminal:
                continue
            end = chunk.start + chunk.count
            context.recomputed_tokens += max(0, min(end, context.max_computed) - chunk.start)
            context.num_computed = end
            context.max_computed = max(context.max_computed, end)
            self.kv.publish(context)
        self.kv.completed(plan.step)

    def end(self, context: Context, state: ContextState, now: float, reason: str) -> None:
        """Take a context out, in whatever state; its blocks are free once no step in flight can write them."""
        self._list_of(context).remove(context)
        context.move(state, now, reason)
        if state is ContextState.FAILED:
            self.kv.fail(context)
        self.kv.release(context)

    def resize(self, num_blocks: int) -> int:
        """Use so many blocks of the device from now on, but never fewer than a live context may come to need; how many.

        What those hold that go is theirs until they end.
        """
        longest = max((context.max_token_limit for context in self.contexts()), default=0)
        self.kv.resize(max(num_blocks, -(-longest // self.limits.block_size), 2))
        return len(self.kv.pool)

    def check(self) -> None:
        """EngineError unless every block reference is explained by a live context."""
        self.kv.check(self.contexts())

    # -- blocks ----------------------------------------------------------------

    def _make_room(self, context: Context, count: int, now: float, wall: float) -> bool:
        """Give ``context`` the blocks for ``count`` more tokens, preempting from the end of the order if need be."""
        tokens = context.num_computed + count
        while (missing := self.kv.missing(context, tokens)) > self.kv.pool.num_free:
            victim = self._victim(context, wall)
            why = f"{missing} blocks missing, {self.kv.pool.num_free} free"
            self._preempt(victim, now, why, keep=self.keeps)
            if victim is context:
                return False
        self.kv.grow(context, tokens)
        return True

    @property
    def keeps(self) -> bool:
        """Is there a place for KV that leaves the device?"""
        return self.kv.host.books().total > 0 or self.kv.disk is not None

    def _victim(self, context: Context, wall: float) -> Context:
        """Who gives blocks up for ``context``: who waits for the disk, then who runs, the last of the order first;
        itself when nobody behind it would free any.
        """
        place = self.order(context, wall)
        behind = self.running[self.running.index(context) :]
        behind += [each for each in self.arriving if self.order(each, wall) > place]
        shared = self.kv.pool.shared
        freed = [sum(b != NO_BLOCK and not shared(b) for b in each.block_table) for each in behind]
        return behind[preemption.choose_victim(freed) or 0]

    def _preempt(self, context: Context, now: float, reason: str, *, keep: bool) -> None:
        """Take the blocks away; the context waits, in its old place of the order.

        Its full blocks are in the cache. With ``keep`` their content goes to host memory when somebody else gets them,
        and comes back; what does not is computed again.
        """
        arriving = context.state is ContextState.SWAPPING_IN
        self._list_of(context).remove(context)
        context.preemptions += 1
        self.preemptions += 1
        if keep and not arriving:
            context.move(ContextState.SWAPPING_OUT, now, reason)
            context.move(ContextState.SWAPPED, now, f"{context.num_published} blocks are kept")
        else:
            context.move(ContextState.PREEMPTED, now, reason)
            context.move(ContextState.WAITING, now, "recompute")
        self.kv.release(context)
        context.num_computed = context.num_published = 0
        self.waiting.append(context)

    def _list_of(self, context: Context) -> list[Context]:
        if context.state is ContextState.RUNNING:
            return self.running
        return self.arriving if context.state is ContextState.SWAPPING_IN else self.waiting

    # -- admission -------------------------------------------------------------

    def _admit(self, chunks: list[Chunk], budget: int, now: float, wall: float) -> None:
        self.waiting.sort(key=lambda context: self.order(context, wall))
        coming = self._coming()
        position = 0
        while position < len(self.waiting) and budget > 0 and self._active < self.most_running:
            context = self.waiting[position]
            found = self.kv.find(context)
            if self._will_be_found(context, len(found), coming):
                position += 1  # somebody is computing the same tokens: they are worth a step of waiting
                continue
            if not self.fits(context, found):
                break
            self.waiting.pop(position)
            self._start(context, found, now)
            for other in self.waiting[position:]:
                other.bypassed += other.request.arrival < context.request.arrival
            if context.state is ContextState.RUNNING:
                coming |= self._to_compute(context)
                self._share_tail(context)
                count = min(context.num_tokens - context.num_computed, budget)
                self.kv.grow(context, context.num_computed + count)
                chunks.append(Chunk(context, context.num_computed, count))
                budget -= count

    @property
    def _active(self) -> int:
        return len(self.running) + len(self.arriving)

    def fits(self, context: Context, found: Sequence[Place]) -> bool:
        """May it start now, with so much of it found?"""
        here = [place for place in found if not isinstance(place, Away) and place != NO_BLOCK]
        unneeded = len(here) + sum(place == NO_BLOCK for place in found)
        needed_now = -(-context.num_tokens // self.limits.block_size)
        return admit(
            free_blocks=self.kv.pool.num_free - self.kv.pool.free_among(here),
            needed_now=needed_now - unneeded,
            estimated_total=self.expected_blocks(context) - unneeded,
            running_remaining=[
                max(0, self.expected_blocks(c) - len(c.block_table)) for c in (*self.running, *self.arriving)
            ],
        )

    def expected_blocks(self, context: Context) -> int:
        """Blocks it is expected to have had by its end."""
        return estimate_blocks(context.num_tokens, context.remaining_tokens, self.limits.block_size, EXPECTED_SHARE)

    def _start(self, context: Context, found: Sequence[Place], now: float) -> None:
        """Give a context the blocks found; it runs at once, or when those on disk have arrived."""
        away = [place for place in found if isinstance(place, Away)]
        self._count_in(context, away, now)
        if not self.kv.hold(context, found):
            self.arriving.append(context)
            return
        self._run(context, now)

    def _run(self, context: Context, now: float, remark: str = "") -> None:
        if context.cached_tokens is None:
            context.cached_tokens = min(context.num_computed, len(context.request.prompt_token_ids))
            context.max_computed = context.num_computed
        if context.started is None:
            context.started = now
        context.move(ContextState.RUNNING, now, f"admitted with {context.num_computed} cached tokens{remark}")
        self.running.append(context)

    def _take_up(self, now: float) -> None:
        """Run those whose KV has come from disk, or will not."""
        for context, lost in self.kv.arrived():
            self.arriving.remove(context)
            self._run(context, now, f"; {lost} blocks did not come from disk" if lost else "")

    @staticmethod
    def _count_in(context: Context, away: Sequence[Away], now: float) -> None:
        """The states between waiting and running of a context whose KV lies there."""
        if away:
            places = " and ".join(sorted({str(place) for place in away}))
            if context.state is ContextState.WAITING:
                context.move(ContextState.SWAPPED, now, f"found in {places} memory")
            context.move(ContextState.SWAPPING_IN, now, f"{len(away)} blocks from {places} memory")
        elif context.state is ContextState.SWAPPED:
            context.move(ContextState.WAITING, now, "nothing of it was kept")

    def awaits_another(self, context: Context) -> bool:
        """Does it wait for somebody who computes the same tokens?"""
        return self._will_be_found(context, len(self.kv.find(context)), self._coming())

    # -- what others compute ---------------------------------------------------

    def _coming(self) -> set[bytes]:
        """Keys of blocks that those who run have still to compute, of what they know of their tokens."""
        return set().union(*(self._to_compute(context) for context in self.running)) if self.waiting else set()

    def _to_compute(self, context: Context) -> set[bytes]:
        return set(context.block_keys[context.num_computed // self.limits.block_size :])

    def _will_be_found(self, context: Context, found: int, coming: set[bytes]) -> bool:
        """Is the next part of it being computed for somebody else? Then a burst of equal prompts costs one."""
        usable = (context.num_tokens - 1) // self.limits.block_size
        worth = -(-WORTH_WAITING_TOKENS // self.limits.block_size)
        wanted = context.block_keys[found : min(usable, found + worth)]
        return len(wanted) == worth and coming.issuperset(wanted)

    def _share_tail(self, context: Context) -> None:
        """Generations of one prompt share its last block too, until one of them writes to it."""
        group = context.request.group
        if group is not None:
            mates = (c for c in self.running if c is not context and c.request.group == group)
            next((mate for mate in mates if self.kv.share_tail(context, mate)), None)

    # -- order -----------------------------------------------------------------

    def order(self, context: Context, wall: float) -> tuple[float, ...]:
        """Its place: the smallest starts first, and gives its blocks up last."""
        request = context.request
        left = context.max_token_limit - context.num_computed
        view = OrderView(request.tier, request.arrival, left, context.bypassed)
        return (*self._ordering(view, wall), context.context_id)

    def _expire(self, now: float, wall: float) -> tuple[Context, ...]:
        """The deadline bounds the wait for the first token: who was preempted after it waits for its blocks only."""
        late = [
            context
            for context in self.waiting
            if context.first_token is None and context.request.deadline is not None and wall > context.request.deadline
        ]
        for context in late:
            self.end(context, ContextState.EXPIRED, now, "its deadline passed while waiting")
        return tuple(late)


def _filled(move: Move) -> int:
    """The block of the device that a move fills; NO_BLOCK if it fills none."""
    return {Way.IN: move.block, Way.COPY: move.slot}.get(move.way, NO_BLOCK)
