"""Owns the Triton kernels: KV store, attention of a tile of queries over paged KV, and the merge of split keys.

One kernel attends for prefill (many queries of one request in a tile) and for decoding (one query, its keys split among
several programs, whose partial results a second kernel merges). The definition they are tested against is
``reference.attend``. All indices into the KV pool are 64-bit: a pool is larger than 2^31 elements.

Sources: FlashAttention-2 (online softmax, base 2), Flash-Decoding (split keys), PagedAttention (block tables); query
heads of one KV head share a tile so that each key is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPAN_FIELDS = 4  # of a row of ``spans``: first row, count, start, hidden (see ``step.Span``)
TILE_FIELDS = 2  # of a row of ``tiles``: span, offset of its first query in the span


@triton.jit
def store_kernel(
    new,  # [heads, T, dim], any strides but the last
    slots,  # [T] int64
    store,  # [slots, heads, dim], contiguous
    head_stride,
    row_stride,
    heads: tl.constexpr,
    dim: tl.constexpr,
    DIM: tl.constexpr,  # dim, or the next power of two
):
    """Program (row, head): one row of keys, or of values, goes to its slot."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    column = tl.arange(0, DIM)
    inside = column < dim
    content = tl.load(new + head * head_stride + row.to(tl.int64) * row_stride + column, mask=inside)
    tl.store(store + (slot * heads + head) * dim + column, content, mask=inside)


@triton.jit(do_not_specialize=["table_width", "splits"])  # else one more compilation, on a request's time
def attend_kernel(  # noqa: PLR0915 — a kernel calls nothing
    query,  # [Hq, T, dim], any strides but the last
    keys,  # [slots, kv_heads, dim], contiguous
    values,  # [slots, kv_heads, value_dim], contiguous
    sinks,  # [Hq] float32, or anything without HAS_SINKS
    out,  # [T, Hq, value_dim]; with SPLIT float32 [tiles, Hq, splits, value_dim], and one query a tile
    lse,  # with SPLIT: float32 [tiles, Hq, splits], log2 of the sum of the split's weights
    tiles,  # [tiles, TILE_FIELDS] int32
    spans,  # [spans, SPAN_FIELDS] int32
    table,  # [spans, table_width] int32: block ids of each span's tokens from `hidden` on
    table_width,
    splits,
    query_head_stride,
    query_row_stride,
    scale,  # of scores
    softcap,  # used with HAS_SOFTCAP
    kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads of one KV head
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,  # 0: everything before is seen
    QUERIES: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,  # QUERIES * group, or the next power of two; at least 16
    KEYS: tl.constexpr,  # handled at a time
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (tile, KV head, split): online softmax over the tile's visible keys, or over its share of them."""
    LOG2E: tl.constexpr = 1.4426950408889634
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = tl.load(tiles + tile * 2)
    offset = tl.load(tiles + tile * 2 + 1)
    first = tl.load(spans + span * 4)
    count = tl.load(spans + span * 4 + 1)
    start = tl.load(spans + span * 4 + 2)
    hidden = tl.load(spans + span * 4 + 3)

    row = tl.arange(0, ROWS)
    token = offset + row // group  # in the span
    head = kv_head * group + row % group
    live = (row < QUERIES * group) & (token < count)
    position = start + token
    column = tl.arange(0, DIM)
    value_column = tl.arange(0, VALUE_DIM)
    query_at = query + head[:, None] * query_head_stride + (first + token)[:, None].to(tl.int64) * query_row_stride
    q = tl.load(query_at + column[None, :], mask=live[:, None] & (column < dim)[None, :], other=0.0)

    stop = start + tl.minimum(offset + QUERIES, count)  # keys hidden..stop-1 are seen by some row of the tile
    begin = hidden
    if window > 0:
        begin = tl.maximum(begin, start + offset + 1 - window)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(stop - begin, KEYS), splits) * KEYS
        begin += split * share
        stop = tl.minimum(stop, begin + share)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    for at in range(begin, stop, KEYS):
        key = at + tl.arange(0, KEYS)  # positions
        there = key < stop
        inside = key - hidden
        block = tl.load(table + span * table_width + inside // block_size, mask=there, other=0)
        slot = block.to(tl.int64) * block_size + inside % block_size
        k_at = keys + (slot * kv_heads + kv_head)[None, :] * dim + column[:, None]
        k = tl.load(k_at, mask=there[None, :] & (column < dim)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        seen = (key[None, :] <= position[:, None]) & there[None, :]
        if window > 0:
            seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weights = tl.exp2(scores - shift[:, None])
        before = tl.exp2(top - shift)
        total = total * before + tl.sum(weights, 1)
        v_at = values + (slot * kv_heads + kv_head)[:, None] * value_dim + value_column[None, :]
        v = tl.load(v_at, mask=there[:, None] & (value_column < value_dim)[None, :], other=0.0)
        acc = acc * before[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher

    heads = kv_heads * group
    if SPLIT:
        partial = (tile * heads + head).to(tl.int64) * splits + split
        share_of = tl.where(total > 0.0, total, 1.0)  # a share without a key: no weight, and a value that is a number
        tl.store(lse + partial, tl.where(total > 0.0, top + tl.log2(share_of), float("-inf")), mask=live)
        result = acc / share_of[:, None]
        into = out + partial[:, None] * value_dim
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2E
            higher = tl.maximum(top, sink)
            before = tl.exp2(top - higher)
            total = total * before + tl.exp2(sink - higher)
            acc = acc * before[:, None]
        result = acc / tl.where(live, total, 1.0)[:, None]
        into = out + ((first + token).to(tl.int64) * heads + head)[:, None] * value_dim
    tl.store(
        into + value_column[None, :],
        result.to(out.dtype.element_ty),
        mask=live[:, None] & (value_column < value_dim)[None, :],
    )


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    partial,  # float32 [tiles, heads, splits, value_dim]
    lse,  # float32 [tiles, heads, splits]
    sinks,  # [heads] float32, or anything without HAS_SINKS
    out,  # [T, heads, value_dim]
    tiles,
    spans,
    splits,
    heads: tl.constexpr,
    value_dim: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,  # a power of two
    HAS_SINKS: tl.constexpr,
):
    """Program (tile, head): the one query's shares, weighted by their sums."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(spans + tl.load(tiles + tile * 2) * 4)
    split = tl.arange(0, MOST_SPLITS)
    column = tl.arange(0, VALUE_DIM)
    base = (tile * heads + head).to(tl.int64) * splits
    there = split < splits
    sums = tl.load(lse + base + split, mask=there, other=float("-inf"))
    top = tl.max(sums, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        top = tl.maximum(top, sink)
    weights = tl.exp2(sums - top)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    share_at = partial + (base + split)[:, None] * value_dim + column[None, :]
    shares = tl.load(share_at, mask=there[:, None] & (column < value_dim)[None, :], other=0.0)
    result = tl.sum(shares * weights[:, None], 0) / total
    tl.store(
        out + (row.to(tl.int64) * heads + head) * value_dim + column,
        result.to(out.dtype.element_ty),
        mask=column < value_dim,
    )
