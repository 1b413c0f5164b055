"""Owns made-up steps of attention and their answer by definition, for every implementation and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention import reference
from engine.attention.kv import KVMemory, LayerShape
from engine.attention.step import Score, Span, Step
from engine.context import NO_BLOCK

BLOCK = 4
NAN = float("nan")


@dataclass(frozen=True)
class Part:
    """One request's part of a step."""

    start: int
    count: int
    adjoining: bool
    let_go: bool = False  # the blocks before the window


@dataclass(frozen=True)
class Case:
    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    parts: tuple[Part, ...]
    window: int | None
    softcap: float | None
    sinks: bool
    scale: float
    seed: int


def answers(
    case: Case, step: Callable[[KVMemory, list[Span]], Step], dtype: str = "float32", device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's answer and the definition's, in float64 on the CPU; every slot that should not be read holds NaN."""
    torch.manual_seed(case.seed)
    kind: torch.dtype = getattr(torch, dtype)
    heads, value_dim = case.kv_heads * case.group, case.value_dim or case.head_dim
    shape = LayerShape(case.kv_heads, case.head_dim, value_dim, case.window)
    blocks_of = [-(-(p.start + p.count) // BLOCK) for p in case.parts]
    kv = KVMemory({3: shape}, (sum(blocks_of) + 2) * BLOCK, kind, device)
    kv.keys[3].fill_(NAN)
    kv.values[3].fill_(NAN)
    free = list(range(sum(blocks_of) + 2))
    spans, rows, expected, new_keys, new_values = [], 0, [], [], []
    query = torch.randn(heads, sum(p.count for p in case.parts), case.head_dim).to(kind)
    sinks = torch.randn(heads).to(device) if case.sinks else None
    for part, count in zip(case.parts, blocks_of, strict=True):
        if part.adjoining:
            table = _adjoining(free, count)
        else:
            table = [free[i] for i in torch.randperm(len(free))[:count].tolist()]
        free = [block for block in free if block not in table]
        length = part.start + part.count
        key = torch.randn(length, case.kv_heads, case.head_dim).to(kind)
        value = torch.randn(length, case.kv_heads, value_dim).to(kind)
        oldest = 0 if case.window is None else max(0, part.start + 1 - case.window)
        for position in range(oldest, part.start):  # what lies before the window stays NaN: it must not be read
            slot = table[position // BLOCK] * BLOCK + position % BLOCK
            kv.keys[3][slot], kv.values[3][slot] = key[position].to(device), value[position].to(device)
        gone = oldest // BLOCK if part.let_go else 0
        seen = [NO_BLOCK] * gone + table[gone:]
        spans.append(Span.over(seen, BLOCK, first=rows, start=part.start, count=part.count))
        new_keys.append(key[part.start :])
        new_values.append(value[part.start :])
        expected.append(
            reference.attend(
                query[:, rows : rows + part.count].double(),
                key.transpose(0, 1).double(),
                value.transpose(0, 1).double(),
                start=part.start,
                scale=case.scale,
                window=case.window,
                softcap=case.softcap,
                sinks=None if sinks is None else sinks.double().cpu(),
            ).transpose(0, 1)
        )
        rows += part.count
    key, value = torch.cat(new_keys).transpose(0, 1), torch.cat(new_values).transpose(0, 1)
    out = step(kv, spans).attend(
        3, query.to(device), key.to(device), value.to(device), Score(case.scale, case.window, case.softcap, sinks)
    )
    assert out.shape == (rows, heads, value_dim)
    return out.double().cpu(), torch.cat(expected)


def _adjoining(free: list[int], count: int) -> list[int]:
    """A run of neighbouring free blocks if there is one, else any blocks."""
    for first in free:
        if all(first + i in free for i in range(count)):
            return list(range(first, first + count))
    return free[:count]
