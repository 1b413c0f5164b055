"""Owns paged attention on CPU tensors: one request at a time over its own blocks, never a dense T × ΣK mask.

Sources: PagedAttention (vLLM, SOSP 2023) for the block tables; the merge of two partial softmaxes by their log-sum-exp
is FlashAttention's and Flash-Decoding's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention import reference
from engine.attention.kv import KVMemory
from engine.attention.step import Score, Span


class TorchStep:
    """A step whose attention is computed by torch; see ``step.Step``."""

    def __init__(self, kv: KVMemory, spans: list[Span]) -> None:
        self._kv = kv
        self._slots = torch.tensor([slot for span in spans for slot in span.written()])
        self._reads = [_Read(span) for span in spans]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        keys.index_copy_(0, self._slots, key.transpose(0, 1))
        values.index_copy_(0, self._slots, value.transpose(0, 1))
        out = query.new_empty(query.shape[1], query.shape[0], values.shape[2])
        for read in self._reads:
            span = read.span
            rows = slice(span.first, span.first + span.count)
            skip = _unseen(span, score.window)
            one = _attend_one(query[:, rows], read.tokens(keys, skip), read.tokens(values, skip), read, score)
            out[rows] = one.transpose(0, 1)
        return out


class _Read:
    """How one span reads its tokens, the same in every layer of a step."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self._adjoining = span.adjoining
        self._blocks = torch.tensor(span.blocks)
        self.masks: dict[int, torch.Tensor] = {}  # by window

    def tokens(self, store: torch.Tensor, skip: int) -> torch.Tensor:
        """``[H, length - skip, D]``: its tokens from ``skip`` on, out of ``store`` ``[slots, H, D]``.

        Whole blocks are gathered: a row of one token is too short for a fast copy. Those that adjoin are not gathered.
        """
        size = self.span.block_size
        skip, length = skip - self.span.hidden, self.span.length - self.span.hidden
        if self._adjoining:
            begin = self.span.blocks[0] * size
            return store[begin + skip : begin + length].transpose(0, 1)
        before = skip // size
        blocks = store.view(-1, size, *store.shape[1:]).index_select(0, self._blocks[before:])
        inside = before * size
        return blocks.flatten(0, 1)[skip - inside : length - inside].transpose(0, 1)


def _unseen(span: Span, window: int | None) -> int:
    """How many of its first tokens none of this span's rows can see."""
    return 0 if window is None else max(0, span.start + 1 - window)


def _attend_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, read: _Read, score: Score) -> torch.Tensor:
    span = read.span
    # SDPA can do neither of the two, and its CPU kernel wants values as wide as keys
    if score.softcap is not None or score.sinks is not None or key.shape[2] != value.shape[2]:
        return _plain(query, key, value, span, score)
    if span.count == 1:
        return _decode(query, key, value, score.scale)
    if score.window is not None and span.length > score.window:
        return _windowed(query, key, value, read, score)
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


def _windowed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, read: _Read, score: Score) -> torch.Tensor:
    """A chunk that reaches beyond the window needs a mask: ``[T, T + window]`` at most, made once a step."""
    assert score.window is not None
    mask = read.masks.get(score.window)
    if mask is None:
        mask = reference.visible(read.span.start, read.span.count, key.shape[1], score.window, query.device)
        read.masks[score.window] = mask
    out = F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=score.scale, enable_gqa=True
    )
    return out[0]
