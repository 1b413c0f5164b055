"""Owns who gets which output: one channel per gateway, its heartbeat, and the generations it is responsible for.

No Ray here: ``host`` is the actor around it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from engine.protocol import Output

Key = tuple[str, int]  # request id, generation number


@dataclass(slots=True, eq=False)
class Channel:
    """The outputs of one gateway that it has not collected yet."""

    gateway: str
    last_seen: float
    pending: list[Output] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def put(self, outputs: Sequence[Output]) -> None:
        self.pending += outputs
        self.ready.set()

    def close(self) -> None:
        self.closed = True
        self.ready.set()

    async def batches(self) -> AsyncIterator[list[Output]]:
        """What each step produced, one list a step; steps the reader was too slow for are merged."""
        while True:
            await self.ready.wait()
            self.ready.clear()
            batch, self.pending = self.pending, []
            if batch:
                yield batch
            if self.closed:
                return


class Channels:
    """All gateways of one host."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._channels: dict[str, Channel] = {}
        self._owners: dict[Key, Channel] = {}

    @property
    def in_flight(self) -> int:
        return len(self._owners)

    def open(self, gateway: str, now: float) -> Channel:
        """A fresh channel; one that the same gateway had before is closed, its generations move over."""
        old = self._channels.get(gateway)
        channel = self._channels[gateway] = Channel(gateway, now)
        if old is not None:
            old.close()
            channel.put(old.pending)
            old.pending = []
            for key in [k for k, owner in self._owners.items() if owner is old]:
                self._owners[key] = channel
        return channel

    def beat(self, gateway: str, now: float) -> bool:
        """The gateway lives. False: it is unknown here and must open a channel first."""
        channel = self._channels.get(gateway)
        if channel is None:
            return False
        channel.last_seen = now
        return True

    def own(self, gateway: str, key: Key) -> None:
        self._owners[key] = self._channels[gateway]

    def knows(self, gateway: str) -> bool:
        return gateway in self._channels

    def owned(self) -> set[Key]:
        """The generations in flight."""
        return set(self._owners)

    def disown(self, key: Key) -> None:
        self._owners.pop(key, None)

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Hand the outputs of one step to their gateways; an output nobody owns was cancelled meanwhile."""
        by_channel: dict[Channel, list[Output]] = {}
        for output in outputs:
            key = (output.request_id, output.generation)
            channel = self._owners.get(key)
            if channel is not None:
                by_channel.setdefault(channel, []).append(output)
                if output.final:
                    del self._owners[key]
        for channel, batch in by_channel.items():
            channel.put(batch)

    def reap(self, now: float) -> list[Key]:
        """Drop gateways that fell silent; returns the generations to abort."""
        orphans = []
        for gateway, channel in list(self._channels.items()):
            if now - channel.last_seen > self._silence_seconds:
                channel.close()
                del self._channels[gateway]
                orphans += [key for key, owner in self._owners.items() if owner is channel]
        for key in orphans:
            del self._owners[key]
        return orphans
