"""Owns the estimate a paged-KV scheduler makes before it moves a context from WAITING to RUNNING."""

from __future__ import annotations

import math
from collections.abc import Sequence


def estimate_blocks(prompt_tokens: int, max_new_tokens: int, block_size: int, safety_factor: float) -> int:
    """KV blocks a context is expected to hold at its end.

    Args:
        block_size: tokens in one block.
        safety_factor: the share of ``max_new_tokens`` to count on. 1.0 keeps room for the longest answer and never
            preempts; smaller values bet on shorter answers and run more at once. Above 1.0 counts as 1.0.
    """
    expected_new_tokens = min(max_new_tokens, math.ceil(max_new_tokens * safety_factor))
    return math.ceil((prompt_tokens + expected_new_tokens) / block_size)


def admit(free_blocks: int, needed_now: int, estimated_total: int, running_remaining: Sequence[int] = ()) -> bool:
    """Whether a waiting context may start now.

    It may if the blocks of its next step are free and what it and all running contexts are still expected to take is
    free too: otherwise somebody would soon be preempted and the work done twice. When nothing runs there is nobody to
    wait for, so whatever fits is admitted.

    Args:
        free_blocks: free blocks, evictable cached ones included.
        needed_now: new blocks its next step takes (blocks found in the prefix cache do not count).
        estimated_total: new blocks it is expected to take until its end, ``needed_now`` included.
        running_remaining: for each running context, the blocks it is still expected to take.
    """
    if needed_now > free_blocks:
        return False
    if not running_remaining:
        return True
    return max(needed_now, estimated_total) + sum(running_remaining) <= free_blocks
