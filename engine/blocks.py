"""Owns the books of the KV pool: which block is free, cached, held, and by how many. Pure Python.

A block is in exactly one of three places:
- held: ``refs > 0`` contexts use it;
- fenced: nobody uses it, but a step in flight may still write it; free once that step is over;
- free: may be given out. A free block may still carry a key: then its content is a cache entry, and being given out is
  its eviction. The free list's order is the eviction order (vLLM v1 ``block_pool``); pinned content comes last in it.

A pool that was made smaller is short of its last blocks: those still held drain, and are not given out again.
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
    PINNED = "pinned"  # cached, and given out last
    FENCED = "fenced"
    HELD = "held"
    RETIRED = "retired"  # taken from the pool


@dataclass(frozen=True, slots=True)
class Books:
    """Block counts; ``free + fenced + held + retired == made`` always. ``cached``: free, but with a key."""

    total: int  # that the pool may use now
    free: int
    fenced: int
    held: int
    cached: int
    pinned: int = 0  # of the cached ones
    retired: int = 0
    made: int = 0  # that there are at most


def _drop(block: int, key: bytes, token_ids: tuple[int, ...]) -> None:
    """What is evicted is lost."""


def _none(key: bytes) -> bool:
    """Nothing is pinned."""
    return False


class BlockPool:
    """Reference-counted KV blocks with a content-addressed cache among the free ones."""

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, bytes, tuple[int, ...]], None] = _drop,
        pinned: Callable[[bytes], bool] = _none,
    ) -> None:
        """``on_evict`` is told (block, key, token ids) of cached content just before its block is given out."""
        self._on_evict = on_evict
        self._pinned = pinned
        self._limit = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._tokens: list[tuple[int, ...]] = [()] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._soft: OrderedDict[int, None] = OrderedDict()  # free too, with pinned content: given out last
        self._fenced: deque[tuple[int, int]] = deque()  # (step, block), steps ascending
        self._by_key: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Blocks the pool may use."""
        return self._limit

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._soft)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, evicting cache entries least recently used first. EngineError if short."""
        if count > self.num_free:
            raise EngineError(f"KV pool: {count} blocks wanted, {self.num_free} of {len(self)} free")
        blocks = []
        for _ in range(count):
            block, _ = (self._free or self._soft).popitem(last=False)
            self._evict(block)
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
        for block in (*self._free, *self._soft):
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
                del (self._free if block in self._free else self._soft)[block]
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
            key = self._keys[block]
            if key is not None and key in self._by_key:
                self._forget(block)  # another block of the same content was published meanwhile
                key = None
            if block >= self._limit:
                self._evict(block)
            elif key is None:
                self._free[block] = None
                self._free.move_to_end(block, last=False)  # nothing cached: give it out first
            else:
                self._by_key[key] = block
                (self._soft if self._pinned(key) else self._free)[block] = None

    def pins_changed(self, keys: Iterable[bytes]) -> None:
        """These were pinned, or are pinned no longer: their place in the eviction order follows."""
        for key in keys:
            block = self._by_key.get(key)
            if block is not None and self._refs[block] == 0:
                now, then = (self._soft, self._free) if self._pinned(key) else (self._free, self._soft)
                if block in then:
                    del then[block]
                    now[block] = None

    def resize(self, num_blocks: int) -> None:
        """Use the first ``num_blocks`` blocks only, or again; what is cached in the others is evicted.

        Blocks that are held beyond that stay until they are released.
        """
        num_blocks = min(num_blocks, len(self._refs))
        listed = {*self._free, *self._soft}
        for block in range(num_blocks, self._limit):
            if block in listed:
                self._free.pop(block, None)
                self._soft.pop(block, None)
                self._evict(block)
        fenced = {block for _, block in self._fenced}
        for block in range(self._limit, num_blocks):
            if not self._refs[block] and block not in fenced:
                self._free[block] = None
                self._free.move_to_end(block, last=False)
        self._limit = num_blocks

    @property
    def end(self) -> int:
        """One after the last block that is used, or may be."""
        held = (block for block in reversed(range(self._limit, len(self._refs))) if self._refs[block])
        return max(self._limit, next(held, -1) + 1, *(block + 1 for _, block in self._fenced), 0)

    def discard(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the cache: their content must not be found again."""
        for block in blocks:
            self._forget(block)

    def forget(self, key: bytes) -> None:
        """Remove the block with this key from the cache; who holds it goes on."""
        block = self._by_key.get(key)
        if block is not None:
            self.discard([block])
            if self._refs[block] == 0:
                self._soft.pop(block, None)
                self._free[block] = None
                self._free.move_to_end(block, last=False)  # nothing cached: give it out first

    def clear_cache(self) -> None:
        """Forget all content, as when the KV memory was given back."""
        for block in range(len(self._refs)):
            self._forget(block)
        while self._soft:
            self._free[self._soft.popitem()[0]] = None

    def books(self) -> Books:
        pinned = len(self._soft)
        cached = sum(self._keys[block] is not None for block in self._free) + pinned
        held = sum(refs > 0 for refs in self._refs)
        retired = sum(place is Place.RETIRED for place in self.places())
        return Books(self._limit, self.num_free, len(self._fenced), held, cached, pinned, retired, len(self._refs))

    def places(self) -> list[Place]:
        """Where each block is."""
        places = [Place.HELD if refs else Place.RETIRED for refs in self._refs]
        for block in self._free:
            places[block] = Place.FREE if self._keys[block] is None else Place.CACHED
        for block in self._soft:
            places[block] = Place.PINNED
        for _, block in self._fenced:
            places[block] = Place.FENCED
        return places

    def references(self) -> tuple[int, ...]:
        """How many hold each block."""
        return tuple(self._refs)

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise EngineError unless the books balance and ``owners`` (block tables) explain every reference."""
        books = self.books()
        lost = [block for block, place in enumerate(self.places()[: self._limit]) if place is Place.RETIRED]
        if lost or books.free + books.fenced + books.held + books.retired != books.made:
            raise EngineError(f"KV pool books do not balance: {books}, blocks in no list: {lost[:5]}")
        expected = [0] * len(self._refs)
        for table in owners:
            for block in table:
                expected[block] += 1
        if expected != self._refs:
            wrong = [b for b in range(len(self._refs)) if expected[b] != self._refs[b]]
            raise EngineError(f"KV pool: {len(wrong)} blocks have wrong reference counts, first {wrong[:5]}")

    def _evict(self, block: int) -> None:
        """Its content is lost here; who keeps such things is told first."""
        key = self._keys[block]
        if key is not None:
            self._on_evict(block, key, self._tokens[block])
        self._forget(block)

    def _hide(self, block: int) -> None:
        key = self._keys[block]
        if key is not None and self._by_key.get(key) == block:
            del self._by_key[key]

    def _forget(self, block: int) -> None:
        self._hide(block)
        self._keys[block] = None
        self._tokens[block] = ()
