"""Owns what a gateway tells those who wait for a model: asked of the controller once a second for all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from ray.exceptions import RayError

from model_pool.effects import Wait
from orchestrator.detached import start_detached
from orchestrator.progress import Progress

ASK_SECONDS = 1.0


class WaitingRoom:
    """The requests of one gateway that wait for a placement."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._waiting: dict[str, tuple[str, Progress]] = {}  # by ticket
        self._asking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def told(self, ticket: str, model: str, progress: Progress) -> Iterator[None]:
        """Inside, ``progress.state`` says where this request stands."""
        progress.state = f"waiting for {model}"
        self._waiting[ticket] = (model, progress)
        if self._asking is None or self._asking.done():
            self._asking = start_detached(self._ask())
        try:
            yield
        finally:
            del self._waiting[ticket]

    async def _ask(self) -> None:
        while self._waiting:
            models = tuple({model for model, _ in self._waiting.values()})
            waits: dict[str, Wait] = {}
            with contextlib.suppress(RayError):  # between a controller's death and its successor
                waits = await self._controller.waits.remote(models)
            for ticket, (model, progress) in self._waiting.items():
                if (wait := waits.get(ticket)) is not None:
                    progress.state = said(model, wait)
            await asyncio.sleep(ASK_SECONDS)


def said(model: str, wait: Wait) -> str:
    """One line without a line break: it becomes a comment in a stream."""
    place = f"waiting for {model}, which is {wait.state}; {wait.position} of {wait.waiting} in line"
    return place if wait.eta_seconds is None else f"{place}; ready in about {wait.eta_seconds:.0f} s"
