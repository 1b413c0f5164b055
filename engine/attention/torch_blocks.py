"""Owns paged attention on CPU tensors: over each request's own blocks, never a dense T × ΣK mask.

Decoding requests of about one length are attended together, their blocks gathered side by side: for short ones a call
costs more than its work. All others are attended one by one, where their blocks lie.

Sources: PagedAttention (vLLM, SOSP 2023) for the block tables; the merge of two partial softmaxes by their log-sum-exp
is FlashAttention's and Flash-Decoding's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention import reference
from engine.attention.kv import KVMemory
from engine.attention.step import Score, Span

BATCHED_TOKENS = 512  # of a request: beyond, gathering its KV costs more than a call of its own
FILLED_TOKENS = 128  # most by which one is filled up to the longest: what a call of its own would cost


class TorchStep:
    """A step whose attention is computed by torch; see ``step.Step``."""

    def __init__(self, kv: KVMemory, spans: list[Span]) -> None:
        self._kv = kv
        self._slots = torch.tensor([slot for span in spans for slot in span.written()])
        groups = _alike(spans)
        together = {span.first for group in groups for span in group}
        self._batches = [_Batch(group) for group in groups]
        self._reads = [_Read(span) for span in spans]
        self._alone = [read for read in self._reads if read.span.first not in together]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        keys.index_copy_(0, self._slots, key.transpose(0, 1))
        values.index_copy_(0, self._slots, value.transpose(0, 1))
        batches, alone = (self._batches, self._alone) if _is_flash(keys, values, score) else ([], self._reads)
        out = query.new_empty(query.shape[1], query.shape[0], values.shape[2])
        for batch in batches:
            batch.attend(query.transpose(0, 1), keys, values, score, out)
        for read in alone:
            span = read.span
            rows = slice(span.first, span.first + span.count)
            skip = _unseen(span, score.window)
            one = _attend_one(query[:, rows], read.tokens(keys, skip), read.tokens(values, skip), read, score)
            out[rows] = one.transpose(0, 1)
        return out


def _alike(spans: list[Span]) -> list[list[Span]]:
    """Short decoding requests, the longest first, with those of about its length."""
    groups: list[list[Span]] = []
    short = [span for span in spans if span.count == 1 and span.length - span.hidden <= BATCHED_TOKENS]
    for span in sorted(short, key=lambda span: len(span.blocks), reverse=True):
        if not groups or (len(groups[-1][0].blocks) - len(span.blocks)) * span.block_size > FILLED_TOKENS:
            groups.append([])
        groups[-1].append(span)
    return [group for group in groups if len(group) > 1]


class _Batch:
    """Decoding requests attended together: their blocks side by side, the shorter ones filled up with nothing."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self._size = spans[0].block_size
        most = max(len(span.blocks) for span in spans)
        self._length = most * self._size
        self._rows = torch.tensor([span.first for span in spans])
        self._blocks = torch.tensor(
            [block for span in spans for block in (*span.blocks, *[span.blocks[0]] * (most - len(span.blocks)))]
        )
        self._gathered = torch.empty(2, 0, 0)  # keys and values, the same memory in every layer: it stays in the cache
        self._position = torch.tensor([[span.start - span.hidden] for span in spans])
        self._unseen: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}  # by window

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, score: Score, out: torch.Tensor
    ) -> None:
        """Write the rows of this batch. ``query`` ``[T, Hq, D]``, ``keys`` and ``values`` ``[slots, Hkv, D]``."""
        rows, heads = len(self._spans), keys.shape[1]
        slots, mask = self._not_seen(score.window)
        width = self._size * heads * keys.shape[2]
        if self._gathered.shape[2] != width or self._gathered.dtype is not keys.dtype:
            self._gathered = keys.new_empty(2, len(self._blocks), width)
        grouped = query.index_select(0, self._rows).view(rows, heads, -1, query.shape[2])
        together, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped,
            self._gather(keys, slots, self._gathered[0]),
            self._gather(values, slots, self._gathered[1]),
            attn_mask=mask.to(query.dtype),
            scale=score.scale,
        )
        if score.sinks is not None:
            together = _with_sinks(together, lse, score.sinks.view(heads, -1))
        out.index_copy_(0, self._rows, together.reshape(rows, *out.shape[1:]))

    def _gather(self, store: torch.Tensor, empty: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """``[R, Hkv, L, D]``, zero in slots that nobody sees: whatever is left in them, NaN too, would count."""
        blocks = store.view(-1, self._size * store.shape[1] * store.shape[2])
        torch.index_select(blocks, 0, self._blocks, out=into)
        tokens = into.view(-1, *store.shape[1:]).index_fill_(0, empty, 0.0)
        return tokens.view(len(self._spans), self._length, *store.shape[1:]).transpose(1, 2)

    def _not_seen(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What each row's token does not see: flat slots, and an additive mask ``[R, 1, 1, L]``."""
        if window not in self._unseen:
            at = torch.arange(self._length)
            unseen = at > self._position
            if window is not None:
                unseen |= at <= self._position - window
            mask = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
            self._unseen[window] = torch.nonzero(unseen.flatten()).flatten(), mask[:, None, None]
        return self._unseen[window]


def _is_flash(keys: torch.Tensor, values: torch.Tensor, score: Score) -> bool:
    """Can torch's CPU kernel do it? It cannot softcap, and wants values as wide as keys."""
    return score.softcap is None and keys.shape[2] == values.shape[2]


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Let ``sinks`` ``[..., T]`` take their part of the softmax: ``out`` ``[..., T, D]``, ``lse`` ``[..., T]``."""
    return out * (lse - torch.logaddexp(lse, sinks.to(lse.dtype))).exp()[..., None].to(out.dtype)


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
    if score.sinks is not None or not _is_flash(key, value, score):
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
