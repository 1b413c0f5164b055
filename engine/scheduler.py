"""Owns which tokens are computed in the next step, and who holds which blocks. Pure, deterministic, torch-free.

There is no prefill or decode phase: each step gives every running context some of the tokens it still has to compute.
That one rule covers chunked prefill, prefix hits and resuming after a preemption (vLLM v1).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine import prefix
from engine.blocks import BlockPool
from engine.context import Context
from engine.protocol import EngineLimits
from engine.tiers import HostTier, Move, Way
from policies import preemption
from policies.admission import admit, estimate_blocks
from policies.errors import QueueFull, RequestTooLarge
from policies.ordering import OrderView
from policies.registry import ORDERING
from policies.types import ContextState

EXPECTED_SHARE = 0.6  # of max_tokens a generation is expected to use; the rest is met by preemption


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
    moves: tuple[Move, ...] = ()  # to be carried out first


@dataclass(frozen=True, slots=True)
class Installation:
    """Blocks taken for KV that comes from outside: ``blocks[n]`` is to become the context's block ``indices[n]``."""

    indices: tuple[int, ...]
    blocks: tuple[int, ...]
    moves: tuple[Move, ...]  # to be carried out first


class Scheduler:
    """Owns every live context's state and block table."""

    def __init__(self, limits: EngineLimits, num_blocks: int, host_blocks: int = 0) -> None:
        """``host_blocks``: room for KV that leaves the device; 0: it is lost, and computed again when it is wanted."""
        self.limits = limits
        self.pool = BlockPool(num_blocks, self._evicted)
        self.host = HostTier(host_blocks)
        self._ordering = ORDERING.make(limits.ordering)
        self._moves: list[Move] = []
        self.waiting: list[Context] = []
        self.running: list[Context] = []
        self.preemptions = 0
        self._step = 0  # the last step scheduled
        self._in_flight = False  # may the model be writing KV now?

    @property
    def capacity_tokens(self) -> int:
        return len(self.pool) * self.limits.block_size

    @property
    def _most_running(self) -> int:
        """A token each must fit into a step: the activation peak was measured for ``step_tokens``."""
        return min(self.limits.max_running, self.limits.step_tokens)

    def contexts(self) -> Iterable[Context]:
        return [*self.running, *self.waiting]

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
        self._step += 1
        expired = self._expire(now, wall)
        self.running.sort(key=lambda context: self._order(context, wall))
        decoding = sum(c.num_tokens - c.num_computed == 1 for c in self.running)
        budget = self.limits.step_tokens - decoding  # at least 1 if anybody else runs: see _most_running
        chunks: list[Chunk] = []
        position = 0
        while position < len(self.running):  # preemption shortens the list from its end
            context = self.running[position]
            pending = context.num_tokens - context.num_computed
            count = 1 if pending == 1 else min(pending, budget)
            if count and self._make_room(context, count, now):
                chunks.append(Chunk(context, context.num_computed, count))
                budget -= count if pending > 1 else 0
            position += context.state is ContextState.RUNNING
        if len(chunks) == len(self.running):  # nobody is short of blocks or budget
            self._admit(chunks, budget, now, wall)
        return StepPlan(self._step, tuple(chunks), expired, self._planned_moves())

    def moves_failed(self, plan: StepPlan, now: float, why: str) -> StepPlan:
        """KV could not be copied: what lies in host memory is dropped, and who counted on it computes it again."""
        self.host.clear()
        arrived = {move.block for move in plan.moves if move.way is Way.IN}
        hurt = [chunk.context for chunk in plan.chunks if not arrived.isdisjoint(chunk.context.block_table)]
        self.pool.discard(arrived)
        for context in hurt:
            self._preempt(context, now, f"its KV could not be copied back: {why}", keep=False)
        return replace(plan, chunks=tuple(chunk for chunk in plan.chunks if chunk.context not in hurt), moves=())

    def park(self) -> tuple[Move, ...]:
        """Moves that bring cached KV to host memory before the device's goes, the most recently used first to stay."""
        cached = list(self.pool.cached())
        for block, key, token_ids in cached[max(0, len(cached) - self.host.books().total) :]:
            self._evicted(block, key, token_ids)
        return self._planned_moves()

    def kept(self, context: Context) -> tuple[list[int], list[int]]:
        """Where the KV of its first whole blocks lies: blocks on the device, then slots in host memory."""
        found = self._found(context)
        if context.state is ContextState.RUNNING:
            found = list(context.block_table[: context.num_computed // self.limits.block_size])
        blocks = list(itertools.takewhile(lambda block: block is not None, found))
        away = itertools.takewhile(lambda index: found[index] is None, range(len(blocks), len(found)))
        slots = [self.host.find(context.block_keys[index], self._block_tokens(context, index)) for index in away]
        return [block for block in blocks if block is not None], [slot for slot in slots if slot is not None]

    def make_room_for(self, context: Context, count: int) -> Installation:
        """Free blocks for the KV of a context's first ``count`` blocks, as many as there are."""
        self._extend_keys(context)
        missing = [
            i for i in range(count) if self.pool.find(context.block_keys[i], self._block_tokens(context, i)) is None
        ]
        missing = missing[: self.pool.num_free]
        return Installation(tuple(missing), tuple(self.pool.allocate(len(missing))), self._planned_moves())

    def installed(self, context: Context, room: Installation, *, worked: bool) -> None:
        """The KV is in its blocks, and can be found; or it could not be written."""
        for index, block in zip(room.indices, room.blocks, strict=True):
            if worked:
                self.pool.publish(block, context.block_keys[index], self._block_tokens(context, index))
        if not worked:
            self.host.clear()  # the moves before it may not have been carried out
        self.pool.release(room.blocks, self._step)
        if not self._in_flight:
            self.pool.complete(self._step)

    def launched(self) -> None:
        """The model may be writing the KV of the last planned step from now on: blocks freed now are fenced."""
        self._in_flight = True

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
            self._publish(context)
        self._in_flight = False
        self.pool.complete(plan.step)
        self.host.settle()

    def end(self, context: Context, state: ContextState, now: float, reason: str) -> None:
        """Take a context out, in whatever state; its blocks are free once no step in flight can write them."""
        if context.state is ContextState.RUNNING:
            self.running.remove(context)
        else:
            self.waiting.remove(context)
        context.move(state, now, reason)
        if state is ContextState.FAILED:
            self.pool.discard(b for b in context.block_table)
            for key in context.block_keys:
                self.host.forget(key)
        self._release(context)

    def forget(self, key: bytes) -> None:
        """Let nobody find the block with this key again."""
        self.host.forget(key)
        self.pool.forget(key)

    def check(self) -> None:
        """EngineError unless every block reference is explained by a live context."""
        self.pool.check(c.block_table for c in self.contexts())

    # -- blocks ----------------------------------------------------------------

    def _make_room(self, context: Context, count: int, now: float) -> bool:
        """Give ``context`` the blocks for ``count`` more tokens, preempting from the end of the order if need be."""
        missing = self._blocks_missing(context, context.num_computed + count)
        while missing > self.pool.num_free:
            victim = self._victim(context)
            why = f"{missing} blocks missing, {self.pool.num_free} free"
            self._preempt(victim, now, why, keep=self.host.books().total > 0)
            if victim is context:
                return False
        context.block_table += self.pool.allocate(missing)
        return True

    def _victim(self, context: Context) -> Context:
        """Who gives blocks up for ``context``; itself when nobody behind it would free any."""
        behind = self.running[self.running.index(context) :]
        freed = [sum(not self.pool.shared(block) for block in each.block_table) for each in behind]
        return behind[preemption.choose_victim(freed) or 0]

    def _preempt(self, context: Context, now: float, reason: str, *, keep: bool) -> None:
        """Take the blocks away; the context waits, in its old place of the order.

        Its full blocks are in the cache. With ``keep`` their content goes to host memory when somebody else gets them,
        and comes back; what does not is computed again.
        """
        self.running.remove(context)
        context.preemptions += 1
        self.preemptions += 1
        if keep:
            context.move(ContextState.SWAPPING_OUT, now, reason)
            context.move(ContextState.SWAPPED, now, f"{context.num_published} blocks are kept")
        else:
            context.move(ContextState.PREEMPTED, now, reason)
            context.move(ContextState.WAITING, now, "recompute")
        self._release(context)
        context.num_computed = context.num_published = 0
        self.waiting.append(context)

    def _evicted(self, block: int, key: bytes, token_ids: tuple[int, ...]) -> None:
        """Cached content is about to leave the device."""
        slot = self.host.put(key, token_ids)
        if slot is not None:
            self._moves.append(Move(Way.OUT, block, slot))

    def _planned_moves(self) -> tuple[Move, ...]:
        moves, self._moves = tuple(self._moves), []
        return moves

    def _release(self, context: Context) -> None:
        self.pool.release(context.block_table, self._step)
        context.block_table = []
        if not self._in_flight:
            self.pool.complete(self._step)

    def _blocks_missing(self, context: Context, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size) - len(context.block_table)

    # -- admission -------------------------------------------------------------

    def _admit(self, chunks: list[Chunk], budget: int, now: float, wall: float) -> None:
        self.waiting.sort(key=lambda context: self._order(context, wall))
        while self.waiting and budget > 0 and len(self.running) < self._most_running:
            context = self.waiting[0]
            found = self._found(context)
            if not self._fits(context, [block for block in found if block is not None]):
                break
            self.waiting.pop(0)
            self._start(context, found, now)
            for other in self.waiting:
                other.bypassed += other.request.arrival < context.request.arrival
            count = min(context.num_tokens - context.num_computed, budget)
            context.block_table += self.pool.allocate(self._blocks_missing(context, context.num_computed + count))
            chunks.append(Chunk(context, context.num_computed, count))
            budget -= count

    def _fits(self, context: Context, hits: Sequence[int]) -> bool:
        needed_now = -(-context.num_tokens // self.limits.block_size)
        return admit(
            free_blocks=self.pool.num_free - self.pool.free_among(hits),
            needed_now=needed_now - len(hits),
            estimated_total=self._expected_blocks(context) - len(hits),
            running_remaining=[max(0, self._expected_blocks(c) - len(c.block_table)) for c in self.running],
        )

    def _expected_blocks(self, context: Context) -> int:
        return estimate_blocks(context.num_tokens, context.remaining_tokens, self.limits.block_size, EXPECTED_SHARE)

    def _start(self, context: Context, found: Sequence[int | None], now: float) -> None:
        """Run a context from the blocks ``found``; None: its content is copied in from host memory."""
        away = [index for index, block in enumerate(found) if block is None]
        self._count_in(context, len(away), now)
        self.pool.take(block for block in found if block is not None)  # first, that they are not given out below
        slots = [self.host.take(context.block_keys[index]) for index in away]  # nor these written to
        table = list(found)
        for index, slot, block in zip(away, slots, self.pool.allocate(len(away)), strict=True):
            table[index] = block
            self.pool.publish(block, context.block_keys[index], self._block_tokens(context, index))
            self._moves.append(Move(Way.IN, block, slot))
        context.block_table = [block for block in table if block is not None]
        context.num_computed = len(found) * self.limits.block_size
        context.num_published = len(found)
        if context.cached_tokens is None:
            context.cached_tokens = min(context.num_computed, len(context.request.prompt_token_ids))
            context.max_computed = context.num_computed
        if context.started is None:
            context.started = now
        context.move(ContextState.RUNNING, now, f"admitted with {context.num_computed} cached tokens")
        self.running.append(context)

    @staticmethod
    def _count_in(context: Context, away: int, now: float) -> None:
        """The states between waiting and running of a context with so many blocks in host memory."""
        if away:
            if context.state is ContextState.WAITING:
                context.move(ContextState.SWAPPED, now, "found in host memory")
            context.move(ContextState.SWAPPING_IN, now, f"{away} blocks from host memory")
        elif context.state is ContextState.SWAPPED:
            context.move(ContextState.WAITING, now, "nothing of it is in host memory")

    def _found(self, context: Context) -> list[int | None]:
        """Where the longest prefix lies that is kept: a block, or None for host memory.

        At least one token is left to compute, else nothing is sampled.
        """
        self._extend_keys(context)
        usable = (context.num_tokens - 1) // self.limits.block_size
        found: list[int | None] = []
        for index, key in enumerate(context.block_keys[:usable]):
            tokens = self._block_tokens(context, index)
            block = self.pool.find(key, tokens)
            if block is None and self.host.find(key, tokens) is None:
                break
            found.append(block)
        return found

    def _block_tokens(self, context: Context, index: int) -> list[int]:
        size = self.limits.block_size
        return context.token_ids[index * size : (index + 1) * size]

    def _extend_keys(self, context: Context) -> None:
        size = self.limits.block_size
        done = len(context.block_keys)
        parent = context.block_keys[-1] if done else context.namespace
        context.block_keys += prefix.chain(parent, context.token_ids[done * size :], size)

    def _publish(self, context: Context) -> None:
        size = self.limits.block_size
        full = context.num_computed // size
        if full > context.num_published:
            self._extend_keys(context)
            for index in range(context.num_published, full):
                tokens = self._block_tokens(context, index)
                self.pool.publish(context.block_table[index], context.block_keys[index], tokens)
            context.num_published = full

    # -- order -----------------------------------------------------------------

    def _order(self, context: Context, wall: float) -> tuple[float, ...]:
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
