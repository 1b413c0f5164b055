"""Owns the launches of the Triton kernels for one step: tiles, splits, scratch, what a kernel is compiled for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from engine.attention import triton_kernels as kernels
from engine.attention.kv import KVMemory
from engine.attention.step import Score, Span

LEAST_ROWS = 16  # what a tensor core takes
MOST_SPLITS = 32
LEAST_KEYS_OF_A_SPLIT = 256
PROGRAMS_PER_PROCESSOR = 2  # to keep a device's memory busy

launches: Counter[str] = Counter()  # by kernel, in this process


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a program of ``attend_kernel`` takes on; compiled in."""

    queries: int
    rows: int
    keys: int
    warps: int
    stages: int


def tiling(group: int, dim: int, value_dim: int, dtype: torch.dtype, *, decoding: bool) -> Tiling:
    """The tile for heads of this shape: what registers of sm_80 and sm_90 hold (see ``tests.acceptance.kernels``)."""
    widest = max(_padded(dim), _padded(value_dim))
    whole = dtype.itemsize > 2  # float32 is not for tensor cores
    most = LEAST_ROWS if decoding or (whole and widest > 64) else 32 if whole else 64
    queries = 1 if decoding else max(1, most // _power(group))
    rows = max(LEAST_ROWS, _power(queries * group))
    keys = (32 if widest <= 64 else 16) if whole else (64 if widest <= 128 else 32)
    warps = 4 if widest <= 128 and widest * rows <= 64 * 64 and not whole else 8
    return Tiling(queries, rows, keys, warps, stages=2)


class TritonStep:
    """A step whose attention is computed by Triton kernels; see ``step.Step``."""

    def __init__(self, kv: KVMemory, spans: list[Span]) -> None:
        self._kv = kv
        self._spans = spans
        self._tiles: dict[int, torch.Tensor] = {}  # of prefill, by queries per tile
        self._device = next(iter(kv.keys.values())).device
        width = max(len(span.blocks) for span in spans)
        self._table = self._integers([[*span.blocks, *[0] * (width - len(span.blocks))] for span in spans])
        self._fields = self._integers([[span.first, span.count, span.start, span.hidden] for span in spans])
        self._slots = torch.tensor([slot for span in spans for slot in span.written()], device=self._device)
        ones = [[number, 0] for number, span in enumerate(spans) if span.count == 1]
        self._ones = self._integers(ones).view(-1, kernels.TILE_FIELDS)
        self._longest = max((span.length for span in spans if span.count == 1), default=0)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        self._store(key, keys)
        self._store(value, values)
        query = query if query.stride(2) == 1 else query.contiguous()
        out = query.new_empty(query.shape[1], query.shape[0], values.shape[2])
        if len(self._ones):
            self._decode(query, keys, values, score, out)
        if len(self._ones) < len(self._spans):
            self._prefill(query, keys, values, score, out)
        return out

    def _integers(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=self._device)

    def _store(self, new: torch.Tensor, store: torch.Tensor) -> None:
        new = new if new.stride(2) == 1 else new.contiguous()
        heads, rows, dim = new.shape
        launches["store"] += 1
        kernels.store_kernel[(rows, heads)](
            new, self._slots, store, new.stride(0), new.stride(1), heads=heads, dim=dim, DIM=_padded(dim)
        )

    def _prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, score: Score, out: torch.Tensor
    ) -> None:
        tile = _tiling_of(query, keys, values, decoding=False)
        tiles = self._tiles.get(tile.queries)
        if tiles is None:
            numbered = [(number, span) for number, span in enumerate(self._spans) if span.count > 1]
            pairs = [(number, at) for number, span in numbered for at in range(0, span.count, tile.queries)]
            tiles = self._tiles[tile.queries] = self._integers(pairs)
        self._attend("prefill", query, keys, values, score, out, tile, tiles, 1)

    def _decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, score: Score, out: torch.Tensor
    ) -> None:
        tile = _tiling_of(query, keys, values, decoding=True)
        heads, value_dim = query.shape[0], values.shape[2]
        seen = self._longest if score.window is None else min(self._longest, score.window)
        splits = splits_of(seen, len(self._ones) * keys.shape[1], _processors(self._device))
        if splits == 1:
            self._attend("decode", query, keys, values, score, out, tile, self._ones, 1)
            return
        partial = query.new_empty(len(self._ones), heads, splits, value_dim, dtype=torch.float32)
        lse = query.new_empty(len(self._ones), heads, splits, dtype=torch.float32)
        self._attend("decode", query, keys, values, score, partial, tile, self._ones, splits, lse)
        launches["merge"] += 1
        kernels.merge_kernel[(len(self._ones), heads)](
            partial,
            lse,
            _sinks(score, query),
            out,
            self._ones,
            self._fields,
            splits,
            heads=heads,
            value_dim=value_dim,
            VALUE_DIM=_padded(value_dim),
            MOST_SPLITS=MOST_SPLITS,
            HAS_SINKS=score.sinks is not None,
        )

    def _attend(
        self,
        name: str,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        score: Score,
        out: torch.Tensor,
        tile: Tiling,
        tiles: torch.Tensor,
        splits: int,
        lse: torch.Tensor | None = None,
    ) -> None:
        launches[name] += 1
        kv_heads = keys.shape[1]
        kernels.attend_kernel[(len(tiles), kv_heads, splits)](
            query,
            keys,
            values,
            _sinks(score, query),
            out,
            out if lse is None else lse,
            tiles,
            self._fields,
            self._table,
            self._table.shape[1],
            splits,
            query.stride(0),
            query.stride(1),
            score.scale,
            score.softcap or 0.0,
            **attend_constants(
                query.shape[0] // kv_heads, keys, values, self._spans[0].block_size, score, tile, split=splits > 1
            ),
        )


def attend_constants(
    group: int, keys: torch.Tensor, values: torch.Tensor, block_size: int, score: Score, tile: Tiling, *, split: bool
) -> dict[str, Any]:
    """What ``attend_kernel`` is compiled for."""
    return {
        "kv_heads": keys.shape[1],
        "group": group,
        "dim": keys.shape[2],
        "value_dim": values.shape[2],
        "block_size": block_size,
        "window": score.window or 0,
        "QUERIES": tile.queries,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "DIM": _padded(keys.shape[2]),
        "VALUE_DIM": _padded(values.shape[2]),
        "SPLIT": split,
        "HAS_SOFTCAP": score.softcap is not None,
        "HAS_SINKS": score.sinks is not None and not split,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def splits_of(keys: int, programs: int, processors: int) -> int:
    """Among how many programs a query's keys are split: a power of two, until the device is busy."""
    wanted = PROGRAMS_PER_PROCESSOR * processors // max(1, programs)
    most = min(MOST_SPLITS, keys // LEAST_KEYS_OF_A_SPLIT, wanted)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


def _tiling_of(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, decoding: bool) -> Tiling:
    group = query.shape[0] // keys.shape[1]
    return tiling(group, keys.shape[2], values.shape[2], keys.dtype, decoding=decoding)


def _sinks(score: Score, query: torch.Tensor) -> torch.Tensor:
    """A tensor for the kernel's argument; without sinks it is not read."""
    return query if score.sinks is None else score.sinks.float().contiguous()


def _power(number: int) -> int:
    power: int = triton.next_power_of_2(number)
    return power


def _padded(dim: int) -> int:
    return max(16, _power(dim))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
