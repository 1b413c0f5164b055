"""Owns the thread that owns an engine: commands in, outputs out, no locks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from engine.protocol import Engine, Output

Result = TypeVar("Result")


class EngineLoop:
    """Runs one engine in one thread. All other threads speak to it through ``call``.

    ``deliver`` is called in the engine's thread with the outputs of each step, ``crashed`` once with the exception that
    ended the loop.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Sequence[Output]], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._crashed = crashed
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, command: Callable[[Engine], Result]) -> Future[Result]:
        """Run ``command`` between two steps; the future has its result or its exception."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command(self._engine))
            except Exception as error:  # noqa: BLE001 — the caller's own error, handed back to the caller
                future.set_exception(error)

        self._commands.put(run)
        return future

    def stop(self) -> None:
        """End the thread after the commands given so far."""
        self._commands.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work():
                    outputs = self._engine.step()
                    if outputs:
                        self._deliver(outputs)
                    if not self._engine.has_work():
                        self._engine.check()  # a leak is found here, not when the pool has run dry
        except Exception as error:  # noqa: BLE001 — boundary: the engine is lost, its host must say so
            self._crashed(error)

    def _obey(self) -> bool:
        """Run all pending commands; wait for one while idle. False: the loop is to end."""
        try:
            command = self._commands.get(timeout=None if not self._engine.has_work() else 0)
            while True:
                if command is None:
                    return False
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
