"""Owns the choice of tokens from logits.

Sampling is the Gumbel-max trick with noise keyed on (seed, position): the choice depends on nothing but the logits, the
parameters, the seed and the position. So it is the same in any batch, after any preemption, and on any host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.protocol import SamplingParams

NUCLEUS_FIRST_LOOK = 1024  # sorting a whole vocabulary is slow, and the nucleus nearly always lies in the top tokens


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token per row.

    Args:
        logits: ``[R, V]`` float32.
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


def _draw(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    candidates, scores = _nucleus(logits, params.top_p)
    noise = torch.from_numpy(gumbel(params.seed, position, logits.shape[0])).to(scores.device)
    noisy = scores + (noise if candidates is None else noise[candidates])
    best = int(noisy.argmax())
    return best if candidates is None else int(candidates[best])


def _nucleus(logits: torch.Tensor, top_p: float) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(candidate token ids, their logits): the fewest top tokens whose probability reaches ``top_p``; at least one."""
    if top_p >= 1:
        return None, logits
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
