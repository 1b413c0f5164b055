"""Owns the end of KV whose session is no more: deleted, expired, or of a tenant that was removed (design section 8).

One rule for all of it: three times a minute, what the hosts of this service and its disk hold is compared with the
session store. So it makes no difference that a host was not reached when a session was deleted, or was not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from ray.exceptions import RayError

from orchestrator.logs import EventLogger
from policies.errors import OrchestratorError
from session_store.keys import is_session_id
from session_store.store import SessionStore

EVERY_SECONDS = 20.0
TOGETHER = 500  # sessions looked up in one round trip


class Forgetting:
    """One gateway's part in it; the gateways take turns."""

    def __init__(self, controller: Any, store: SessionStore, tenants: Collection[str], log: EventLogger) -> None:
        self._controller, self._store, self._tenants, self._log = controller, store, frozenset(tenants), log

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            try:
                if await self._store.take_turn("forget", EVERY_SECONDS * 0.9):
                    await self.once()
            except (RayError, OrchestratorError) as error:  # next time; what we do not know of, we do not drop
                self._log.warning("forgetting_failed", cause=f"{type(error).__name__}: {error}")

    async def once(self) -> Sequence[str]:
        """Have the KV of sessions that are gone dropped everywhere; which sessions those were."""
        held = await self._controller.kv_sessions.remote()
        gone: list[str] = []
        for begin in range(0, len(held), TOGETHER):
            gone += await self._gone(held[begin : begin + TOGETHER])
        if gone:
            forgotten = await self._controller.forget_sessions.remote(gone)
            self._log.info(
                "kv_forgotten", sessions=len(gone), blocks=forgotten.blocks, not_reached=forgotten.not_reached
            )
        return gone

    async def _gone(self, names: Sequence[str]) -> list[str]:
        """Those that are not in the store, or cannot be: of no tenant of ours, or under no session's name."""
        parts = {name: (tenant, session) for name in names for tenant, _, session in [name.partition("/")]}
        ours = [part for part in parts.values() if part[0] in self._tenants and is_session_id(part[1])]
        there = set(ours) - set(await self._store.missing(ours))
        return [name for name, part in parts.items() if part not in there]
