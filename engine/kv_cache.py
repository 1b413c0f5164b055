"""Owns where the KV of every context lies: its block table, what is found again by key on each tier, and which copies
that takes. Torch-free: the bytes are ``core``'s to move.

How KV moves is design section 5. A slot that is about to be read is not given out; what arrives from disk lands in a
block of its own, which nobody else can find before it is filled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine import prefix
from engine.blocks import BlockPool
from engine.context import NO_BLOCK, Context
from engine.disk_tier import Landing
from engine.sessions import Sessions
from engine.tiers import HostEntry, HostTier, Move, Spill, Way


class Away(StrEnum):
    """Where kept KV lies that is not on the device."""

    HOST = "host"
    DISK = "disk"


Place = int | Away  # a block of the device; NO_BLOCK: before every window, not needed


class Disk(Protocol):
    """What the books need of the disk tier; see ``engine.disk_tier``."""

    def has(self, key: bytes) -> bool: ...
    def fetch(self, key: bytes, token_ids: tuple[int, ...], block: int) -> None: ...
    def landed(self) -> list[Landing]: ...
    def stuck(self) -> bool: ...
    def give_up(self) -> None: ...
    def discard(self, keys: Sequence[bytes]) -> None: ...


@dataclass(frozen=True, slots=True)
class Installation:
    """Blocks taken for KV that comes from outside: ``blocks[n]`` is to become the context's block ``indices[n]``."""

    indices: tuple[int, ...]
    blocks: tuple[int, ...]
    moves: tuple[Move | Spill, ...]  # to be carried out first


@dataclass(slots=True)
class _Arrival:
    """A block that is being filled from disk. It is held by this record, besides those who wait for it."""

    block: int
    token_ids: tuple[int, ...]
    contexts: list[Context]


