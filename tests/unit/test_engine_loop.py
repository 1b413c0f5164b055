"""The engine's own thread: commands between steps, outputs out, the end said once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from engine.loop import EngineLoop
from engine.protocol import Output
from policies.errors import BadRequest
from tests.engine_helpers import Said, collect, fake_engine, request


class Listener:
    def __init__(self) -> None:
        self.said: dict[str, Said] = {}
        self.crashed: Future[BaseException] = Future()
        self.finals = threading.Semaphore(0)

    def deliver(self, outputs: Sequence[Output]) -> None:
        collect(self.said, outputs)
        for output in outputs:
            if output.final:
                self.finals.release()


def test_commands_run_in_the_engines_thread_and_outputs_come_in_order() -> None:
    heard = Listener()
    loop = EngineLoop(fake_engine(), heard.deliver, heard.crashed.set_result)
    loop.start()
    assert loop.call(lambda _: threading.current_thread().name).result(5) == "engine"
    for name in "abc":
        loop.call(lambda engine, name=name: engine.add(request(name, [1, 2, 3], 5))).result(5)  # type: ignore[misc]
    for _ in range(3):
        assert heard.finals.acquire(timeout=5)
    assert all(len(heard.said[name].tokens) == 5 for name in "abc")
    with pytest.raises(BadRequest):
        loop.call(lambda engine: engine.add(request("d", []))).result(5)
    loop.stop()
    assert not heard.crashed.done()


def test_a_step_that_raises_ends_the_loop_and_is_told_once() -> None:
    heard = Listener()
    engine = fake_engine()
    loop = EngineLoop(engine, heard.deliver, heard.crashed.set_result)
    loop.start()

    def breaks(_: object) -> list[int | None]:
        raise RuntimeError("device lost")

    engine._compute = breaks  # type: ignore[method-assign, assignment]
    loop.call(lambda e: e.add(request("a", [1], 5))).result(5)
    assert "device lost" in str(heard.crashed.result(5))
