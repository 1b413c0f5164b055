"""The drawn KV pool: one character per block, or per several."""

from __future__ import annotations

from engine.snapshot import BlockUse
from orchestrator.cli.block_map import LETTERS, draw


def test_every_kind_of_block_has_its_mark() -> None:
    drawn = draw(["free", (7,), (7,), (7, 9), (9,), "cached", "fenced", "unexplained"], 80)
    assert drawn.lines == (".aa*b+~!",)
    assert drawn.letters == {7: "a", 9: "b"}
    assert drawn.counts == {".": 1, "a": 2, "*": 1, "b": 1, "+": 1, "~": 1, "!": 1}
    assert drawn.blocks_per_character == 1


def test_letters_go_by_blocks_held_shared_ones_included() -> None:
    blocks: list[BlockUse] = [(1,), (2, 3), (2, 3), (3,)]
    assert draw(blocks, 80).letters == {3: "a", 2: "b", 1: "c"}


def test_lines_are_wrapped_to_the_width() -> None:
    drawn = draw(["free"] * 25, 10)
    assert [len(line) for line in drawn.lines] == [10, 10, 5]


def test_a_pool_that_fills_the_lines_exactly_is_drawn_block_by_block() -> None:
    assert draw(["free"] * 200, 10).blocks_per_character == 1
    assert draw(["free"] * 201, 10).blocks_per_character == 2


def test_with_too_many_blocks_a_character_is_what_most_of_its_blocks_are() -> None:
    blocks: list[BlockUse] = [(1,), (1,), "free", "free", "free", (1,), "cached", "cached"]
    drawn = draw(blocks, 3, most_lines=1)
    assert (drawn.lines, drawn.blocks_per_character) == (("a.+",), 3)
    assert drawn.counts == {"a": 3, ".": 3, "+": 2}


def test_a_block_that_nobody_explains_is_never_lost_in_a_crowd() -> None:
    assert draw(["free", "free", "unexplained", "free"], 1, most_lines=1).lines == ("!",)


def test_more_contexts_than_letters_share_one_mark() -> None:
    drawn = draw([(owner,) for owner in range(len(LETTERS) + 2)], 100)
    assert drawn.lines == (LETTERS + "##",)
    assert len(drawn.letters) == len(LETTERS) + 2


def test_an_empty_pool_has_no_line() -> None:
    assert draw([], 80).lines == ()
