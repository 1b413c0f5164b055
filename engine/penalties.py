"""Owns what a context's own tokens and wishes do to its scores: bias, penalties, the least number of tokens.

Everything is counted from the context's token ids and its prompt/generated boundary at every step, never from a running
state: so a preempted, prefix-hit or taken-over generation is penalised as an undisturbed one (vLLM PR #5349).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.context import Context


def adjust(logits: torch.Tensor, contexts: Sequence[Context], eos: frozenset[int]) -> torch.Tensor:
    """Scores ``[R, V]`` (float32) to choose from; ``logits`` itself when no row asks for anything.

    Order and formulas are those of vLLM and transformers: bias, repetition penalty over prompt and answer, then
    OpenAI's presence and frequency penalties over the answer. Only cells of tokens that occur are read and written.
    A token that occurs twice is there twice: torch's ``unique`` took 160 ms for 37k tokens, and is not needed.
    """
    asking = [(row, context, context.request.sampling) for row, context in enumerate(contexts)]
    biased = [row for row in asking if row[2].logit_bias]
    repeated = [row for row in asking if row[2].repetition_penalty != 1]
    counted = [row for row in asking if row[2].presence_penalty or row[2].frequency_penalty]
    early = [row for row in asking if row[1].num_generated < row[2].min_tokens]
    if not (biased or repeated or counted or early):
        return logits
    scores = logits.clone(memory_format=torch.contiguous_format)
    flat = scores.view(-1)
    for row, _, sampling in biased:
        cells = _Cells(scores, [(row, [token]) for token, _ in sampling.logit_bias])
        flat.index_add_(0, cells.at, cells.each([bias for _, bias in sampling.logit_bias]))
    if repeated:
        cells = _Cells(scores, [(row, context.token_ids) for row, context, _ in repeated])
        penalty = cells.each([sampling.repetition_penalty for _, _, sampling in repeated])
        score = flat[cells.at]
        flat[cells.at] = torch.where(
            score > 0, score / penalty, score * penalty
        )  # twice the same value, once an effect
    if counted:
        cells = _Cells(scores, [(row, context.generated_ids) for row, context, _ in counted])
        flat[cells.at] = flat[cells.at] - cells.each([sampling.presence_penalty for _, _, sampling in counted])
        flat.index_add_(0, cells.at, cells.each([-sampling.frequency_penalty for _, _, sampling in counted]))
    if early:
        flat[_Cells(scores, [(row, sorted(eos)) for row, _, _ in early]).at] = -torch.inf
    return scores


class _Cells:
    """Cells of ``[R, V]`` scores by their place ``at`` in the flat view, so that one operation serves all rows."""

    def __init__(self, scores: torch.Tensor, tokens: Sequence[tuple[int, Sequence[int]]]) -> None:
        places = [np.array(ids, dtype=np.int64) + row * scores.shape[1] for row, ids in tokens]
        self._sizes = [len(ids) for _, ids in tokens]
        self._device = scores.device
        self.at = torch.from_numpy(np.concatenate(places)).to(scores.device)

    def each(self, values: Sequence[float]) -> torch.Tensor:
        """One value per (row, token ids), for each of its cells."""
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), self._sizes)).to(self._device)
