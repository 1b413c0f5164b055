"""Owns the engine of real models: torch weights, paged KV, transformers' model code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from engine import canary, penalties, sampler
from engine.canary import warm_up
from engine.core import EngineCore
from engine.device import ThreadGovernor
from engine.loader import load_model
from engine.logprobs import Choice
from engine.memory import trim
from engine.protocol import EngineLimits, LoadReport
from engine.scheduler import Chunk
from engine.tiers import Move, Way


class TorchEngine(EngineCore):
    """Inference for one causal language model."""

    def __init__(self, path: Path, memory_bytes: int, limits: EngineLimits, dtype: str = "float32") -> None:
        """Nothing is read before ``load``.

        Args:
            path: directory with config.json, safetensors and tokenizer.json.
            memory_bytes: all this process may hold: residual + weights + activation peak + KV pool.
        """
        super().__init__(limits)
        self.path = path
        self.memory_bytes = memory_bytes
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def load(self) -> LoadReport:
        loaded = load_model(self.path, self.memory_bytes, self.limits, self.dtype, self.device)
        self.limits = loaded.limits
        self._weights, self._kv, self._runner = loaded.weights, loaded.kv, loaded.runner
        self._host_kv = loaded.host_kv
        self._governor = ThreadGovernor(torch.get_num_threads())
        tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        self._begin(loaded.report, tokenizer, loaded.eos_token_ids, loaded.vocabulary)
        return loaded.report

    def _warm(self) -> None:
        warm_up(self._runner, self._kv, self.limits)
        self._canary_tokens = canary.answer(self._runner, self._kv, self.limits)
        trim()  # what measuring and warming up have used once

    def _canary(self) -> None:
        canary.check(self._runner, self._kv, self.limits, self._canary_tokens)

    def _compute(self, chunks: Sequence[Chunk]) -> list[Choice | None]:
        with self._governor.step():
            logits = self._runner.run(chunks, self._kv)
        sampled = [chunk.context for chunk in chunks if chunk.samples]
        if not sampled:
            return []
        finite = sampler.finite_rows(logits)
        if not all(finite):
            logits = logits.nan_to_num(0.0)
        params = [context.request.sampling for context in sampled]
        scores = penalties.adjust(logits, sampled, self._eos)
        tokens = sampler.sample(scores, params, [context.num_tokens for context in sampled])
        choices = sampler.with_logprobs(logits, params, tokens)
        return [choice if ok else None for choice, ok in zip(choices, finite, strict=True)]

    def _read_kv(self, blocks: Sequence[int], *, host: bool) -> np.ndarray:
        content: np.ndarray = (self._host_kv if host else self._kv).read_blocks(blocks, self.limits.block_size).numpy()
        return content

    def _write_kv(self, blocks: Sequence[int], content: np.ndarray) -> None:
        self._kv.write_blocks(blocks, torch.from_numpy(content), self.limits.block_size)

    def _move(self, moves: Sequence[Move]) -> None:
        size = self.limits.block_size
        for way, group in itertools.groupby(moves, key=lambda move: move.way):
            if way is Way.OUT:
                places = {move.slot: move.block for move in group}  # a slot written twice: the later counts
                self._kv.copy_blocks(self._host_kv, [(block, slot) for slot, block in places.items()], size)
            elif way is Way.IN:
                self._host_kv.copy_blocks(self._kv, [(move.slot, move.block) for move in group], size)
            else:
                self._kv.copy_blocks(self._kv, [(move.block, move.slot) for move in group], size)

    def _keep_memory(self, blocks: int) -> None:
        self._kv.keep(blocks, self.limits.block_size)

    def _give_back(self) -> None:
        self._weights.sleep()
        self._kv.give_back()
        trim()  # malloc would keep what steps have used, and the residual would grow

    def _take_again(self) -> None:
        self._weights.wake()
        trim()  # what converting weights from another dtype has used
        self._kv.take_again()
