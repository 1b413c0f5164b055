"""A client that leaves while its generation is being handed over leaves nothing behind (no Ray: the plain class)."""

from __future__ import annotations

import asyncio

import pytest

from engine.fake import FakeSettings
from engine.protocol import EngineLimits, GenerationRequest
from model_pool import host as module
from model_pool.effects import HostRef
from model_pool.host import EngineHost
from model_pool.host_words import HostPicture, HostSpec
from tests.engine_helpers import request

BREAKS = {"test_R13": ("model_pool/host.py", "set(tickets) - set(self._redeemed)", "set(tickets)")}


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch) -> EngineHost:
    """A ready host with an open stream, whose watch over its gateways never comes to look."""
    monkeypatch.setattr(module, "SILENCE_SECONDS", 10_000.0)
    limits = EngineLimits(max_model_len=256)
    made = EngineHost(HostSpec(HostRef("m", 0, 0), "fake", 2**30, limits, fake=FakeSettings()))
    assert isinstance(await made.load(), HostPicture)
    await anext(made.open("gateway"))
    return made


async def submit_and_leave(host: EngineHost, asked: GenerationRequest, awaits: int) -> None:
    submit = asyncio.ensure_future(host.submit("gateway", asked, None))
    for _ in range(awaits):
        await asyncio.sleep(0)
    submit.cancel()
    await asyncio.gather(submit, return_exceptions=True)


async def check_drains(host: EngineHost) -> None:
    async with asyncio.timeout(5):
        assert await host.drain(()) is None
        assert await host._call(lambda engine: engine.live()) == ()


@pytest.mark.parametrize("awaits", range(6))
async def test_a_submit_cut_off_at_any_await_is_carried_through(host: EngineHost, awaits: int) -> None:
    for number in range(20):
        await submit_and_leave(host, request(f"r{number}", [1, 2, 3], 2), awaits)
    await check_drains(host)


async def test_a_generation_refused_after_its_client_left_is_not_in_flight(host: EngineHost) -> None:
    await submit_and_leave(host, request("large", [1] * 300, 10), awaits=2)
    await check_drains(host)


async def test_a_generation_that_the_engine_does_not_know_is_let_go_at_the_second_look(host: EngineHost) -> None:
    host._channels.own("gateway", ("ghost", 0))
    await host._reconcile()
    assert host._channels.in_flight == 1  # it may be on its way to the engine
    await host._reconcile()
    await check_drains(host)


async def test_a_ticket_that_is_given_up_holds_up_no_drain(host: EngineHost) -> None:
    drained = asyncio.ensure_future(host.drain(("stays", "leaves")))
    await asyncio.sleep(0)
    await host.forfeit("leaves")
    await asyncio.sleep(0)
    assert not drained.done(), "the other may still come"
    await host.forfeit("stays")
    async with asyncio.timeout(5):
        assert await drained is None


async def test_R13_a_ticket_whose_request_has_come_and_gone_holds_up_no_drain(host: EngineHost) -> None:
    """The controller that drains may not have heard of its arrival yet."""
    assert await host.submit("gateway", request("r", [1, 2, 3], 2), "arrived") is None
    async with asyncio.timeout(5):
        assert await host.drain(("arrived",)) is None


async def test_an_idle_host_says_so_at_once(host: EngineHost) -> None:
    await host.watch()  # whatever it has to say until now
    watching = asyncio.ensure_future(host.watch())
    await asyncio.sleep(0)
    assert await host.submit("gateway", request("r", [1, 2, 3], 2), None) is None
    async with asyncio.timeout(0.5):  # not only after a second
        assert (await watching).report.in_flight == 0
