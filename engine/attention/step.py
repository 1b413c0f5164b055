"""Owns the words between the runner and attention: whose rows a step has, and how scores are formed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.context import NO_BLOCK


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of a step: rows ``first..first+count-1`` are its tokens ``start..start+count-1``."""

    first: int
    count: int
    start: int
    blocks: tuple[int, ...]  # of its tokens hidden..start+count-1
    block_size: int
    hidden: int  # of its first tokens, whole blocks of them: before every layer's window, their KV is let go

    @classmethod
    def over(cls, table: Sequence[int], block_size: int, *, first: int, start: int, count: int) -> Span:
        """The span of a request with this block table."""
        used = table[: -(-(start + count) // block_size)]
        unseen = sum(block == NO_BLOCK for block in used)
        return cls(first, count, start, tuple(used[unseen:]), block_size, unseen * block_size)

    @property
    def length(self) -> int:
        return self.start + self.count

    @property
    def adjoining(self) -> bool:
        """Do the blocks follow each other?"""
        return all(b - a == 1 for a, b in itertools.pairwise(self.blocks))

    def written(self) -> list[int]:
        """Slots of its new tokens."""
        size = self.block_size
        inside = range(self.start - self.hidden, self.length - self.hidden)
        return [self.blocks[position // size] * size + position % size for position in inside]


@dataclass(frozen=True, slots=True)
class Score:
    """How scores are formed in one layer."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [Hq]


class Step(Protocol):
    """One run of the model, as attention sees it."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        """Keep the new keys and values, then attend.

        Args:
            query: ``[Hq, T, D]``, all rows of the step.
            key: ``[Hkv, T, D]``.
            value: ``[Hkv, T, Dv]``.

        Returns:
            ``[T, Hq, Dv]``, the caller's own.
        """
