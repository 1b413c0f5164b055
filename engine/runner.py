"""Owns the call of the model: from a step plan to logits. The only file that runs a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.attention.kv import KVMemory
from engine.attention.paged import Probe, current_step
from engine.attention.step import Span, Step
from engine.attention.torch_blocks import TorchStep
from engine.scheduler import Chunk


class Runner:
    """Runs chunks of several contexts as one flat row of tokens ``[1, T]``."""

    def __init__(self, model: torch.nn.Module, device: str, block_size: int) -> None:
        self.model = model
        self._device = device
        self._block_size = block_size
        self.step = step_on(device)
        self.attention = "torch" if device == "cpu" else "Triton"  # for people

    def probe(self, token_ids: Sequence[int]) -> tuple[Probe, torch.Tensor]:
        """One plain forward that records which layers call our attention, and how; and its scores ``[1, V]``."""
        probe = Probe()
        return probe, self._last(probe, token_ids)

    def plain(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Scores ``[1, V]`` of one forward of a model whose attention is not ours at the moment."""
        return self._last(None, token_ids)

    def _last(self, step: Step | None, token_ids: Sequence[int]) -> torch.Tensor:
        return self._forward(step, list(token_ids), list(range(len(token_ids))), [len(token_ids) - 1])

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
        return self._forward(self.step(kv, spans), ids, positions, rows)

    def _forward(self, step: Step | None, ids: list[int], positions: list[int], rows: list[int]) -> torch.Tensor:
        token = current_step.set(step)
        try:
            with torch.inference_mode():
                out = self.model(
                    input_ids=torch.tensor([ids], device=self._device),
                    position_ids=torch.tensor([positions], device=self._device),
                    use_cache=False,
                    logits_to_keep=torch.tensor(rows, dtype=torch.long, device=self._device),
                )
        finally:
            current_step.reset(token)
        logits: torch.Tensor = out.logits[0]
        return logits.float()


def step_on(device: str) -> Callable[[KVMemory, list[Span]], Step]:
    """How attention is computed there."""
    if device == "cpu":
        return TorchStep
    from engine.attention.triton_step import TritonStep  # only where there is a device to compile for

    return TritonStep
