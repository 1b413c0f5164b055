"""Who gets which output, and what a silent gateway loses."""

from __future__ import annotations

import asyncio

from engine.protocol import Output
from model_pool.channels import Channels


def output(request: str, generation: int = 0, *, last: bool = False) -> Output:
    return Output(request, generation, (1,), "x", "stop" if last else None)


async def collect(channels: Channels, gateway: str) -> list[Output]:
    channel = channels.open(gateway, 0.0)
    channel.close()
    return [item async for batch in channel.batches() for item in batch]


async def test_each_gateway_gets_its_own_outputs_in_one_batch_a_step() -> None:
    channels = Channels(3.0)
    a, b = channels.open("a", 0.0), channels.open("b", 0.0)
    channels.own("a", ("r1", 0))
    channels.own("a", ("r2", 0))
    channels.own("b", ("r3", 0))
    channels.deliver([output("r1"), output("r3"), output("r2", last=True)])
    assert [o.request_id for o in await anext(a.batches())] == ["r1", "r2"]
    assert [o.request_id for o in await anext(b.batches())] == ["r3"]
    assert channels.in_flight == 2


async def test_E26_a_late_output_of_an_earlier_attempt_reaches_nobody() -> None:
    channels = Channels(3.0)
    a = channels.open("a", 0.0)
    channels.own("a", ("r", 1))
    channels.deliver([output("r", 0)])
    assert a.pending == []


async def test_a_silent_gateway_loses_its_generations_and_its_stream_ends() -> None:
    channels = Channels(3.0)
    a, _ = channels.open("a", 0.0), channels.open("b", 0.0)
    channels.own("a", ("r1", 0))
    channels.own("b", ("r2", 0))
    assert channels.beat("b", 4.0)
    assert channels.reap(3.0) == []
    assert channels.reap(4.0) == [("r1", 0)]
    assert not channels.beat("a", 4.0) and not channels.knows("a")
    assert channels.in_flight == 1
    assert [batch async for batch in a.batches()] == []


async def test_a_reopened_channel_takes_over_what_was_pending() -> None:
    channels = Channels(3.0)
    channels.open("a", 0.0)
    channels.own("a", ("r", 0))
    channels.deliver([output("r")])
    again = channels.open("a", 1.0)
    channels.deliver([output("r", last=True)])
    batches = await asyncio.wait_for(anext(again.batches()), 1)
    assert [o.final for o in batches] == [False, True]
    assert channels.in_flight == 0
