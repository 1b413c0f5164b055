"""Owns a gateway's connections to engine hosts: one stream per host for all its requests, and a heartbeat beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from engine.protocol import GenerationRequest, Output
from engine.snapshot import EngineSnapshot
from model_pool.effects import HostRef
from model_pool.host import NAMESPACE
from orchestrator.detached import start_detached
from orchestrator.ray_errors import said
from policies.errors import HostLost, HostUnavailable, OrchestratorError

HEARTBEAT_SECONDS = 1.0  # the host aborts a gateway's generations after 3 s of silence
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 2.0

Key = tuple[str, int]  # request id, generation number


class Stream:
    """The outputs of one generation on one host, in order; the last one is final."""

    def __init__(self, link: HostLink, key: Key) -> None:
        self._link = link
        self.key = key
        self.host = link.ref
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self.ended = False

    def put(self, output: Output) -> None:
        self._outputs.put_nowait(output)

    def fail(self, error: OrchestratorError) -> None:
        """End it from our side."""
        self.put(Output(*self.key, error=error))

    async def next(self) -> Output:
        output = await self._outputs.get()
        self.ended = output.final
        return output

    def close(self, reason: str) -> None:
        """Forget it; a generation that has not ended is cancelled on its host."""
        self._link.drop(self, reason)


class HostLink:
    """One gateway ↔ one life of one host."""

    def __init__(self, ref: HostRef, gateway: str) -> None:
        self.ref = ref
        self._gateway = gateway
        self._streams: dict[Key, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened = asyncio.Event()
        self.lost: HostLost | None = None

    async def connect(self) -> None:
        """Open the stream; HostLost when the host is gone."""
        try:
            self._actor = await asyncio.to_thread(ray.get_actor, self.ref.actor, NAMESPACE)
        except (ValueError, RayError) as error:
            self._lose(error)
            raise self.lost from error  # type: ignore[misc]
        self._start(self._read())
        self._start(self._beat())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._opened.wait(), CONNECT_SECONDS)
        if self.lost is not None:
            raise self.lost

    async def submit(self, request: GenerationRequest, ticket: str | None) -> Stream:
        """Begin a generation; raises the host's refusal."""
        stream = Stream(self, (request.request_id, request.generation))
        self._streams[stream.key] = stream
        try:
            refusal = await self._actor.submit.remote(self._gateway, request, ticket)
        except RayActorError as error:
            self._lose(error)
            refusal = self.lost
        except (asyncio.CancelledError, RayError):  # Ray cancels the call first, and it says so before we hear of it
            self.drop(stream, "the client went away")
            raise
        if refusal is not None:
            self._streams.pop(stream.key, None)
            raise refusal
        return stream

    def drop(self, stream: Stream, reason: str) -> None:
        self._streams.pop(stream.key, None)
        if not stream.ended and self.lost is None:
            self._start(self._cancel(stream.key, reason))

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _read(self) -> None:
        try:
            batches: Any = self._actor.open.options(num_returns="streaming").remote(self._gateway)
            async for batch_ref in batches:
                for output in await batch_ref:
                    stream = self._streams.get((output.request_id, output.generation))
                    if stream is not None:
                        stream.put(output)
                    elif not output.final:  # its cancel was overtaken, or lost
                        self._start(self._cancel((output.request_id, output.generation), "nobody listens"))
                self._opened.set()
            self._lose(HostUnavailable("the host closed our stream"))
        except RayError as error:
            self._lose(error)

    async def _beat(self) -> None:
        await self._opened.wait()
        while self.lost is None:
            try:
                if not await self._actor.heartbeat.remote(self._gateway):
                    self._lose(HostUnavailable("the host had given us up"))
            except RayError as error:
                self._lose(error)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _cancel(self, key: Key, reason: str) -> None:
        with contextlib.suppress(RayError):  # a dead host has cancelled everything
            await self._actor.cancel.remote(*key, reason)

    def _lose(self, cause: BaseException) -> None:
        """The host, or our place on it, is gone: every generation hears of it once."""
        if self.lost is not None:
            return
        self.lost = HostLost(f"{self.ref.name}: {said(cause)}", retry_after_seconds=1.0)
        self._opened.set()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(self.lost)

    def _start(self, work: Any) -> None:
        task = start_detached(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Links:
    """All host links of one gateway; a lost link is replaced at its next use."""

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway
        self._links: dict[HostRef, asyncio.Task[HostLink]] = {}

    async def to(self, ref: HostRef) -> HostLink:
        """The connected link to this host; HostLost if there is no such host."""
        task = self._links.get(ref)
        if task is None or (task.done() and (task.exception() is not None or task.result().lost is not None)):
            task = self._links[ref] = start_detached(self._connect(ref))
        return await asyncio.shield(task)

    def load(self) -> dict[str, int]:
        """This gateway's generations in flight, by host name."""
        links = (task.result() for task in self._links.values() if task.done() and task.exception() is None)
        return {link.ref.name: link.in_flight for link in links if link.lost is None}

    async def _connect(self, ref: HostRef) -> HostLink:
        self._forget_lost()
        link = HostLink(ref, self.gateway)
        await link.connect()
        return link

    def _forget_lost(self) -> None:
        for ref, task in list(self._links.items()):
            if task.done() and (task.exception() is not None or task.result().lost is not None):
                if task.exception() is None:
                    task.result().close()
                del self._links[ref]


async def snapshot_of(actor: str) -> EngineSnapshot | OrchestratorError:
    """What a host's engine holds, or why it does not say; by the name of its actor."""
    answer: EngineSnapshot | OrchestratorError = await _asked(actor, lambda actor: actor.snapshot.remote())
    return answer


async def _asked(host: str, ask: Callable[[Any], Any]) -> Any:
    """A host's answer, or an error as a value: it is gone, or busy for more than ``ANSWER_SECONDS``."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await ask(await asyncio.to_thread(ray.get_actor, host, NAMESPACE))
    except TimeoutError:
        return HostUnavailable(f"{host} did not answer within {ANSWER_SECONDS:.0f} s")
    except (ValueError, RayError) as error:
        return HostLost(f"{host}: {said(error)}")
