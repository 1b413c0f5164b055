"""Owns the ``n`` answers to one prompt: their requests, and one stream of outputs from all of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from engine.protocol import GenerationRequest, Output
from orchestrator.detached import start_detached
from orchestrator.generation import Generator
from orchestrator.progress import Progress

_Queue = asyncio.Queue["tuple[int, Output | asyncio.Task[None]]"]


def choice_requests(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """``n`` requests that differ in id and seed; the first is ``request`` itself, so that n = 1 says what choice 0 of
    n = 8 says."""
    others = [
        replace(
            request,
            request_id=f"{request.request_id}.{index}",
            group=request.request_id,
            sampling=replace(request.sampling, seed=_seed(request.sampling.seed, index)),
        )
        for index in range(1, n)
    ]
    return [replace(request, group=request.request_id) if others else request, *others]


def _seed(seed: int, index: int) -> int:
    """Hashed, not added: else choice 1 of seed 7 would be choice 0 of seed 8."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "little") >> 1


async def merged(
    generator: Generator, requests: Sequence[GenerationRequest], model: str, progress: Progress
) -> AsyncGenerator[tuple[int, Output]]:
    """(index, output) of all generations as they come; the first error ends them all.

    The first starts alone. The others start once its first token is here: by then the prompt's full blocks are in the
    prefix cache, so that the prompt is computed once for all; started together they would each compute it (E11).
    """
    if len(requests) == 1:  # no task between host and client
        async with contextlib.aclosing(generator.outputs(requests[0], model, progress)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: _Queue = asyncio.Queue()
    running = {_begin(queue, generator, 0, requests[0], model, progress)}
    waiting = list(enumerate(requests))[1:]
    try:
        while running:
            index, event = await queue.get()
            if isinstance(event, asyncio.Task):
                running.discard(event)
                event.result()  # raises what ended it
                continue
            for other, request in waiting:
                own = Progress(arrival=progress.arrival)
                running.add(_begin(queue, generator, other, request, model, own))
            waiting = []
            yield index, event
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _begin(
    queue: _Queue, generator: Generator, index: int, request: GenerationRequest, model: str, progress: Progress
) -> asyncio.Task[None]:
    async def read() -> None:
        async with contextlib.aclosing(generator.outputs(request, model, progress)) as outputs:
            async for output in outputs:
                queue.put_nowait((index, output))

    task = start_detached(read())
    task.add_done_callback(lambda ended: queue.put_nowait((index, ended)))
    return task
