"""Owns what becomes of a preempted generation: whose blocks are taken, and whether its KV is kept or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCosts:
    """Measured when the model was loaded. Seconds are wall clock."""

    copy_seconds_per_block: float = 0.0  # device → host, or back
    prefill_seconds_per_token: float = 0.0  # to compute KV again


NOT_MEASURED = KVCosts()


def keep(costs: KVCosts, block_size: int) -> bool:
    """Is a block worth copying out and in again, or is computing it again cheaper?

    Without measurements (all zero) a copy counts as the cheaper of the two.
    """
    return 2 * costs.copy_seconds_per_block <= costs.prefill_seconds_per_token * block_size


def choose_victim(blocks_freed: Sequence[int]) -> int | None:
    """Which running generation gives its blocks up, as an index; None if none would free any.

    Args:
        blocks_freed: of each running generation, first of the order first: the blocks that only it holds. The last of
            the order goes first, but not one whose blocks are all shared: nothing would be won by it.
    """
    for index in reversed(range(len(blocks_freed))):
        if blocks_freed[index]:
            return index
    return None
