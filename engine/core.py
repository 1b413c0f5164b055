"""Owns the engine's step — schedule, run, commit — and the lives of its contexts. Torch-free.

Not thread-safe: ``loop`` gives it a thread of its own. ``EngineCore`` is completed by what computes: ``torch_engine``
for real models, ``fake`` for tests and trials.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine import checkpoint
from engine.context import Context
from engine.detokenizer import Decoder, TextStream
from engine.logprobs import Choice, describe
from engine.prefix import KVIdentity
from engine.protocol import (
    EngineLimits,
    EngineStats,
    FinishReason,
    GenerationRequest,
    LoadReport,
    Output,
    SamplingParams,
    WakeReport,
)
from engine.scheduler import Chunk, Scheduler, StepPlan
from engine.sessions import SessionKeys
from engine.snapshot import ENDED_KEPT, EndedContext, EngineSnapshot, ended_context, take_snapshot
from engine.tiers import Move
from policies import preemption
from policies.errors import BadRequest, DeadlineExceeded, EngineError, HostUnavailable, NotFound
from policies.types import ContextState

NOT_FINITE = "the model produced no finite score for this generation"


class EngineCore(ABC):
    """One model's generations: who waits, who runs, what each has said."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._awake = False
        self._contexts: dict[tuple[str, int], Context] = {}
        self._texts: dict[tuple[str, int], TextStream] = {}
        self._counts: Counter[str] = Counter()
        self._sessions = SessionKeys()
        self._condemned: set[str] = set()  # deleted while a turn of theirs runs
        self._ended: deque[EndedContext] = deque(maxlen=ENDED_KEPT)

    # -- what a kind of engine supplies ------------------------------------------

    @abstractmethod
    def load(self) -> LoadReport:
        """Read the weights, measure, allocate; ends with ``_begin``."""

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
    def _move(self, moves: Sequence[Move]) -> None:
        """Copy KV blocks between device and host memory, in this order; RuntimeError, MemoryError or OSError."""

    def _begin(self, report: LoadReport, decoder: Decoder, eos: frozenset[int], vocabulary: int) -> None:
        self.report = report
        self._decoder, self._eos, self._vocabulary = decoder, eos, vocabulary
        size = self.limits.block_size
        host_blocks = report.kv_host_capacity_tokens // size if preemption.keep(report.kv_costs, size) else 0
        self._scheduler = Scheduler(self.limits, report.kv_capacity_tokens // size, host_blocks)

    # -- life of the model -------------------------------------------------------

    def warm(self) -> None:
        self._warm()
        self._awake = True

    def sleep(self) -> None:
        if self._contexts:
            raise EngineError(f"{len(self._contexts)} generations are live; drain before sleeping")
        if self._awake:
            self._awake = False
            self._park()
            self._scheduler.pool.clear_cache()  # the device's KV goes: nothing may be found there again
            self._give_back()

    def wake(self) -> WakeReport:
        if self._awake:
            return WakeReport(0.0, 0.0)
        begin = time.monotonic()
        try:
            self._take_again()
            copied = time.monotonic()
            self._canary()
        except (RuntimeError, MemoryError) as error:
            self._give_back()
            raise HostUnavailable(f"not enough memory to wake: {error}") from error
        except EngineError:
            self._give_back()
            raise
        self._awake = True
        return WakeReport(copied - begin, time.monotonic() - copied)

    # -- generations -------------------------------------------------------------

    def add(self, request: GenerationRequest) -> None:
        if not self._awake:
            raise HostUnavailable("this engine is asleep")
        self._validate(request)
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
        return True

    def save(self, request_id: str, generation: int, path: Path) -> None:
        """Write a live generation to a checkpoint; it goes on. NotFound, or OSError when it cannot be written."""
        context = self._contexts.get((request_id, generation))
        if context is None:
            raise NotFound(f"generation {request_id}/{generation} is not live")
        blocks, slots = self._scheduler.kept(context)
        kv = np.concatenate([self._read_kv(blocks, host=False), self._read_kv(slots, host=True)])
        request = replace(context.request, delivered_token_ids=tuple(context.generated_ids))
        checkpoint.write(path, checkpoint.Checkpoint(self._identity(request.tenant), request, kv))

    def restore(self, path: Path, tenant: str) -> GenerationRequest:
        """Go on with a checkpointed generation of this tenant; CheckpointRefused before anything of it was used.

        Its next output is the token after the last it had made. KV there is no room for is computed again.
        """
        if not self._awake:
            raise HostUnavailable("this engine is asleep")
        block_bytes = self._read_kv([0], host=False).shape[1]
        saved = checkpoint.read(path, self._identity(tenant), block_bytes)
        self.add(saved.request)
        context = self._contexts[saved.request.request_id, saved.request.generation]
        installed = self._scheduler.make_room_for(context, len(saved.kv))
        try:
            self._move(installed.moves)
            self._write_kv(installed.blocks, _rows(saved.kv, installed.indices))
        except (RuntimeError, MemoryError, OSError):
            self._counts["moves_failed"] += 1
            self._scheduler.installed(context, installed, worked=False)
        else:
            self._scheduler.installed(context, installed, worked=True)
        return saved.request

    def forget_session(self, session: str) -> int:
        """Drop the KV that only this session's turns left, on every tier; how many blocks there were.

        A turn that runs now keeps its blocks until it ends; then what it leaves is dropped too.
        """
        if any(context.request.session == session for context in self._contexts.values()):
            self._condemned.add(session)
        keys = [key for key in self._sessions.forget(session) if self._kept(key)]
        for key in keys:
            self._scheduler.forget(key)
        return len(keys)

    def has_work(self) -> bool:
        return bool(self._contexts)

    def live(self) -> Sequence[tuple[str, int]]:
        return tuple(self._contexts)

    def step(self) -> Sequence[Output]:
        """Schedule → run → commit."""
        plan = self._scheduler.schedule(time.monotonic(), time.time())
        if plan.moves:
            plan = self._carry_out(plan)
        self._scheduler.launched()
        choices = self._compute(plan.chunks) if plan.chunks else []
        return self._commit(plan, choices)

    def check(self) -> None:
        self._scheduler.check()

    def _kept(self, key: bytes) -> bool:
        return self._scheduler.pool.holds(key) or self._scheduler.host.holds(key)

    def stats(self) -> EngineStats:
        if not hasattr(self, "_scheduler"):
            return EngineStats()
        books = self._scheduler.pool.books()
        host = self._scheduler.host.books()
        waiting = Counter(c.request.tenant for c in self._scheduler.waiting)
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_blocks_total=books.total,
            kv_blocks_used=books.held,
            kv_blocks_cached=books.cached,
            kv_host_blocks_total=host.total,
            kv_host_blocks_used=host.used,
            kv_blocks_moved_out=host.moved_out,
            kv_blocks_moved_in=host.moved_in,
            kv_moves_failed=self._counts["moves_failed"],
            prompt_tokens=self._counts["prompt"],
            cached_tokens=self._counts["cached"],
            generated_tokens=self._counts["generated"],
            preemptions=self._scheduler.preemptions,
            steps=self._counts["steps"],
            sessions=self._sessions.whole(self._kept),
            tenants_waiting=tuple(sorted(waiting.items())),
        )

    def snapshot(self) -> EngineSnapshot:
        if not hasattr(self, "_scheduler"):
            raise HostUnavailable("this engine is not loaded")
        return take_snapshot(
            self._scheduler,
            self._contexts.values(),
            self._ended,
            kv_bytes=self.report.kv_bytes,
            awake=self._awake,
            now=time.monotonic(),
            wall=time.time(),
        )

    # -- inside ------------------------------------------------------------------

    def _identity(self, tenant: str) -> KVIdentity:
        return KVIdentity(tenant, self.report.fingerprint, self.report.dtype, self.limits.block_size)

    def _carry_out(self, plan: StepPlan) -> StepPlan:
        """Copy what the plan wants copied; where that fails, time is lost, and never an answer."""
        try:
            self._move(plan.moves)
        except (RuntimeError, MemoryError, OSError) as error:
            self._counts["moves_failed"] += 1
            return self._scheduler.moves_failed(plan, time.monotonic(), f"{type(error).__name__}: {error}")
        return plan

    def _park(self) -> None:
        """Bring the cached KV to host memory, as far as there is room."""
        try:
            self._move(self._scheduler.park())
        except (RuntimeError, MemoryError, OSError):
            self._counts["moves_failed"] += 1
            self._scheduler.host.clear()

    def _validate(self, request: GenerationRequest) -> None:
        tokens = request.prompt_token_ids
        if not tokens:
            raise BadRequest("the prompt has no tokens", param="messages")
        known = tokens + request.delivered_token_ids
        for token in (min(known), max(known)):
            if not 0 <= token < self._vocabulary:
                raise BadRequest(f"token id {token} is outside the vocabulary of {self._vocabulary}", param="messages")
        self._validate_sampling(request.sampling, len(request.delivered_token_ids))

    def _validate_sampling(self, sampling: SamplingParams, delivered: int) -> None:
        if sampling.max_tokens <= delivered:
            raise BadRequest(
                f"max_tokens {sampling.max_tokens} leaves nothing to generate after {delivered} delivered tokens",
                param="max_tokens",
            )
        if sampling.min_tokens > sampling.max_tokens:
            raise BadRequest(
                f"min_tokens {sampling.min_tokens} is above the {sampling.max_tokens} tokens the answer may have",
                param="min_tokens",
            )
        for token, _ in sampling.logit_bias:
            if not 0 <= token < self._vocabulary:
                raise BadRequest(
                    f"logit_bias names token id {token}, outside the vocabulary of {self._vocabulary}",
                    param="logit_bias",
                )

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
        session = context.request.session
        if session is not None:  # however it ended: its KV may be cached
            blocks = context.max_computed // self.limits.block_size
            self._sessions.remember(session, context.block_keys[:blocks])
            if session in self._condemned:
                self._condemned.discard(session)
                self.forget_session(session)  # condemned again if another turn of it runs


def _rows(kv: np.ndarray, indices: Sequence[int]) -> np.ndarray:
    """Those rows; nothing is copied when it is all of them."""
    return kv if len(indices) == len(kv) else kv[list(indices)]
