"""Owns the books of the KV pool: which block is free, cached, held, and by how many. Pure Python.

A block is in exactly one of three places:
- held: ``refs > 0`` contexts use it;
- fenced: nobody uses it, but a step in flight may still write it; free once that step is over;
- free: may be given out. A free block may still carry a key: then its content is a cache entry, and being given out is
  its eviction. The free list's order is the eviction order (vLLM v1 ``block_pool``).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from policies.errors import EngineError


class Place(StrEnum):
    """Where one block is, for people."""

    FREE = "free"  # and empty
    CACHED = "cached"  # free, its content can be found
    FENCED = "fenced"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Books:
    """Block counts; ``free + fenced + held == total`` always. ``cached`` counts free blocks that carry a key."""

    total: int
    free: int
    fenced: int
    held: int
    cached: int


def _drop(block: int, key: bytes, token_ids: tuple[int, ...]) -> None:
    """What is evicted is lost."""


class BlockPool:
    """Reference-counted KV blocks with a content-addressed cache among the free ones."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes, tuple[int, ...]], None] = _drop) -> None:
        """``on_evict`` is told (block, key, token ids) of cached content just before its block is given out."""
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._tokens: list[tuple[int, ...]] = [()] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._fenced: deque[tuple[int, int]] = deque()  # (step, block), steps ascending
        self._by_key: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, evicting cache entries least recently used first. EngineError if short."""
        if count > len(self._free):
            raise EngineError(f"KV pool: {count} blocks wanted, {len(self._free)} of {len(self)} free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            key = self._keys[block]
            if key is not None:
                self._on_evict(block, key, self._tokens[block])
            self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return sorted(blocks)  # adjoining ones together: attention and copies gather less

    def match(self, keys: Iterable[bytes], token_ids: Sequence[int], block_size: int) -> list[int]:
        """The longest cached prefix: blocks whose keys, and whose token ids, are those asked for. Takes nothing."""
        found = []
        for index, key in enumerate(keys):
            block = self.find(key, token_ids[index * block_size : (index + 1) * block_size])
            if block is None:
                break
            found.append(block)
        return found

    def find(self, key: bytes, token_ids: Sequence[int]) -> int | None:
        """The block with this key and these token ids; with other ids, by a collision or a bug, it is not our KV."""
        block = self._by_key.get(key)
        return block if block is not None and self._tokens[block] == tuple(token_ids) else None

    def cached(self) -> Iterator[tuple[int, bytes, tuple[int, ...]]]:
        """(block, key, token ids) of the content among the free blocks, least recently used first."""
        for block in self._free:
            key = self._keys[block]
            if key is not None:
                yield block, key, self._tokens[block]

    def shared(self, block: int) -> bool:
        """Do several contexts hold this block?"""
        return self._refs[block] > 1

    def holds(self, key: bytes) -> bool:
        """Is the block with this key still findable?"""
        return key in self._by_key

    def take(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block found by ``match``."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free now, so that taking them shrinks the free list."""
        return sum(self._refs[block] == 0 for block in blocks)

    def publish(self, block: int, key: bytes, token_ids: Sequence[int]) -> None:
        """Enter a held, fully computed block into the cache; the first block of equal content wins."""
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key
            self._tokens[block] = tuple(token_ids)

    def release(self, blocks: Sequence[int], step: int) -> None:
        """Drop one reference to each block; blocks nobody holds become free when ``step`` has completed.

        The tail of a chain is released first, so that eviction eats chains from their end.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] < 0:
                raise EngineError(f"KV pool: block {block} released more often than taken")
            if self._refs[block] == 0:
                # fenced blocks leave the cache index: a hit must never take a block out of the fence
                self._fenced.append((step, block))
                self._hide(block)

    def complete(self, step: int) -> None:
        """``step`` is over: blocks fenced by it, or by an earlier one, are free and findable again."""
        while self._fenced and self._fenced[0][0] <= step:
            _, block = self._fenced.popleft()
            self._free[block] = None
            key = self._keys[block]
            if key is None:
                self._free.move_to_end(block, last=False)  # nothing cached: give it out first
            elif key in self._by_key:
                self._forget(block)  # another block of the same content was published meanwhile
                self._free.move_to_end(block, last=False)
            else:
                self._by_key[key] = block

    def discard(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the cache: their content must not be found again."""
        for block in blocks:
            self._forget(block)

    def forget(self, key: bytes) -> None:
        """Remove the block with this key from the cache; who holds it goes on."""
        block = self._by_key.get(key)
        if block is not None:
            self.discard([block])
            if block in self._free:
                self._free.move_to_end(block, last=False)  # nothing cached: give it out first

    def clear_cache(self) -> None:
        """Forget all content, as when the KV memory was given back."""
        for block in range(len(self._refs)):
            self._forget(block)

    def books(self) -> Books:
        cached = sum(self._keys[block] is not None for block in self._free)
        held = sum(refs > 0 for refs in self._refs)
        return Books(len(self), len(self._free), len(self._fenced), held, cached)

    def places(self) -> list[Place]:
        """Where each block is."""
        places = [Place.HELD if refs else Place.CACHED for refs in self._refs]
        for block in self._free:
            if self._keys[block] is None:
                places[block] = Place.FREE
        for _, block in self._fenced:
            places[block] = Place.FENCED
        return places

    def references(self) -> tuple[int, ...]:
        """How many hold each block."""
        return tuple(self._refs)

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise EngineError unless the books balance and ``owners`` (block tables) explain every reference."""
        books = self.books()
        if books.free + books.fenced + books.held != books.total:
            raise EngineError(f"KV pool books do not balance: {books}")
        expected = [0] * len(self)
        for table in owners:
            for block in table:
                expected[block] += 1
        if expected != self._refs:
            wrong = [b for b in range(len(self)) if expected[b] != self._refs[b]]
            raise EngineError(f"KV pool: {len(wrong)} blocks have wrong reference counts, first {wrong[:5]}")

    def _hide(self, block: int) -> None:
        key = self._keys[block]
        if key is not None and self._by_key.get(key) == block:
            del self._by_key[key]

    def _forget(self, block: int) -> None:
        self._hide(block)
        self._keys[block] = None
        self._tokens[block] = ()
