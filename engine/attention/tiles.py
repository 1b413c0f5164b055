"""Owns attention of prompts on the CPU: tiles of scores, both products by oneDNN.

torch's own kernel multiplies with MKL, at half the speed where that does not know the processor: which of the two
is faster is measured once a process. Every new shape costs oneDNN half a millisecond, so shapes are rounded.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from engine.attention.step import Score
from engine.device import fastest_of

FEWEST = 128  # rows of a prompt; with fewer, torch's kernel is as fast
ROWS = 128  # of a tile, for each head
MOST_TILES = 8  # in a step: each has shapes of its own
ROUNDED_ROWS, ROUNDED_KEYS = 32, 64
SAMPLE = (4, 256, 64)  # heads, tokens, width, on which the two are compared


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, score: Score) -> torch.Tensor:
    """Causal attention of ``T`` new tokens; see ``reference.attend`` for shapes and meaning."""
    heads, new, width = query.shape
    kv_heads, length, _ = key.shape
    group = heads // kv_heads
    rows = max(ROWS, _up(-(-new // MOST_TILES), ROUNDED_ROWS))
    keys = _padded(key, _up(length, ROUNDED_KEYS))
    values = _padded(value, keys.shape[1]).transpose(1, 2).contiguous()
    queries = _padded(query * score.scale, _up(new, ROUNDED_ROWS)).view(kv_heads, group, -1, width)
    out = query.new_empty(heads, new, value.shape[2])
    grouped = out.view(kv_heads, group, new, -1)
    for first in range(0, new, rows):
        last = min(first + rows, new)
        tile = queries[:, :, first : min(first + rows, queries.shape[2])]
        begin = 0
        if score.window is not None:
            begin = max(0, start + first + 1 - score.window) // ROUNDED_KEYS * ROUNDED_KEYS
        end = _up(start + last, ROUNDED_KEYS)
        unseen = _unseen(tile.shape[2], start + first - begin, end - begin, score.window)
        for head in range(kv_heads):
            weights = _weights(tile[head], keys[head, begin:end], unseen, score, head)
            seen = _product(weights, values[head, :, begin:end].contiguous())
            grouped[head, :, first:last] = seen.view(group, tile.shape[2], -1)[:, : last - first]
    return out


def _weights(tile: torch.Tensor, keys: torch.Tensor, unseen: torch.Tensor, score: Score, head: int) -> torch.Tensor:
    """``[G * rows, keys]``, each row's sum is one, or less by what its sink takes."""
    group, rows, width = tile.shape
    scores = _product(tile.reshape(-1, width), keys)
    if score.softcap is not None:
        scores.div_(score.softcap).tanh_().mul_(score.softcap)
    scores.view(group, rows, -1)[:, :, -unseen.shape[1] :].add_(unseen)
    if score.sinks is None:
        return torch.softmax(scores, -1, out=scores)
    sinks = score.sinks.to(scores.dtype).view(-1, group)[head].repeat_interleave(rows)[:, None]
    return torch.softmax(torch.cat([scores, sinks], 1), -1)[:, :-1].contiguous()


def _product(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``rows @ columns.T``; both contiguous, or oneDNN falls back to a loop."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, columns, None, "none", [], "")
    return out


@functools.lru_cache(64)
def _unseen(rows: int, start: int, keys: int, window: int | None) -> torch.Tensor:
    """Additive, over the last columns from the first one that some row does not see (all, with a window)."""
    first = 0 if window is not None else start
    at = torch.arange(first, keys)[None]
    row = torch.arange(start, start + rows)[:, None]
    hidden = at > row
    if window is not None:
        hidden |= at <= row - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """A copy of ``[H, L, D]`` with zeros up to ``length``."""
    return F.pad(tensor, (0, 0, 0, length - tensor.shape[1])).contiguous()


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@functools.cache
def faster() -> bool:
    """Than torch's own kernel, on this processor?"""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    heads, tokens, width = SAMPLE
    query, key = torch.ones(heads, tokens, width), torch.ones(1, tokens, width)
    score = Score(width**-0.5)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with torch.inference_mode():
        theirs = fastest_of(lambda: kernel(query[None], key[None], key[None], 0.0, True, scale=score.scale))
        return fastest_of(lambda: attend(query, key, key, 0, score)) < theirs
