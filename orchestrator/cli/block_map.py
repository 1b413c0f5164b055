"""Owns the drawing of a KV pool as text: one character per block, or per several. Pure."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.snapshot import BlockUse

LETTERS = string.ascii_letters + string.digits
OTHERS = "#"  # those for whom no letter is left
SHARED = "*"
PLACES = {
    "free": ".", "cached": "+", "pinned": "^", "fenced": "~", "arriving": "<", "retired": "-", "unexplained": "!",
}  # fmt: skip
WORDS = {mark: word for word, mark in PLACES.items()} | {SHARED: "shared"}
MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A drawn pool."""

    lines: tuple[str, ...]
    blocks_per_character: int  # more than 1: a character is the most frequent mark of its blocks
    letters: dict[int, str]  # context id → its letter, most blocks first
    counts: dict[str, int]  # mark → blocks


def draw(blocks: Sequence[BlockUse], width: int, most_lines: int = MOST_LINES) -> BlockMap:
    """The map of a pool in lines of at most ``width`` characters."""
    letters = _letters(blocks)
    marks = "".join(_mark(use, letters) for use in blocks)
    each = max(1, -(-len(marks) // (width * most_lines)))
    cells = "".join(_most_frequent(marks[at : at + each]) for at in range(0, len(marks), each))
    lines = tuple(cells[at : at + width] for at in range(0, len(cells), width))
    return BlockMap(lines, each, letters, dict(Counter(marks)))


def _letters(blocks: Sequence[BlockUse]) -> dict[int, str]:
    held: Counter[int] = Counter()
    for use in blocks:
        if not isinstance(use, str):
            held.update(use)
    owners = sorted(held, key=lambda owner: (-held[owner], owner))
    return {owner: LETTERS[place] if place < len(LETTERS) else OTHERS for place, owner in enumerate(owners)}


def _mark(use: BlockUse, letters: dict[int, str]) -> str:
    if isinstance(use, str):
        return PLACES[use]
    return SHARED if len(use) > 1 else letters[use[0]]


def _most_frequent(marks: str) -> str:
    """Of equally frequent ones the first; a block that nobody explains is always shown."""
    return PLACES["unexplained"] if PLACES["unexplained"] in marks else Counter(marks).most_common(1)[0][0]
