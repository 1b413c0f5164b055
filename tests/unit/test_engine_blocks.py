"""The block pool's books: a random life against a plain model of what each block holds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from policies.errors import EngineError

BLOCKS = 5
KEYS = [bytes([n]) * 32 for n in range(4)]


def tokens_of(key: bytes) -> tuple[int, ...]:
    return (key[0], key[0] + 100)


class PoolMachine(RuleBasedStateMachine):
    """Owners take and drop blocks while steps begin and end; ``content`` is what a block's memory holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.owners: list[list[int]] = []
        self.content: dict[int, bytes | None] = {}
        self.fenced: dict[int, int] = {}  # block → step
        self.step = 1

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        blocks = self.pool.allocate(data.draw(st.integers(1, self.pool.num_free)))
        held = {block for table in self.owners for block in table}
        assert len(set(blocks)) == len(blocks)
        assert not set(blocks) & (held | set(self.fenced))
        self.content.update(dict.fromkeys(blocks))
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.owners))))
        if self.content[block] in (None, key):  # a computed block does not change
            self.content[block] = key
            self.pool.publish(block, key, tokens_of(key))

    @rule(key=st.sampled_from(KEYS))
    def hit(self, key: bytes) -> None:
        found = self.pool.match([key], tokens_of(key), 2)
        for block in found:
            assert self.content[block] == key
            assert block not in self.fenced
        assert self.pool.match([key], (9, 9), 2) == []  # other tokens under the same key are not ours
        if found:
            self.pool.take(found)
            self.owners.append(found)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), discard=st.booleans())
    def release(self, data: st.DataObject, discard: bool) -> None:
        table = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        if discard:
            self.pool.discard(table)
            for key in KEYS:
                assert not set(self.pool.match([key], tokens_of(key), 2)) & set(table)
        self.pool.release(table, self.step)
        held = {block for other in self.owners for block in other}
        self.fenced.update({block: self.step for block in table if block not in held})
        for block in table if discard else []:
            self.content[block] = None if block not in held else self.content[block]

    @rule()
    def complete(self) -> None:
        self.pool.complete(self.step)
        self.fenced = {block: step for block, step in self.fenced.items() if step > self.step}
        self.step += 1

    @rule()
    def an_earlier_step_completes(self) -> None:
        self.step += 1
        self.pool.complete(self.step - 2)
        self.fenced = {block: step for block, step in self.fenced.items() if step > self.step - 2}

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check(self.owners)
        books = self.pool.books()
        assert books.fenced == len(self.fenced)
        assert books.held == len({block for table in self.owners for block in table})
        assert books.cached <= books.free


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_free_blocks_without_content_go_first_then_the_least_recently_freed() -> None:
    pool = BlockPool(4)
    first, second, third, _ = pool.allocate(4)
    for block in (first, second):
        pool.publish(block, KEYS[block], tokens_of(KEYS[block]))
    for block in (second, first, third):
        pool.release([block], 1)
    pool.complete(1)
    assert [pool.allocate(1) for _ in range(3)] == [[third], [second], [first]]


def test_a_chain_is_eaten_from_its_end() -> None:
    pool = BlockPool(3)
    chain = pool.allocate(3)
    for block in chain:
        pool.publish(block, KEYS[block], tokens_of(KEYS[block]))
    pool.release(chain, 1)
    pool.complete(1)
    assert pool.allocate(1) == [chain[-1]]


def test_too_many_blocks_or_a_second_release_is_an_error_that_names_numbers() -> None:
    pool = BlockPool(2)
    with pytest.raises(EngineError, match="3 blocks wanted, 2 of 2 free"):
        pool.allocate(3)
    (block,) = pool.allocate(1)
    pool.release([block], 1)
    with pytest.raises(EngineError, match="released more often"):
        pool.release([block], 1)


def test_check_notices_a_reference_nobody_owns() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.check([table])
    with pytest.raises(EngineError, match="wrong reference counts"):
        pool.check([])
