"""Owns paged attention on CPU tensors: one request at a time over its own blocks, never a dense T × ΣK mask.

Sources: PagedAttention (vLLM, SOSP 2023) for the block tables; the merge of two partial softmaxes by their log-sum-exp
is FlashAttention's and Flash-Decoding's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.attention import reference
from engine.attention.kv import KVMemory
from engine.context import NO_BLOCK


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of a step: rows ``first..first+count-1`` are its tokens ``start..start+count-1``."""

    first: int
    count: int
    start: int
    blocks: torch.Tensor  # [n] block ids of its tokens hidden..start+count-1
    block_size: int
    hidden: int  # of its first tokens, whole blocks of them: before every layer's window, their KV is let go
    adjoining: bool  # do the blocks follow each other? Then nothing is gathered
    masks: dict[int, torch.Tensor] = field(default_factory=dict)  # by window, shared by the layers of a step

    @classmethod
    def over(cls, table: Sequence[int], block_size: int, *, first: int, start: int, count: int) -> Span:
        """The span of a request with this block table."""
        used = table[: -(-(start + count) // block_size)]
        unseen = sum(block == NO_BLOCK for block in used)
        used = used[unseen:]
        adjoining = all(b - a == 1 for a, b in itertools.pairwise(used))
        return cls(first, count, start, torch.tensor(used), block_size, unseen * block_size, adjoining)

    @property
    def length(self) -> int:
        return self.start + self.count

    def written(self) -> torch.Tensor:
        """Slots ``[count]`` of its new tokens."""
        positions = torch.arange(self.start - self.hidden, self.length - self.hidden)
        return self.blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def read(self, store: torch.Tensor, skip: int) -> torch.Tensor:
        """``[H, length - skip, D]``: its tokens from ``skip`` on, out of ``store`` ``[slots, H, D]``.

        Whole blocks are gathered: a row of one token is too short for a fast copy.
        """
        skip, length = skip - self.hidden, self.length - self.hidden
        if self.adjoining:
            begin = int(self.blocks[0]) * self.block_size
            return store[begin + skip : begin + length].transpose(0, 1)
        before = skip // self.block_size
        blocks = store.view(-1, self.block_size, *store.shape[1:]).index_select(0, self.blocks[before:])
        inside = before * self.block_size
        return blocks.flatten(0, 1)[skip - inside : length - inside].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Score:
    """How scores are formed in one layer."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def attend(query: torch.Tensor, kv: KVMemory, layer: int, spans: list[Span], score: Score) -> torch.Tensor:
    """Attention of all rows of a step.

    Args:
        query: ``[Hq, T, D]``; keys and values of these rows are already in ``kv``.

    Returns:
        ``[T, Hq, Dv]``.
    """
    keys, values = kv.keys[layer], kv.values[layer]
    out = query.new_empty(query.shape[1], query.shape[0], values.shape[2])
    for span in spans:
        rows = slice(span.first, span.first + span.count)
        skip = _unseen(span, score.window)
        key, value = span.read(keys, skip), span.read(values, skip)
        out[rows] = _attend_one(query[:, rows], key, value, span, score).transpose(0, 1)
    return out


def _unseen(span: Span, window: int | None) -> int:
    """How many of its first tokens none of this span's rows can see."""
    return 0 if window is None else max(0, span.start + 1 - window)


def _attend_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, score: Score) -> torch.Tensor:
    # SDPA can do neither of the two, and its CPU kernel wants values as wide as keys
    if score.softcap is not None or score.sinks is not None or key.shape[2] != value.shape[2]:
        return _plain(query, key, value, span, score)
    if span.count == 1:
        return _decode(query, key, value, score.scale)
    if score.window is not None and span.length > score.window:
        return _windowed(query, key, value, span, score)
    return _causal(query, key, value, span.start, score.scale)


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, score: Score) -> torch.Tensor:
    skipped = span.length - key.shape[1]
    return reference.attend(
        query,
        key,
        value,
        start=span.start - skipped,
        scale=score.scale,
        window=score.window,
        softcap=score.softcap,
        sinks=score.sinks,
    )


def _decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """One new token sees every key: the query heads of a group are rows against one KV head, no mask, no repeat."""
    kv_heads = key.shape[0]
    grouped = query.reshape(1, kv_heads, -1, query.shape[2])
    out = F.scaled_dot_product_attention(grouped, key[None], value[None], scale=scale)
    return out.reshape(query.shape[0], 1, value.shape[2])


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """Old keys without a mask, own keys causally, merged by log-sum-exp: no mask is ever made."""
    own, own_lse = _flash(query, key[:, start:], value[:, start:], causal=True, scale=scale)
    if start == 0:
        return own
    old, old_lse = _flash(query, key[:, :start], value[:, :start], causal=False, scale=scale)
    total = torch.logaddexp(own_lse, old_lse)
    return own * (own_lse - total).exp()[..., None] + old * (old_lse - total).exp()[..., None]


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], key[None], value[None], 0.0, causal, scale=scale
    )
    return out[0], lse[0].to(out.dtype)


def _windowed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, score: Score) -> torch.Tensor:
    """A chunk that reaches beyond the window needs a mask: ``[T, T + window]`` at most, made once a step."""
    assert score.window is not None
    mask = span.masks.get(score.window)
    if mask is None:
        mask = reference.visible(span.start, span.count, key.shape[1], score.window, query.device)
        span.masks[score.window] = mask
    out = F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=score.scale, enable_gqa=True
    )
    return out[0]
