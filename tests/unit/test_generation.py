"""A generation over several hosts: continuing from the delivered tokens, and asking the controller only when needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import TaskCancelledError

from engine.protocol import GenerationRequest, Output, SamplingParams
from model_pool.effects import HostRef, Placement, RoutingEntry, RoutingTable
from orchestrator.generation import Generator, Routes
from orchestrator.progress import Progress
from policies.errors import DeadlineExceeded, HostLost, HostUnavailable, OrchestratorError
from policies.types import ModelState

A, B = HostRef("m", 0, 1), HostRef("m", 0, 2)


class Remote:
    """``handle.method.remote(...)`` on a plain async function."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class FakeController:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.tickets: list[tuple[Any, ...]] = []
        self.suspected: list[HostRef] = []
        self.ensure_ready = Remote(self._ensure_ready)
        self.suspect = Remote(self._suspect)
        self.abandon = Remote(self._abandon)
        self.abandoned: list[str] = []

    async def _ensure_ready(self, *args: Any) -> Any:
        self.tickets.append(args)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException) and not isinstance(answer, OrchestratorError):
            raise answer
        return answer

    async def _abandon(self, ticket: str) -> None:
        self.abandoned.append(ticket)

    async def _suspect(self, ref: HostRef) -> None:
        self.suspected.append(ref)


class FakeStream:
    def __init__(self, host: HostRef, outputs: list[Output]) -> None:
        self.host, self.outputs, self.closed = host, outputs, False

    async def next(self) -> Output:
        return self.outputs.pop(0)

    def close(self, reason: str) -> None:
        self.closed = True

    def fail(self, error: OrchestratorError) -> None:
        self.outputs.insert(0, Output("r", 0, error=error))


class FakeLinks:
    """``script``: per host, what each submit answers: a list of outputs, or an error."""

    def __init__(self, script: dict[HostRef, list[Any]]) -> None:
        self.script = script
        self.load = dict  # nothing in flight
        self.submitted: list[tuple[HostRef, GenerationRequest, str | None]] = []

    async def to(self, ref: HostRef) -> Any:
        links = self

        class Link:
            async def submit(self, request: GenerationRequest, ticket: str | None) -> FakeStream:
                links.submitted.append((ref, request, ticket))
                answer = links.script[ref].pop(0)
                if isinstance(answer, BaseException):
                    raise answer
                return FakeStream(ref, answer)

        return Link()


def token(number: int, last: bool = False) -> Output:
    return Output("r", 0, (number,), f"{number} ", "length" if last else None)


LOST = Output("r", 0, error=HostLost("died"))
REQUEST = GenerationRequest("r", 0, (1, 2, 3), SamplingParams(4, 7), tenant="t", arrival=0.0)


def routes(*hosts: HostRef) -> Routes:
    found = Routes(None)
    found.table = RoutingTable(1, {"m": tuple(RoutingEntry(host, ModelState.READY) for host in hosts)})
    return found


async def run(controller: FakeController, links: FakeLinks, table: Routes, arrival: float) -> list[int]:
    generator = Generator(controller, links, table, deadline_seconds=lambda _: 30.0)  # type: ignore[arg-type]
    return [t async for o in generator.outputs(REQUEST, "m", Progress(arrival)) for t in o.token_ids]


async def test_the_warm_path_never_asks_the_controller() -> None:
    controller, links = FakeController(), FakeLinks({A: [[token(1), token(2, last=True)]]})
    assert await run(controller, links, routes(A), _now()) == [1, 2]
    assert controller.tickets == []


async def test_a_host_death_continues_from_the_delivered_tokens() -> None:
    controller = FakeController(Placement("x", B, 0.0))
    links = FakeLinks({A: [[token(1), token(2), LOST]], B: [[token(3), token(4, last=True)]]})
    table = routes(A)
    assert await run(controller, links, table, _now()) == [1, 2, 3, 4]
    (_, first, _), (_, second, ticket) = links.submitted
    assert (first.delivered_token_ids, second.delivered_token_ids) == ((), (1, 2))
    assert (first.generation, second.generation) == (0, 1)
    assert second.prompt_token_ids == REQUEST.prompt_token_ids and ticket == "x"
    assert table.ready_host("m", "k", {}) == (None, False)  # the dead host is not chosen again


async def test_a_refusing_host_leads_to_a_ticket() -> None:
    controller = FakeController(Placement("x", A, 0.0))
    links = FakeLinks({A: [HostUnavailable("draining"), [token(1, last=True)]]})
    assert await run(controller, links, routes(A), _now()) == [1]
    assert [ticket for _, _, ticket in links.submitted] == [None, "x"]


async def test_the_controllers_error_reaches_the_client() -> None:
    with pytest.raises(HostUnavailable, match="no"):
        await run(FakeController(HostUnavailable("no")), FakeLinks({}), routes(), _now())


async def test_a_host_that_always_refuses_ends_at_the_deadline() -> None:
    links = FakeLinks({A: [HostUnavailable("draining")]})
    with pytest.raises(DeadlineExceeded):
        await run(FakeController(), links, routes(A), _now() - 31.0)


def _now() -> float:
    import time

    return time.time()


@pytest.mark.parametrize("cut", [asyncio.CancelledError(), TaskCancelledError(None)], ids=["ours", "Ray's"])
async def test_a_request_cancelled_while_it_waits_gives_its_ticket_up(cut: BaseException) -> None:
    controller = FakeController(cut)
    with pytest.raises(type(cut)):
        await run(controller, FakeLinks({}), routes(), _now())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert controller.abandoned == [controller.tickets[0][0]]


async def test_a_placement_whose_submit_is_cut_off_is_given_up() -> None:
    controller = FakeController(Placement("x", A, 0.0))
    links = FakeLinks({A: [TaskCancelledError(None)]})
    with pytest.raises(TaskCancelledError):
        await run(controller, links, routes(), _now())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert controller.abandoned == ["x"]
