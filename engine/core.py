"""Owns the engine's step — schedule, run, commit — and the lives of its contexts. Torch-free.

Not thread-safe: ``loop`` gives it a thread of its own. ``EngineCore`` is completed by what computes: ``torch_engine``
for real models, ``fake`` for tests and trials.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine import checkpoint
from engine.carrier import Carrier
from engine.context import Context
from engine.detokenizer import Decoder, TextStream
from engine.disk import DiskStore
from engine.disk_tier import DiskTier
from engine.kv_cache import KVCache
from engine.logprobs import Choice, describe
from engine.prefix import KVIdentity
from engine.protocol import (
    DiskStats,
    EngineLimits,
    EngineStats,
    FinishReason,
    GenerationRequest,
    LoadReport,
    Output,
    WakeReport,
)
from engine.requests import validate
from engine.scheduler import Chunk, Scheduler, StepPlan
from engine.snapshot import ENDED_KEPT, EndedContext, EngineSnapshot, ended_context, take_snapshot
from engine.tiers import Move
from engine.worth import Worth
from policies import preemption
from policies.errors import BadRequest, DeadlineExceeded, EngineError, HostUnavailable, NotFound, OutOfMemory
from policies.types import ContextState

NOT_FINITE = "the model produced no finite score for this generation"
PARK_SECONDS = 5.0  # most that a sleep or an end waits for the disk
LIST_SECONDS = 2.0  # most that a load waits to learn what lies on disk
ARRIVAL_SECONDS = 0.02  # how long a step with nothing to compute waits for it


class EngineCore(ABC):
    """One model's generations: who waits, who runs, what each has said."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._awake = False
        self._contexts: dict[tuple[str, int], Context] = {}
        self._texts: dict[tuple[str, int], TextStream] = {}
        self._counts: Counter[str] = Counter()
        self._disk: DiskTier | None = None
        self._warmed = False
        self._condemned: set[str] = set()  # deleted while a turn of theirs runs
        self._ended: deque[EndedContext] = deque(maxlen=ENDED_KEPT)

    # -- what a kind of engine supplies ------------------------------------------

    @abstractmethod
    def load(self, *, asleep: bool = False) -> LoadReport:
        """Read the weights, measure, allocate; ends with ``_begin``. ``asleep``: as far as that takes no memory."""

    @abstractmethod
    def _warm(self) -> None:
        """Run the shapes that traffic will use, and remember what the canary prompt is answered with."""

    @abstractmethod
    def _canary(self) -> None:
        """Ask the canary prompt again; EngineError when the answer is not what it was at the load."""

    @abstractmethod
    def _compute(self, chunks: Sequence[Chunk]) -> list[Choice | None]:
        """Run one step: the new token of each chunk that samples, in order; None where the scores were not finite."""

    @abstractmethod
    def _give_back(self) -> None:
        """Free weights and KV memory. Idempotent."""

    @abstractmethod
    def _take_again(self) -> None:
        """Undo ``_give_back``; RuntimeError or MemoryError when memory is short."""

    @abstractmethod
    def _read_kv(self, blocks: Sequence[int], *, host: bool) -> np.ndarray:
        """The bytes of whole blocks of the device, or of host memory: uint8 ``[blocks, block_bytes]``."""

    @abstractmethod
    def _write_kv(self, blocks: Sequence[int], content: np.ndarray) -> None:
        """Fill blocks of the device with what ``_read_kv`` gave."""

    @abstractmethod
    def _keep_memory(self, blocks: int) -> None:
        """Give the device memory of all blocks after the first ``blocks`` back, until they are written again."""

    @abstractmethod
    def _move(self, moves: Sequence[Move]) -> None:
        """Copy KV blocks between device and host memory, in this order; RuntimeError, MemoryError or OSError."""

    @abstractmethod
    def _distrust(self) -> None:
        """What this load went by was wrong: the next one must not."""

    @abstractmethod
    def lend_core(self, lent: bool) -> None:
        """Compute with one thread less, or with all again: another model loads on this machine."""

    def _rest(self) -> None:  # noqa: B027 — what has no cores of its own has none to leave
        """No generation is live: others may have the cores."""

    def _said_of_layers(self) -> str:
        """Compiled, or why not; "": there are none."""
        return ""

    def _said_of_attention(self) -> str:
        """What computes it; "": there is none."""
        return ""

    def _said_of_weights(self) -> str:
        """In which forms their matrices are; "": there are none."""
        return ""

    def _begin(self, report: LoadReport, decoder: Decoder, eos: frozenset[int], vocabulary: int) -> None:
        self.report = report
        self._decoder, self._eos, self._vocabulary = decoder, eos, vocabulary
        size = self.limits.block_size
        host_blocks = report.kv_host_capacity_tokens // size if preemption.keep(report.kv_costs, size) else 0
        num_blocks = report.kv_capacity_tokens // size
        self._block_bytes = report.kv_bytes // num_blocks
        if self.limits.kv_disk_bytes:
            self._disk = self._open_disk(Path(self.limits.kv_disk), self.limits.kv_disk_bytes)
        self._worth = Worth(report.kv_costs, size, self._block_bytes, host=host_blocks > 0, disk=self._disk)
        self._kv_cache = KVCache(
            size,
            num_blocks,
            host_blocks,
            window=report.window_tokens,
            disk=self._disk,
            worth_writing=lambda key: self._worth.writing(self._kv_cache.sessions.uses(key), time.monotonic()),
            worth_reading=self._worth.reading,
        )
        self._carrier = Carrier(
            self._kv_cache,
            self._disk,
            self._read_kv,
            self._move,
        )
        self._scheduler = Scheduler(self.limits, self._kv_cache)

    def _content_bytes(self) -> int:
        """Of one block as ``_read_kv`` gives it; asleep too."""
        return self._block_bytes

    def _open_disk(self, directory: Path, capacity_bytes: int) -> DiskTier:
        content_bytes = self._content_bytes()
        tier = DiskTier(
            lambda: DiskStore(directory, capacity_bytes),
            self.report.fingerprint,
            content_bytes,
            self._write_kv,
        )
        tier.wait_listed(LIST_SECONDS)
        return tier

    # -- life of the model -------------------------------------------------------

    def warm(self) -> None:
        self._warm()
        self._warmed = self._awake = True

    def sleep(self) -> None:
        if self._contexts:
            raise EngineError(f"{len(self._contexts)} generations are live; drain before sleeping")
        if self._awake:
            self._awake = False
            self._kv_cache.abandon()
            self._park()
            self._kv_cache.pool.clear_cache()  # the device's KV goes: nothing may be found there again
            self._give_back()

    def wake(self) -> WakeReport:
        if self._awake:
            return WakeReport(0.0, 0.0)
        begin = time.monotonic()
        try:
            self._take_again()
            copied = time.monotonic()
            self._canary()
            if not self._warmed:  # it was loaded asleep
                self._warm()
                self._warmed = True
        except Exception as error:  # boundary: whatever a wake raises leaves it asleep
            self._give_back()
            if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and self._is_short(error)):
                raise OutOfMemory(f"not enough memory to wake: {error}") from error
            self._distrust()
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"it does not wake: {type(error).__name__}: {error}") from error
        self._awake = True
        return WakeReport(copied - begin, time.monotonic() - copied)

    def close(self) -> None:
        """The process is about to end: what KV is worth keeping goes to disk, within ``PARK_SECONDS``."""
        if self._disk is None:
            return
        until = time.monotonic() + PARK_SECONDS
        self._kv_cache.abandon()
        self._carrier.carry_out_or_drop(self._kv_cache.planned_moves())
        spills = [spill for spill in self._kv_cache.park_on_disk(self._worth_now()) if self._awake or spill.host]
        self._carrier.spill(spills, until)
        self._disk.close(max(0.0, until - time.monotonic()))

    def resize_kv(self, num_bytes: int) -> int:
        """Let the KV pool hold so many bytes of the device, up to what the load gave it; the bytes it has now.

        What is cached beyond goes down the tiers, blocks in use drain. Never less than a live generation may need.
        """
        if not self._awake:
            raise HostUnavailable("this engine is asleep: its KV pool holds nothing")
        blocks = self._scheduler.resize(num_bytes // self._block_bytes)
        self._carrier.carry_out_or_drop(self._kv_cache.planned_moves())
        self._keep_memory(self._kv_cache.pool.end)
        return blocks * self._block_bytes

    def _is_short(self, error: RuntimeError) -> bool:
        """Of memory? torch has no other class for it on the CPU. One that has woken before has no other reason."""
        return self._warmed or "allocate" in str(error)

    # -- generations -------------------------------------------------------------

    def add(self, request: GenerationRequest) -> None:
        if not self._awake:
            raise HostUnavailable("this engine is asleep")
        validate(request, self._vocabulary)
        context = Context(request, self._identity(request.tenant).namespace(), time.monotonic())
        if context.key in self._contexts:
            raise BadRequest(f"generation {request.request_id}/{request.generation} is live already")
        sampling = request.sampling
        text = TextStream(self._decoder, request.prompt_token_ids, sampling.stop, sampling.min_tokens)
        text.feed(request.delivered_token_ids)  # its text went out with the tokens
        self._scheduler.add(context)
        self._contexts[context.key] = context
        self._texts[context.key] = text

    def cancel(self, request_id: str, generation: int, reason: str) -> bool:
        context = self._contexts.get((request_id, generation))
        if context is None:
            return False
        self._scheduler.end(context, ContextState.CANCELLED, time.monotonic(), reason)
        self._forget(context)
        if not self._contexts:
            self._rest()
        return True

    def save(self, request_id: str, generation: int, path: Path) -> None:
        """Write a live generation to a checkpoint; it goes on. NotFound, or OSError when it cannot be written."""
        context = self._contexts.get((request_id, generation))
        if context is None:
            raise NotFound(f"generation {request_id}/{generation} is not live")
        self._carrier.carry_out_or_drop(self._kv_cache.planned_moves())  # what is read below must be there
        first, blocks, slots = self._kv_cache.readable(context)
        kv = np.concatenate([self._read_kv(blocks, host=False), self._read_kv(slots, host=True)])
        request = replace(context.request, delivered_token_ids=tuple(context.generated_ids))
        checkpoint.write(path, checkpoint.Checkpoint(self._identity(request.tenant), request, kv, first))

    def restore(self, path: Path, tenant: str) -> GenerationRequest:
        """Go on with a checkpointed generation of this tenant; CheckpointRefused before anything of it was used.

        Its next output is the token after the last it had made. KV there is no room for is computed again.
        """
        if not self._awake:
            raise HostUnavailable("this engine is asleep")
        block_bytes = self._content_bytes()
        saved = checkpoint.read(path, self._identity(tenant), block_bytes)
        self.add(saved.request)
        context = self._contexts[saved.request.request_id, saved.request.generation]
        installed = self._kv_cache.make_room_for(context, saved.first_block, len(saved.kv))
        rows = [index - saved.first_block for index in installed.indices]
        try:
            self._carrier.carry_out(installed.moves)
            self._write_kv(installed.blocks, _rows(saved.kv, rows))
        except (RuntimeError, MemoryError, OSError):
            self._carrier.failures += 1
            self._kv_cache.installed(context, installed, worked=False)
        else:
            self._kv_cache.installed(context, installed, worked=True)
        return saved.request

    def forget_session(self, session: str) -> int:
        """Drop the KV that only this session's turns left, on every tier; how many blocks there were.

        A turn that runs now keeps its blocks until it ends; then what it leaves is dropped too.
        """
        if any(context.request.session == session for context in self._contexts.values()):
            self._condemned.add(session)
        keys = [key for key in self._kv_cache.sessions.forget(session) if self._kv_cache.kept(key)]
        self._kv_cache.forget(keys)
        self._order_pins(time.monotonic())
        if self._disk is not None:
            self._disk.forget_session(session)
        return len(keys)

    def sessions(self) -> Sequence[str]:
        """Whose KV may be here, ``tenant/session``; the disk's are those of every model of the node."""
        on_disk = self._disk.sessions() if self._disk is not None else ()
        return tuple({*self._kv_cache.sessions.names(), *on_disk})

    def has_work(self) -> bool:
        return bool(self._contexts)

    def live(self) -> Sequence[tuple[str, int]]:
        return tuple(self._contexts)

    def step(self) -> Sequence[Output]:
        """Schedule → run → commit."""
        now = time.monotonic()
        self._order_pins(now)
        plan = self._scheduler.schedule(now, time.time())
        if plan.moves:
            plan = self._carry_out_plan(plan)
        self._kv_cache.launched()
        if plan.chunks:
            outputs = self._commit(plan, self._compute(plan.chunks))
            if not self._contexts:
                self._rest()
            return outputs
        if self._disk is not None and self._kv_cache.arriving:
            self._disk.wait(ARRIVAL_SECONDS)
        return self._commit(plan, [])

    def check(self) -> None:
        self._scheduler.check()

    def stats(self) -> EngineStats:
        if not hasattr(self, "_scheduler"):
            return EngineStats()
        books = self._kv_cache.pool.books()
        host = self._kv_cache.host.books()
        waiting = Counter(c.request.tenant for c in self._scheduler.waiting)
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._scheduler.arriving),
            kv_blocks_total=books.total,
            kv_blocks_used=books.held,
            kv_blocks_cached=books.cached,
            kv_blocks_pinned=books.pinned,
            kv_bytes=(self._kv_cache.pool.end if self._awake else books.total) * self._block_bytes,
            kv_host_blocks_total=host.total,
            kv_host_blocks_used=host.used,
            kv_blocks_moved_out=host.moved_out,
            kv_blocks_moved_in=host.moved_in,
            kv_moves_failed=self._carrier.failures,
            kv_disk=self._disk.stats() if self._disk is not None else DiskStats(),
            kv_supply=self._worth.supply(self._kv_cache, time.monotonic()),
            prompt_tokens=self._counts["prompt"],
            cached_tokens=self._counts["cached"],
            generated_tokens=self._counts["generated"],
            preemptions=self._scheduler.preemptions,
            layers=self._said_of_layers(),
            attention=self._said_of_attention(),
            weights=self._said_of_weights(),
            steps=self._counts["steps"],
            sessions=self._kv_cache.sessions.whole(self._kv_cache.kept),
            tenants_waiting=tuple(sorted(waiting.items())),
        )

    def snapshot(self) -> EngineSnapshot:
        if not hasattr(self, "_scheduler"):
            raise HostUnavailable("this engine is not loaded")
        return take_snapshot(
            self._scheduler,
            self._contexts.values(),
            self._ended,
            block_bytes=self._block_bytes,
            disk=self._disk.stats() if self._disk is not None else DiskStats(),
            supply=self._worth.supply(self._kv_cache, time.monotonic()),
            awake=self._awake,
            now=time.monotonic(),
            wall=time.time(),
        )

    # -- inside ------------------------------------------------------------------

    def _identity(self, tenant: str) -> KVIdentity:
        return KVIdentity(tenant, self.report.fingerprint, self.report.dtype, self.limits.block_size)

    def _carry_out_plan(self, plan: StepPlan) -> StepPlan:
        """Copy what the plan wants copied; where that fails, time is lost, and never an answer."""
        try:
            self._carrier.carry_out(plan.moves)
        except (RuntimeError, MemoryError, OSError) as error:
            self._carrier.failures += 1
            return self._scheduler.moves_failed(plan, time.monotonic(), f"{type(error).__name__}: {error}")
        return plan

    def _order_pins(self, now: float) -> None:
        self._kv_cache.pool.pins_changed(self._kv_cache.sessions.pins_changed(now))

    def _park(self) -> None:
        """Bring the cached KV down before the device's memory goes, what is worth most to the fastest place."""
        moves = self._kv_cache.park(self._worth_now())
        self._carrier.carry_out_or_drop(moves, time.monotonic() + PARK_SECONDS)

    def _worth_now(self) -> Callable[[bytes], float]:
        """What a block is worth at this moment, by its key."""
        now, sessions = time.monotonic(), self._kv_cache.sessions
        return lambda key: self._worth.of(sessions.uses(key), now)

    def _commit(self, plan: StepPlan, choices: list[Choice | None]) -> list[Output]:
        now = time.monotonic()
        self._counts["steps"] += bool(plan.chunks)
        sampled = list(zip((c.context for c in plan.chunks if c.samples), choices, strict=True))
        outputs = [self._expired(context) for context in plan.expired]
        # failures first: a failed context's blocks must not be published
        outputs += [self._fail(context, NOT_FINITE) for context, choice in sampled if choice is None]
        self._scheduler.computed(plan)
        outputs += [self._append(context, choice, now) for context, choice in sampled if choice is not None]
        return outputs

    def _append(self, context: Context, choice: Choice, now: float) -> Output:
        """One new token of one context: its text, and whether it was the last."""
        if context.first_token is None:
            context.first_token = now
            self._counts["prompt"] += len(context.request.prompt_token_ids)
            self._counts["cached"] += context.cached_tokens or 0
        context.last_token = now
        context.token_ids.append(choice.token)
        self._counts["generated"] += 1
        try:
            text, reason = self._say(context, choice.token)
            logprobs = describe(self._decoder, choice)
        except Exception as error:  # noqa: BLE001 — boundary: text that cannot be made fails its own generation alone
            return self._fail(context, f"its text could not be decoded: {type(error).__name__}: {error}")
        if reason is not None:
            self._scheduler.end(context, ContextState.FINISHED, now, reason)
            self._forget(context)
        return Output(*context.key, (choice.token,), text, reason, usage=context.usage(), logprobs=logprobs)

    def _say(self, context: Context, token: int) -> tuple[str, FinishReason | None]:
        stream = self._texts[context.key]
        ended = token in self._eos and not context.request.sampling.ignore_eos
        text = "" if ended else stream.feed([token])
        if not (ended or stream.stopped or context.remaining_tokens == 0):
            return text, None
        text += stream.finish()
        return text, "stop" if ended or stream.stopped else "length"

    def _expired(self, context: Context) -> Output:
        self._forget(context)
        waited = time.monotonic() - context.added
        error = DeadlineExceeded(f"waited {waited:.1f} s for a place in the batch; the deadline passed")
        return Output(*context.key, error=error, usage=context.usage())

    def _fail(self, context: Context, why: str) -> Output:
        error = EngineError(why)
        self._scheduler.end(context, ContextState.FAILED, time.monotonic(), error.message)
        self._forget(context)
        return Output(*context.key, error=error, usage=context.usage())

    def _forget(self, context: Context) -> None:
        self._ended.append(ended_context(context, said_end=context.token_ids[-1] in self._eos))
        del self._contexts[context.key], self._texts[context.key]
        if context.request.session is not None:  # however it ended: its KV may be cached
            self._remember(context, context.request.session)

    def _remember(self, context: Context, session: str) -> None:
        """Whose the KV is that a turn has left, and whether it is pinned."""
        cache, now = self._kv_cache, time.monotonic()
        keys = context.block_keys[: context.max_computed // self.limits.block_size]
        cache.sessions.remember(context.request, keys, now)
        if self._disk is not None:
            self._disk.note(session, keys)
        if context.request.pin_seconds:
            most = context.request.pin_bytes // self._block_bytes
            cache.sessions.pin(session, now + context.request.pin_seconds, most)
            self._order_pins(now)
        if session in self._condemned:
            self._condemned.discard(session)
            self.forget_session(session)  # condemned again if another turn of it runs


def _rows(kv: np.ndarray, indices: Sequence[int]) -> np.ndarray:
    """Those rows; nothing is copied when it is all of them."""
    return kv if len(indices) == len(kv) else kv[list(indices)]
