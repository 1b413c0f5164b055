"""Owns the choice of tokens from logits.

Sampling is the Gumbel-max trick with noise keyed on (seed, position): the choice depends on nothing but the logits, the
parameters, the seed and the position. So it is the same in any batch, after any preemption, and on any host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.logprobs import Choice
from engine.protocol import SamplingParams

NUCLEUS_FIRST_LOOK = 1024  # sorting a whole vocabulary is slow, and the nucleus nearly always lies in the top tokens


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token per row.

    Args:
        logits: ``[R, V]`` float32, penalties and bias applied.
        params: of each row.
        positions: index that the new token of each row will have in its context.
    """
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, (param, position) in enumerate(zip(params, positions, strict=True)):
        if param.temperature > 0:
            tokens[row] = _draw(logits[row] / param.temperature, param, position)
    return tokens


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Which rows of ``[R, V]`` can be sampled: a NaN anywhere, or nothing finite, fails that row alone."""
    top = logits.amax(-1)
    return torch.isfinite(top).tolist()


def with_logprobs(logits: torch.Tensor, params: Sequence[SamplingParams], tokens: Sequence[int]) -> list[Choice]:
    """The chosen tokens, with log probabilities from the model's raw ``logits`` (float32) for rows that ask."""
    choices = [Choice(token) for token in tokens]
    asking = [(row, param.logprobs) for row, param in enumerate(params) if param.logprobs is not None]
    if asking:
        rows = [row for row, _ in asking]
        table = torch.log_softmax(logits[rows], -1)
        own = table[range(len(rows)), [tokens[row] for row in rows]].tolist()
        best = table.topk(min(max(top for _, top in asking), table.shape[1]))
        values, ids = best.values.tolist(), best.indices.tolist()
        for at, (row, top) in enumerate(asking):
            choices[row] = Choice(tokens[row], own[at], tuple(zip(ids[at][:top], values[at][:top], strict=True)))
    return choices


def _draw(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    if params.top_k == 1:
        return int(logits.argmax())  # of equal scores the same as greedy takes; topk promises no order
    candidates, scores = _candidates(logits, params)
    noise = torch.from_numpy(gumbel(params.seed, position, logits.shape[0])).to(scores.device)
    noisy = scores + (noise if candidates is None else noise[candidates])
    best = int(noisy.argmax())
    return best if candidates is None else int(candidates[best])


def _candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(candidate token ids or None for all, their logits): top_k, of those top_p, of those min_p, as transformers."""
    ids, scores = None, logits
    if 0 < params.top_k < logits.shape[0]:
        scores, ids = torch.topk(logits, params.top_k)
    if params.top_p < 1:
        kept, scores = _nucleus(scores, params.top_p)
        ids = kept if ids is None else ids[kept]
    if params.min_p > 0:
        (kept,) = torch.nonzero(scores >= scores.max() + math.log(params.min_p), as_tuple=True)
        ids, scores = kept if ids is None else ids[kept], scores[kept]
    return ids, scores


def _nucleus(logits: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(places, logits): the fewest top tokens whose probability reaches ``top_p``; at least one."""
    total = torch.logsumexp(logits, -1)
    for look in (min(NUCLEUS_FIRST_LOOK, logits.shape[0]), logits.shape[0]):
        scores, ids = torch.topk(logits, look)
        before = torch.cumsum((scores - total).exp(), -1) - (scores - total).exp()
        keep = int((before < top_p).sum())
        if keep < look:
            break
    keep = max(1, keep)
    return ids[:keep], scores[:keep]


def gumbel(seed: int, position: int, size: int) -> np.ndarray:
    """``size`` standard Gumbel numbers (float32) that depend on (seed, position) only. Counter-based: Philox."""
    mask = (1 << 64) - 1
    generator = np.random.Generator(np.random.Philox(key=[seed & mask, position & mask]))
    uniform = generator.random(size, dtype=np.float32)
    tiny = np.finfo(np.float32).tiny
    return -np.log(-np.log(np.maximum(uniform, tiny)) + tiny)
