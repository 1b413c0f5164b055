"""Owns one generation over however many hosts it takes: placing it, and continuing it elsewhere after a death."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError, TaskCancelledError

from engine.protocol import GenerationRequest, Output
from model_pool.effects import HostRef, Placement, RoutingTable
from orchestrator.detached import start_detached
from orchestrator.links import Links, Stream
from orchestrator.progress import Progress
from orchestrator.waiting import WaitingRoom
from policies.errors import (
    DeadlineExceeded,
    HostLost,
    HostUnavailable,
    ModelLoading,
    OrchestratorError,
)
from policies.routing import choose
from policies.types import Tier

RETRY_SECONDS = 0.05  # before asking again after a refusal by a host that was said to be ready


class Routes:
    """The last routing table; a long poll keeps it fresh, and it stays valid while the controller is away."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self.table = RoutingTable(0, {})
        self.known = asyncio.Event()

    async def follow(self) -> None:
        """Runs for ever."""
        while True:
            try:
                self.table = await self._controller.routes.remote(self.table.version)
                self.known.set()
            except RayError:
                await asyncio.sleep(0.5)

    def ready_host(self, model: str, key: str, load: Mapping[str, int]) -> tuple[HostRef | None, bool]:
        """The sticky choice among the READY hosts of a model, and whether it had to spill from the key's owner."""
        entries = self.table.entries.get(model, ())
        if not entries:
            return None, False
        by_name = {entry.host.name: entry.host for entry in entries}
        route = choose(list(by_name), f"{model}/{key}", load)
        return by_name[route.host], route.spilled

    def forget(self, ref: HostRef) -> None:
        """This host died: do not choose it again until the controller names it anew."""
        entries = dict(self.table.entries)
        entries[ref.model] = tuple(e for e in entries.get(ref.model, ()) if e.host != ref)
        self.table = replace(self.table, entries=entries)


def _sticky_key(request: GenerationRequest) -> str:
    return request.session or request.group or request.request_id


class Generator:
    """Runs generations for one gateway."""

    def __init__(
        self,
        controller: Any,
        links: Links,
        routes: Routes,
        deadline_seconds: Callable[[Tier], float],
        spilled: Callable[[str], None] = lambda model: None,
    ) -> None:
        self._controller = controller
        self._spilled = spilled
        self._links = links
        self._routes = routes
        self._deadline_seconds = deadline_seconds
        self._room = WaitingRoom(controller)

    async def outputs(self, request: GenerationRequest, model: str, progress: Progress) -> AsyncGenerator[Output]:
        """The outputs of a generation, contiguous over host deaths; ends after a final one or raises.

        A token is delivered once: when a host dies the next attempt starts from the tokens this generator has yielded.
        """
        patience = self._deadline_seconds(request.tier)
        deadline = progress.arrival + patience
        delivered: list[int] = list(request.delivered_token_ids)
        while True:
            request = replace(request, delivered_token_ids=tuple(delivered), deadline=deadline)
            stream = await self._begin(request, model, deadline, progress)
            progress.state, progress.stream = "running", stream
            try:
                while True:
                    output = await stream.next()
                    if isinstance(output.error, HostLost):
                        self._routes.forget(stream.host)
                        self._abandon(progress.ticket)  # the controller may not know yet that it was redeemed
                        break
                    if output.error is not None:
                        raise output.error
                    delivered += output.token_ids
                    yield output
                    if output.final:
                        return
            finally:
                stream.close("the client went away")
            progress.state = "host lost"
            request = replace(request, generation=request.generation + 1)
            deadline = max(deadline, time.time() + patience)

    async def _begin(self, request: GenerationRequest, model: str, deadline: float, progress: Progress) -> Stream:
        """Place the generation: on a host known to be ready, else by a ticket of the controller's."""
        refused = False
        while True:
            if progress.aborted is not None:
                raise progress.aborted
            begin = time.time()
            ref, spilled = self._routes.ready_host(model, _sticky_key(request), self._links.load())
            ticket = None
            if spilled:
                self._spilled(model)
            if ref is None or refused:
                placement = await self._ensure_ready(model, request, deadline, progress)
                ref, ticket = placement.host, placement.ticket_id
                progress.load_seconds += time.time() - begin
            progress.attempts += 1
            try:
                link = await self._links.to(ref)
                stream = await link.submit(request, ticket)
            except (HostUnavailable, HostLost) as error:
                self._abandon(ticket)
                await self._went_wrong(ref, error, deadline, refused)
                refused = True
                continue
            except (asyncio.CancelledError, RayError):
                self._abandon(ticket)
                raise
            progress.hosts.append(ref.name)
            progress.ticket = ticket
            return stream

    def _abandon(self, ticket: str | None) -> None:
        """A placement we do not use: kept, it would hold up the draining of its host, or of that host's successor.

        Detached: Ray cancels what a cancelled request has sent, this too.
        """
        if ticket is not None:
            start_detached(self._send_abandon(ticket))

    async def _send_abandon(self, ticket: str) -> None:
        with contextlib.suppress(RayError):  # a dead controller has forgotten it
            await self._controller.abandon.remote(ticket)

    async def _went_wrong(self, ref: HostRef, error: OrchestratorError, deadline: float, again: bool) -> None:
        if time.time() >= deadline:
            raise DeadlineExceeded(f"no host took the request before the deadline: {error.message}")
        if isinstance(error, HostLost):
            self._routes.forget(ref)
            with contextlib.suppress(RayError):
                await self._controller.suspect.remote(ref)
        if again:
            await asyncio.sleep(RETRY_SECONDS)

    async def _ensure_ready(
        self, model: str, request: GenerationRequest, deadline: float, progress: Progress
    ) -> Placement:
        """Wait for the controller's placement; the load goes on when we leave."""
        ticket = f"{request.request_id}/{request.generation}/{uuid.uuid4().hex[:8]}"
        with self._room.told(ticket, model, progress), contextlib.ExitStack() as leaving:
            leaving.callback(self._abandon, ticket)  # a ticket nobody redeems holds up the draining of its host
            placement = await self._placed(ticket, model, request, deadline)
            leaving.pop_all()
            return placement

    async def _placed(self, ticket: str, model: str, request: GenerationRequest, deadline: float) -> Placement:
        while True:
            try:
                answer: Placement | OrchestratorError = await self._controller.ensure_ready.remote(
                    ticket, model, request.arrival, deadline, request.tier
                )
            except TaskCancelledError:  # Ray cancels the call first, and it says so before we hear of it
                raise
            except RayError as error:  # between a controller's death and its successor
                if time.time() >= deadline:
                    raise ModelLoading(f"the controller is away: {error}", retry_after_seconds=2.0) from error
                await asyncio.sleep(0.2)
                continue
            if isinstance(answer, OrchestratorError):
                raise answer
            return answer
