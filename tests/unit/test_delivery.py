"""An answer on its way out: whatever goes wrong after the headers is an error in the stream, and in the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import StreamingResponse
from ray.exceptions import TaskCancelledError

from orchestrator import logs
from orchestrator.api.delivery import Delivery
from orchestrator.asks import Done, Event, Piece, Started
from orchestrator.progress import Progress
from policies.errors import EngineError, OrchestratorError
from tests.unit.test_turn import ask

BREAKS = {
    "test_a_bug_after": ("orchestrator/api/delivery.py", "except Exception as error:", "except LookupError as error:"),
    "test_a_bug_of_ours": ("orchestrator/api/delivery.py", "note_bug(error, turn=self.ask.turn_id)", "pass"),
    "test_a_client_that_left": ("orchestrator/ray_errors.py", "isinstance(error, BaseExceptionGroup)", "False"),
    "test_a_turn_ends": ("orchestrator/api/delivery.py", "start_detached(self._end())", "pass"),
}


class Plain(Delivery):
    def body(self, done: Done) -> dict[str, Any]:
        return {"text": self.texts[0]}

    def chunks(self, event: Event) -> list[bytes]:
        return [type(event).__name__.encode()]

    def failure(self, error: OrchestratorError) -> bytes:
        return b"failed: " + error.message.encode()


@pytest.mark.parametrize("stuck", ["http.response.start", "http.response.body"])
async def test_a_turn_ends_when_its_client_leaves_while_something_is_sent(stuck: str) -> None:
    """Starlette drops the source of a body where it stands; without help it ran until a garbage collection."""
    ended, left = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[Event]:
        try:
            yield Started(None, None, 0.0)
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == stuck:
            left.set()
            await asyncio.Event().wait()

    async def receive() -> MutableMapping[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    response = await Plain(ask(None), Progress(0.0), lambda *_: None).stream(events(), 5.0)
    await response({"type": "http"}, receive, send)
    await asyncio.wait_for(ended.wait(), 5)
    assert response is not None  # alive all the time, so that no collection can have helped


async def told(error: Exception) -> list[bytes]:
    """What a stream says of a turn that ends so after its first text."""

    async def events() -> AsyncGenerator[Event]:
        yield Started(None, None, 0.0)
        yield Piece("a")
        raise error

    response = await Plain(ask(None), Progress(0.0), lambda *_: None).stream(events(), 5.0)
    assert isinstance(response, StreamingResponse)
    return [bytes(chunk) async for chunk in response.body_iterator]  # type: ignore[arg-type]


async def test_an_error_after_the_headers_is_said() -> None:
    assert await told(EngineError("nan")) == [b"Started", b"Piece", b"failed: nan"]


async def test_a_bug_after_the_headers_is_an_error_too_and_says_nothing_of_its_inside() -> None:
    *before, last = await told(RuntimeError("inside"))
    assert before == [b"Started", b"Piece"]
    assert last.startswith(b"failed: internal error in ") and b"inside" not in last


async def test_a_bug_of_ours_is_in_the_log_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "of_process", [logs.event_logger(str(tmp_path / "log"))])
    await told(RuntimeError("inside"))
    (line,) = (tmp_path / "log").read_text().splitlines()
    noted = json.loads(line)
    assert noted["event"] == "bug" and "RuntimeError: inside" in noted["cause"] and "Traceback" in noted["cause"]


async def test_a_client_that_left_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve cancels the call, and that comes out of whatever waited, in as many groups as there were task groups."""
    monkeypatch.setattr(logs, "of_process", [logs.event_logger(str(tmp_path / "log"))])
    await told(ExceptionGroup("unhandled", [ExceptionGroup("unhandled", [TaskCancelledError()])]))
    assert (tmp_path / "log").read_text() == ""
    await told(ExceptionGroup("unhandled", [TaskCancelledError(), RuntimeError("inside")]))
    assert "RuntimeError: inside" in (tmp_path / "log").read_text()
