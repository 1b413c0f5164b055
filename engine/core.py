"""Owns the engine's step — schedule, run, commit — and the lives of its contexts. Not thread-safe: see ``loop``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine import sampler
from engine.blocks import BlockPool
from engine.context import Context
from engine.detokenizer import TextStream
from engine.loader import Loaded, load_model
from engine.prefix import KVIdentity
from engine.protocol import (
    EngineLimits,
    EngineStats,
    FinishReason,
    GenerationRequest,
    LoadReport,
    Output,
)
from engine.scheduler import Scheduler, StepPlan
from policies.errors import BadRequest, DeadlineExceeded, EngineError, HostUnavailable
from policies.types import ContextState


class TorchEngine:
    """Inference for one causal language model, on paged KV."""

    def __init__(self, path: Path, memory_bytes: int, limits: EngineLimits, dtype: str = "float32") -> None:
        """Nothing is read before ``load``.

        Args:
            path: directory with config.json, safetensors and tokenizer.json.
            memory_bytes: all this process may hold: residual + weights + activation peak + KV pool.
        """
        self.path = path
        self.memory_bytes = memory_bytes
        self.limits = limits
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._awake = False
        self._contexts: dict[tuple[str, int], Context] = {}
        self._texts: dict[tuple[str, int], TextStream] = {}
        self._late: list[Output] = []  # answers made outside a step
        self._counts: Counter[str] = Counter()

    # -- life of the model -----------------------------------------------------

    def load(self) -> LoadReport:
        loaded: Loaded = load_model(self.path, self.memory_bytes, self.limits, self.dtype, self.device)
        self._weights, self._kv, self._runner = loaded.weights, loaded.kv, loaded.runner
        self.limits = loaded.limits
        self._eos = loaded.eos_token_ids
        self._vocabulary = loaded.vocabulary
        self._tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        self._scheduler = Scheduler(self.limits, BlockPool(self._kv.num_slots // self.limits.block_size))
        self.report = loaded.report
        self._awake = True
        return loaded.report

    def sleep(self) -> None:
        if self._contexts:
            raise EngineError(f"{len(self._contexts)} generations are live; drain before sleeping")
        if self._awake:
            self._scheduler.pool.clear_cache()  # the KV goes: nothing may be found again
            self._weights.sleep()
            self._kv.give_back()
            self._awake = False

    def wake(self) -> None:
        if self._awake:
            return
        try:
            self._weights.wake()
            self._kv.take_again()
        except (RuntimeError, MemoryError) as error:
            self._weights.sleep()
            self._kv.give_back()
            raise HostUnavailable(f"not enough memory to wake: {error}") from error
        self._awake = True

    # -- generations -----------------------------------------------------------

    def add(self, request: GenerationRequest) -> None:
        if not self._awake:
            raise HostUnavailable("this engine is asleep")
        self._validate(request)
        identity = KVIdentity(
            request.tenant, self.report.fingerprint, str(self.dtype), self.limits.block_size
        )
        context = Context(request, identity.namespace(), time.monotonic())
        if context.key in self._contexts:
            raise BadRequest(f"generation {request.request_id}/{request.generation} is live already")
        text = TextStream(self._tokenizer, request.prompt_token_ids, request.sampling.stop)
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

    def has_work(self) -> bool:
        return bool(self._contexts or self._late)

    def step(self) -> Sequence[Output]:
        """Schedule → run → commit."""
        plan = self._scheduler.schedule(time.monotonic(), time.time())
        if not plan.chunks:
            self._scheduler.computed(plan)
            return self._refuse_expired(plan)
        self._scheduler.launched()
        logits = self._runner.run(plan.chunks, self._kv)
        return self._refuse_expired(plan) + self._commit(plan, logits)

    def stats(self) -> EngineStats:
        if not hasattr(self, "_scheduler"):
            return EngineStats()
        books = self._scheduler.pool.books()
        waiting = Counter(c.request.tenant for c in self._scheduler.waiting)
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_blocks_total=books.total,
            kv_blocks_used=books.held,
            kv_blocks_cached=books.cached,
            prompt_tokens=self._counts["prompt"],
            cached_tokens=self._counts["cached"],
            generated_tokens=self._counts["generated"],
            preemptions=self._scheduler.preemptions,
            steps=self._counts["steps"],
            tenants_waiting=tuple(sorted(waiting.items())),
        )

    def check(self) -> None:
        self._scheduler.check()

    # -- inside ----------------------------------------------------------------

    def _validate(self, request: GenerationRequest) -> None:
        tokens = request.prompt_token_ids
        if not tokens:
            raise BadRequest("the prompt has no tokens", param="messages")
        top = max(max(tokens), *request.delivered_token_ids, 0)
        if min(tokens) < 0 or top >= self._vocabulary:
            raise BadRequest(f"token id {top} is outside the vocabulary of {self._vocabulary}", param="messages")
        if request.sampling.max_tokens <= len(request.delivered_token_ids):
            raise BadRequest(
                f"max_tokens {request.sampling.max_tokens} leaves nothing to generate after "
                f"{len(request.delivered_token_ids)} delivered tokens",
                param="max_tokens",
            )

    def _commit(self, plan: StepPlan, logits: torch.Tensor) -> list[Output]:
        now = time.monotonic()
        self._counts["steps"] += 1
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        good = sampler.finite_rows(logits) if sampling else []
        for chunk, ok in zip(sampling, good, strict=True):
            if not ok:  # before its blocks could be published
                self._late.append(self._fail(chunk.context, EngineError("the model produced no finite score")))
        self._scheduler.computed(plan)
        rows = [i for i, chunk in enumerate(sampling) if good[i] and not chunk.context.terminal]
        live = [sampling[i].context for i in rows]
        tokens = sampler.sample(
            logits[rows], [c.request.sampling for c in live], [c.num_tokens for c in live]
        ) if live else []
        outputs = [self._append(c, token, now) for c, token in zip(live, tokens, strict=True)]
        late, self._late = self._late, []
        return late + outputs

    def _append(self, context: Context, token: int, now: float) -> Output:
        """One new token of one context: text, then is it over?"""
        if context.first_token is None:
            context.first_token = now
            self._counts["prompt"] += len(context.request.prompt_token_ids)
            self._counts["cached"] += context.cached_tokens or 0
        context.last_token = now
        context.token_ids.append(token)
        self._counts["generated"] += 1
        stream = self._texts[context.key]
        ended = token in self._eos and not context.request.sampling.ignore_eos
        text = "" if ended else stream.feed([token])
        reason: FinishReason | None = None
        if ended or stream.stopped:
            reason = "stop"
        elif context.remaining_tokens == 0:
            reason = "length"
        if reason is not None:
            text += stream.finish()
            if stream.stopped:
                reason = "stop"
            self._scheduler.end(context, ContextState.FINISHED, now, reason)
            self._forget(context)
        request = context.request
        usage = context.usage()
        return Output(request.request_id, request.generation, (token,), text, reason, usage=usage)

    def _refuse_expired(self, plan: StepPlan) -> list[Output]:
        outputs = []
        for context in plan.expired:
            self._forget(context)
            waited = time.monotonic() - context.added
            error = DeadlineExceeded(f"waited {waited:.1f} s for a place in the batch; the deadline passed")
            outputs.append(Output(*context.key, error=error, usage=context.usage()))
        return outputs

    def _fail(self, context: Context, error: EngineError) -> Output:
        self._scheduler.end(context, ContextState.FAILED, time.monotonic(), error.message)
        self._forget(context)
        return Output(*context.key, error=error, usage=context.usage())

    def _forget(self, context: Context) -> None:
        del self._contexts[context.key], self._texts[context.key]
