"""Owns engine hosts without Ray, in a benchmark's process: the plain class, asked as a gateway asks it."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

from engine.fake import FakeSettings
from engine.protocol import Places
from model_pool.effects import HostRef
from model_pool.host import EngineHost
from model_pool.host_words import HostPicture, HostSpec
from orchestrator.bench import engines
from policies.errors import OrchestratorError

BEAT_SECONDS = 1.0
_GATEWAYS = itertools.count()


def new_host(path: Path, recipes: str = "", fake: FakeSettings | None = None) -> EngineHost:
    """Not loaded yet."""
    ref = HostRef(path.name, 0, 0)
    places = Places(recipes=recipes)
    return EngineHost(HostSpec(ref, str(path), engines.MEMORY_BYTES, engines.limits(), places=places, fake=fake))


async def load(host: EngineHost) -> HostPicture:
    return _picture(await host.load())


async def go_to_sleep(host: EngineHost) -> HostPicture:
    """Drain and sleep."""
    error = await host.drain(())
    if error is not None:
        raise error
    return _picture(await host.sleep())


async def wake(host: EngineHost) -> HostPicture:
    return _picture(await host.wake())


class Stream:
    """A gateway's stream on a host, with its heartbeat: the host lets go of who is silent for three seconds."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._gateway = f"bench{next(_GATEWAYS)}"
        self._batches = host.open(self._gateway)

    async def __aenter__(self) -> Stream:
        await anext(self._batches)
        self._heart = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._heart.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._host.heartbeat(self._gateway)

    async def answer(self, prompt: list[int], new: int) -> tuple[float, list[int]]:
        """(perf_counter seconds at the first token, all tokens) of one greedy generation."""
        error = await self._host.submit(self._gateway, engines.request(prompt, new), None)
        if error is not None:
            raise error
        first = 0.0
        said: list[int] = []
        async for batch in self._batches:
            for output in batch:
                if output.error is not None:
                    raise output.error
                first = first or time.perf_counter()
                said += output.token_ids
                if output.final:
                    return first, said
        raise OrchestratorError("the host has ended our stream")


def _picture(answer: HostPicture | OrchestratorError) -> HostPicture:
    if isinstance(answer, OrchestratorError):
        raise answer
    return answer