class KVCache:
    """The books of KV on device and host; the disk has its own."""

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        host_blocks: int = 0,
        *,
        window: int | None = None,
        disk: Disk | None = None,
        worth_writing: Callable[[bytes], bool] = lambda key: True,
        worth_reading: Callable[[], bool] = lambda: True,
    ) -> None:
        """Everything is free and nothing is kept.

        Args:
            host_blocks: room for KV that leaves the device; 0: it goes to disk, or is lost and computed again.
            window: tokens that the layer that sees farthest sees; None: some layer sees everything.
            worth_writing: is a block worth the work of writing it to disk?
            worth_reading: is reading a block from disk faster than computing it?
        """
        self.block_size, self.window, self.disk = block_size, window, disk
        self.sessions = Sessions()
        self.pool = BlockPool(num_blocks, self._evicted, self.sessions.pinned)
        self.host = HostTier(host_blocks, self._dropped, self.sessions.pinned)
        self._worth_writing, self._worth_reading = worth_writing, worth_reading
        self._moves: list[Move | Spill] = []
        self._arriving: dict[bytes, _Arrival] = {}
        self._to_read: list[bytes] = []  # of them: not begun yet
        self._awaited: dict[Context, set[bytes]] = {}  # context → what it still waits for
        self._lost: dict[Context, set[bytes]] = {}  # context → what did not arrive
        self._step = 0  # the last step planned
        self._in_flight = False  # may the model be writing KV now?

    # -- steps -----------------------------------------------------------------

    def begin_step(self) -> int:
        self._step += 1
        return self._step

    def launched(self) -> None:
        """The planned copies are made, or given up. From now on the model may be writing KV: what is freed is fenced.

        Reads from disk begin only now: what their blocks held before may have had to be copied away first.
        """
        self._in_flight = True
        for key in self._to_read:
            arrival = self._arriving.get(key)
            if arrival is not None and self.disk is not None:
                self.disk.fetch(key, arrival.token_ids, arrival.block)
        self._to_read = []

    def completed(self, step: int) -> None:
        """The step's KV is written, or never will be: blocks fenced by it are free."""
        self._in_flight = False
        self.pool.complete(step)
        self.host.settle()

    def planned_moves(self) -> tuple[Move | Spill, ...]:
        """The copies that what was done so far needs; the caller carries them out, in order."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def host_failed(self, arrived: Iterable[int]) -> None:
        """Copies failed: what lies in host memory, and what was to be in these blocks, is found no more."""
        self.host.clear()
        self.pool.discard(arrived)

    # -- looking ---------------------------------------------------------------

    def find(self, context: Context) -> list[Place]:
        """Where the longest kept prefix lies, block by block.

        At least one token is left to compute, else nothing is sampled. Where every layer has a window, blocks before it
        are not looked for.
        """
        self.extend_keys(context)
        usable = (context.num_tokens - 1) // self.block_size
        places = (self._place(context, index) for index in range(usable))
        if self.window is None:
            return list(itertools.takewhile(lambda place: place is not None, places))  # type: ignore[arg-type]
        return self._windowed(list(places))

    def _windowed(self, places: list[Place | None]) -> list[Place]:
        """The longest prefix whose end, as far as the next token sees back, is kept without a gap."""
        run = [0]  # of each prefix: how many blocks at its end are kept without a gap
        for place in places:
            run.append(run[-1] + 1 if place is not None else 0)
        for count in range(len(places), 0, -1):
            unseen = self.unseen(count * self.block_size)
            if run[count] >= count - unseen:
                seen = [place for place in places[unseen:count] if place is not None]
                return [NO_BLOCK] * unseen + seen
        return []

    def unseen(self, position: int) -> int:
        """How many leading blocks no token from ``position`` on can see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def _place(self, context: Context, index: int) -> Place | None:
        key, tokens = context.block_keys[index], self.tokens(context, index)
        block = self.pool.find(key, tokens)
        if block is not None:
            return block
        if self.host.find(key, tokens) is not None:
            return Away.HOST
        arrival = self._arriving.get(key)
        if arrival is not None:
            return Away.DISK if arrival.token_ids == tuple(tokens) else None
        return Away.DISK if self.disk is not None and self.disk.has(key) and self._worth_reading() else None

    def kept(self, key: bytes) -> bool:
        """Is this block found on any tier?"""
        return self.pool.holds(key) or self.host.holds(key) or (self.disk is not None and self.disk.has(key))

    def readable(self, context: Context) -> tuple[int, list[int], list[int]]:
        """KV of its whole blocks that can be read now: the first one's index, blocks on the device, then host slots."""
        found = self.find(context)
        if context.block_table:
            found = list(context.block_table[: context.num_computed // self.block_size])
        first = sum(place == NO_BLOCK for place in found)
        unfilled = self._awaited.get(context, set()) | self._lost.get(context, set())
        if unfilled:  # of blocks that were to come from disk
            found = found[: next(i for i, key in enumerate(context.block_keys) if key in unfilled)]
        blocks = list(itertools.takewhile(lambda place: not isinstance(place, Away), found[first:]))
        rest = range(first + len(blocks), len(found))
        away = itertools.takewhile(lambda index: found[index] is Away.HOST, rest)
        slots = [self.host.find(context.block_keys[index], self.tokens(context, index)) for index in away]
        return first, [int(b) for b in blocks], [slot for slot in slots if slot is not None]

    # -- holding ---------------------------------------------------------------

    def missing(self, context: Context, num_tokens: int) -> int:
        """New blocks the context needs to hold so many tokens, and to write to the block its next token goes to."""
        return -(-num_tokens // self.block_size) - len(context.block_table) + (self._shared(context) is not None)

    def grow(self, context: Context, num_tokens: int) -> None:
        """Give it the blocks for so many tokens; a block that others hold too is copied before it is written.

        EngineError if they are not free.
        """
        shared = self._shared(context)
        if shared is not None:
            (own,) = self.pool.allocate(1)
            block = context.block_table[shared]
            self._moves.append(Move(Way.COPY, block, own))
            context.block_table[shared] = own
            self._let_go([block])
        context.block_table += self.pool.allocate(self.missing(context, num_tokens))

    def _shared(self, context: Context) -> int | None:
        """The index of the block its next token goes to, if somebody else holds that too."""
        index = context.num_computed // self.block_size
        there = index < len(context.block_table) and self.pool.shared(context.block_table[index])
        return index if there else None

    def hold(self, context: Context, found: Sequence[Place]) -> bool:
        """Make what ``find`` found the context's block table; copies are planned, reads from disk begun.

        False: its KV comes from disk, and ``arrived`` will name the context when all of it is there.
        """
        keys = context.block_keys
        here = [place for place in found if not isinstance(place, Away) and place != NO_BLOCK]
        self.pool.take(int(block) for block in here)  # first, that they are not given out below
        joined = {
            index: self._arriving[keys[index]].block
            for index, place in enumerate(found)
            if place is Away.DISK and keys[index] in self._arriving
        }
        self.pool.take(joined.values())
        slots = {i: self.host.take(keys[i]) for i, place in enumerate(found) if place is Away.HOST}  # nor written to
        fresh = [i for i, place in enumerate(found) if isinstance(place, Away) and i not in joined]
        blocks = joined | dict(zip(fresh, self.pool.allocate(len(fresh)), strict=True))
        context.block_table = [blocks[i] if isinstance(place, Away) else place for i, place in enumerate(found)]
        for index, slot in slots.items():
            self.pool.publish(blocks[index], keys[index], self.tokens(context, index))
            self._moves.append(Move(Way.IN, blocks[index], slot))
        self._await(context, [i for i, place in enumerate(found) if place is Away.DISK])
        context.num_computed = len(found) * self.block_size
        context.num_published = len(found)
        return context not in self._awaited

    def publish(self, context: Context) -> None:
        """Offer its whole computed blocks to the cache; let go of those that no layer will see again."""
        full = context.num_computed // self.block_size
        if full > context.num_published:
            self.extend_keys(context)
            for index in range(context.num_published, full):
                self.pool.publish(context.block_table[index], context.block_keys[index], self.tokens(context, index))
            context.num_published = full
        unseen = self.unseen(context.num_computed)
        held = context.block_table[:unseen]
        if any(block != NO_BLOCK for block in held):
            context.block_table[:unseen] = [NO_BLOCK] * unseen
            self._let_go(held)

    def release(self, context: Context) -> None:
        """Take all its blocks away; they are free once no step in flight can write them."""
        self._awaited.pop(context, None)
        self._lost.pop(context, None)
        table, context.block_table = context.block_table, []
        self._let_go(table)

    def share_tail(self, context: Context, other: Context) -> int:
        """Let ``context`` hold the block in which its table ends short of its tokens, of ``other``, who has it partly
        filled with the same tokens; how many tokens that is. ``grow`` copies it before it is written.
        """
        index = len(context.block_table)
        begin = index * self.block_size
        if len(other.block_table) <= index or context.num_computed != begin or other.block_table[index] == NO_BLOCK:
            return 0
        most = min(context.num_tokens - 1, other.num_computed, begin + self.block_size)
        if most <= begin or context.token_ids[:most] != other.token_ids[:most]:
            return 0
        self.pool.take([other.block_table[index]])
        context.block_table.append(other.block_table[index])
        context.num_computed = most
        return most - begin

    # -- what comes from disk --------------------------------------------------

    @property
    def arriving(self) -> bool:
        """Are blocks being filled from disk? Who waited for them may be gone, and others may need them."""
        return bool(self._arriving)

    @property
    def arriving_blocks(self) -> frozenset[int]:
        """Blocks that are being filled from disk."""
        return frozenset(arrival.block for arrival in self._arriving.values())

    def arrived(self) -> list[tuple[Context, int]]:
        """Those who wait no more, and how many blocks did not come: from the first of them on, all is computed."""
        if self.disk is not None and self._arriving:
            for landing in self.disk.landed():
                self._settle(landing.key, landing.arrived)
            if self.disk.stuck():
                self.abandon()
        ready = [(context, self._cut(context)) for context, left in self._awaited.items() if not left]
        for context, _ in ready:
            del self._awaited[context]
        return ready

    def abandon(self) -> None:
        """Wait for nothing from disk any longer."""
        if self.disk is not None and self._arriving:
            self.disk.give_up()
            self._to_read = []
            for key in list(self._arriving):
                self._settle(key, worked=False)

    def _await(self, context: Context, indices: Sequence[int]) -> None:
        for index in indices:
            key, block = context.block_keys[index], context.block_table[index]
            if key not in self._arriving:
                self.pool.take([block])
                self._arriving[key] = _Arrival(block, tuple(self.tokens(context, index)), [])
                self._to_read.append(key)
            self._arriving[key].contexts.append(context)
            self._awaited.setdefault(context, set()).add(key)

    def _settle(self, key: bytes, worked: bool) -> None:
        arrival = self._arriving.pop(key, None)
        if arrival is None:
            return
        if worked:
            self.pool.publish(arrival.block, key, arrival.token_ids)
        for context in arrival.contexts:
            if context in self._awaited:  # else it was taken away meanwhile
                self._awaited[context].discard(key)
                if not worked:
                    self._lost.setdefault(context, set()).add(key)
        self._let_go([arrival.block])

    def _cut(self, context: Context) -> int:
        """Shorten its table to what did arrive without a gap; how many blocks that takes off."""
        lost = self._lost.pop(context, set())
        keep = next((i for i, key in enumerate(context.block_keys) if key in lost), len(context.block_table))
        cut = context.block_table[keep:]
        if cut:
            if self.window is not None:  # what is left may end before its window: look no further than it does
                keep, cut = 0, context.block_table
            context.block_table = context.block_table[:keep]
            context.num_computed, context.num_published = keep * self.block_size, keep
            self._let_go(cut)
        return len(cut)

    # -- leaving the device ----------------------------------------------------

    def park(self, worth: Callable[[bytes], float] = lambda key: 0.0) -> tuple[Move | Spill, ...]:
        """Moves that bring cached KV down before the device's memory goes: to host memory, and what has no room there
        to disk. What is worth most, or else was used last, stays highest.
        """
        cached = sorted(self.pool.cached(), key=lambda entry: worth(entry[1]))  # equals stay in the order of their use
        room = self.host.books().total
        for block, key, token_ids in cached[: max(0, len(cached) - room)]:
            self._spill(key, token_ids, block, host=False)
        for block, key, token_ids in cached[max(0, len(cached) - room) :]:
            self._evicted(block, key, token_ids)
        return self.planned_moves()

    def park_on_disk(self, worth: Callable[[bytes], float] = lambda key: 0.0) -> list[Spill]:
        """What is kept on device and host, not on disk yet, and worth writing; worth most, or else used last, first."""
        on_device = [Spill(key, tokens, block, host=False) for block, key, tokens in self.pool.cached()]
        in_host = [Spill(key, entry.token_ids, entry.slot, host=True) for key, entry in self.host.entries()]
        here = {spill.key for spill in on_device}
        below = [spill for spill in in_host if spill.key not in here]
        disk = self.disk
        wanted = [s for s in (*below, *on_device) if disk and not disk.has(s.key) and self._worth_writing(s.key)]
        return sorted(wanted, key=lambda spill: worth(spill.key))[::-1]

    def resize(self, num_blocks: int) -> None:
        """Use so many blocks of the device; what is cached in those that leave goes down first."""
        self.pool.resize(num_blocks)

    def make_room_for(self, context: Context, first: int, count: int) -> Installation:
        """Free blocks for the KV of a context's blocks ``first..first+count-1``, as many as there are."""
        self.extend_keys(context)
        wanted = range(first, first + count)
        missing = [i for i in wanted if self.pool.find(context.block_keys[i], self.tokens(context, i)) is None]
        missing = missing[: self.pool.num_free]
        return Installation(tuple(missing), tuple(self.pool.allocate(len(missing))), self.planned_moves())

    def installed(self, context: Context, room: Installation, *, worked: bool) -> None:
        """The KV is in its blocks, and can be found; or it could not be written."""
        for index, block in zip(room.indices, room.blocks, strict=True):
            if worked:
                self.pool.publish(block, context.block_keys[index], self.tokens(context, index))
        if not worked:
            self.host.clear()  # the moves before it may not have been carried out
        self._let_go(room.blocks)

    # -- forgetting ------------------------------------------------------------

    def forget(self, keys: Sequence[bytes]) -> None:
        """Let nobody find these blocks again, on any tier; who holds them goes on."""
        for key in keys:
            self.host.forget(key)
            self.pool.forget(key)
        if self.disk is not None:
            self.disk.discard(keys)

    def fail(self, context: Context) -> None:
        """What a failed generation has made must not be found: neither its blocks nor anything under its keys."""
        self.pool.discard(block for block in context.block_table if block != NO_BLOCK)
        self.forget(context.block_keys)

    def check(self, contexts: Iterable[Context]) -> None:
        """EngineError unless every block reference is explained by a live context, or by a read from disk."""
        tables = [[block for block in c.block_table if block != NO_BLOCK] for c in contexts]
        self.pool.check([*tables, [arrival.block for arrival in self._arriving.values()]])

    # -- inside ----------------------------------------------------------------

    def _evicted(self, block: int, key: bytes, token_ids: tuple[int, ...]) -> None:
        """Cached content is about to leave the device."""
        slot = self.host.put(key, token_ids)
        if slot is not None:
            self._moves.append(Move(Way.OUT, block, slot))
        elif not self.host.holds(key):
            self._spill(key, token_ids, block, host=False)

    def _dropped(self, key: bytes, entry: HostEntry) -> None:
        """Content is about to leave host memory."""
        self._spill(key, entry.token_ids, entry.slot, host=True)

    def _spill(self, key: bytes, token_ids: tuple[int, ...], place: int, *, host: bool) -> None:
        if self.disk is not None and not self.disk.has(key) and self._worth_writing(key):
            self._moves.append(Spill(key, token_ids, place, host))

    def _let_go(self, blocks: Sequence[int]) -> None:
        self.pool.release([block for block in blocks if block != NO_BLOCK], self._step)
        if not self._in_flight:
            self.pool.complete(self._step)

    def tokens(self, context: Context, index: int) -> list[int]:
        """The token ids of one block."""
        return context.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def extend_keys(self, context: Context) -> None:
        """Know the keys of all its whole blocks."""
        done = len(context.block_keys)
        parent = context.block_keys[-1] if done else context.namespace
        context.block_keys += prefix.chain(parent, context.token_ids[done * self.block_size :], self.block_size)
