"""Owns the call of the model: from a step plan to logits. The only file that runs a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.kv import KVMemory
from engine.attention.paged import Probe, StepState, current_step
from engine.attention.torch_blocks import Span
from engine.scheduler import Chunk


class Runner:
    """Runs chunks of several contexts as one flat row of tokens ``[1, T]``."""

    def __init__(self, model: torch.nn.Module, device: str, block_size: int) -> None:
        self._model = model
        self._device = device
        self._block_size = block_size

    def probe(self, token_ids: Sequence[int]) -> tuple[Probe, torch.Tensor]:
        """One plain forward that records which layers call our attention, and how; and its scores ``[1, V]``."""
        probe = Probe()
        return probe, self._forward(probe, list(token_ids), list(range(len(token_ids))), [len(token_ids) - 1])

    def run(self, chunks: Sequence[Chunk], kv: KVMemory) -> torch.Tensor:
        """Logits ``[R, V]`` (float32) of the chunks that sample, in their order; KV of all chunks is written."""
        spans: list[Span] = []
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for chunk in chunks:
            end = chunk.start + chunk.count
            table = chunk.context.block_table
            spans.append(Span.over(table, self._block_size, first=len(ids), start=chunk.start, count=chunk.count))
            ids += chunk.context.token_ids[chunk.start : end]
            positions += range(chunk.start, end)
            if chunk.samples:
                rows.append(len(ids) - 1)
        written = torch.cat([span.written() for span in spans])
        state = StepState(kv, spans, written.to(self._device))
        return self._forward(state, ids, positions, rows)

    def _forward(self, state: StepState | Probe, ids: list[int], positions: list[int], rows: list[int]) -> torch.Tensor:
        token = current_step.set(state)
        try:
            with torch.inference_mode():
                out = self._model(
                    input_ids=torch.tensor([ids], device=self._device),
                    position_ids=torch.tensor([positions], device=self._device),
                    use_cache=False,
                    logits_to_keep=torch.tensor(rows, dtype=torch.long, device=self._device),
                )
        finally:
            current_step.reset(token)
        logits: torch.Tensor = out.logits[0]
        return logits.float()
