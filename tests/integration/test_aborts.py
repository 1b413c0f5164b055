"""Clients that close their connection at any moment keep nothing of a model: it drains and sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import httpx
import pytest

from tests.scenarios.calls import ACME, session
from tests.service import RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(120)]
ABORTS = 240
AT_ONCE = 8


async def abort(client: httpx.AsyncClient, service: RunningService, number: int, seconds: float) -> None:
    """Ask, and be gone before the answer, or in the middle of it."""
    body: dict[str, Any] = {"model": "slow", "max_tokens": 30, "stream": bool(number % 2)}
    body["messages"] = [{"role": "user", "content": f"say {number}"}]
    headers = {**ACME, **(session() if number % 3 else {})}
    with contextlib.suppress(TimeoutError, httpx.TransportError):
        async with (
            asyncio.timeout(seconds),
            client.stream("POST", f"{service.url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            async for _ in response.aiter_lines():
                pass


async def abort_many(service: RunningService, chooser: random.Random) -> None:
    for begin in range(0, ABORTS, AT_ONCE):
        async with httpx.AsyncClient(timeout=60) as client:
            waits = [chooser.random() * chooser.choice([0.06, 0.5]) for _ in range(AT_ONCE)]
            await asyncio.gather(*(abort(client, service, begin + n, wait) for n, wait in enumerate(waits)))


def test_after_many_clients_that_left_nothing_is_in_flight_and_the_model_sleeps(fake_service: RunningService) -> None:
    asyncio.run(abort_many(fake_service, random.Random(3)))
    wait_until(lambda: fake_service.model("slow")["in_flight"] == 0, 10, "nothing in flight")
    fake_service.operate("slow", "sleep")
    wait_until(lambda: fake_service.model("slow")["state"] == "sleeping", 10, "asleep")
    fake_service.operate("slow", "wake")
    wait_until(lambda: fake_service.model("slow")["state"] == "ready", 20, "awake")
