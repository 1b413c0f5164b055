"""A client that leaves while its generation is being handed over leaves nothing behind (no Ray: the plain class)."""

from __future__ import annotations

import asyncio

import pytest

from engine.fake import FakeSettings
from engine.protocol import EngineLimits
from model_pool import host as module
from model_pool.effects import HostRef
from model_pool.host import EngineHost, HostPicture, HostSpec
from tests.engine_helpers import request


async def ready_host(**fake: float) -> EngineHost:
    limits = EngineLimits(max_model_len=256)
    host = EngineHost(HostSpec(HostRef("m", 0, 0), "fake", 2**30, limits, fake=FakeSettings(**fake)))  # type: ignore[arg-type]
    assert isinstance(await host.load(), HostPicture)
    stream = host.open("gateway")
    await anext(stream)
    asyncio.get_running_loop().create_task(_heartbeats(host))
    return host


async def _heartbeats(host: EngineHost) -> None:
    while True:
        await host.heartbeat("gateway")
        await asyncio.sleep(0.2)


async def until_idle(host: EngineHost, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while host._channels.in_flight or await host._call(lambda engine: engine.live()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("awaits", range(6))
async def test_a_submit_cancelled_at_any_await_and_then_cancelled_leaves_nothing(awaits: int) -> None:
    host = await ready_host(step_seconds=0.005)
    for number in range(20):
        submit = asyncio.ensure_future(host.submit("gateway", request(f"r{number}", [1, 2, 3], 200), None))
        for _ in range(awaits):
            await asyncio.sleep(0)
        submit.cancel()
        await asyncio.gather(submit, return_exceptions=True)
        await host.cancel(f"r{number}", 0, "the client went away")
    await until_idle(host)
    async with asyncio.timeout(5):
        assert await host.drain(()) is None


@pytest.mark.parametrize("awaits", range(6))
async def test_a_submit_that_is_cut_off_is_carried_through(awaits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_second_look(_: EngineHost) -> None:
        return

    monkeypatch.setattr(EngineHost, "_reconcile", no_second_look)
    host = await ready_host(step_seconds=0.02)
    for number in range(20):
        submit = asyncio.ensure_future(host.submit("gateway", request(f"r{number}", [1, 2, 3], 2), None))
        for _ in range(awaits):
            await asyncio.sleep(0)
        submit.cancel()
        await asyncio.gather(submit, return_exceptions=True)
    await until_idle(host)


async def test_a_refused_generation_whose_client_left_leaves_nothing() -> None:
    host = await ready_host()
    submit = asyncio.ensure_future(host.submit("gateway", request("large", [1] * 300, 10), None))
    await asyncio.sleep(0)
    submit.cancel()
    await asyncio.gather(submit, return_exceptions=True)
    await until_idle(host)


async def test_a_generation_that_the_engine_does_not_know_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.6)
    host = await ready_host()
    host._channels.own("gateway", ("ghost", 0))
    async with asyncio.timeout(5):
        assert await host.drain(()) is None
