"""Owns the faults of the main job: what is killed, in which window, and the proof that it died there."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum

import psutil

from tests.acceptance.client import Turn
from tests.service import RunningService, wait_until

SWITCH_SECONDS = 0.3  # after begin: the request is on its way and its model is being brought in


class Window(StrEnum):
    """Between which two client events something dies."""

    BETWEEN = "between turns"  # the last acknowledgement, this begin
    SWITCHING = "before the first token"  # this begin, this first token
    STREAMING = "after the first token"  # this first token, this acknowledgement


@dataclass
class Fault:
    """One thing to kill during one turn. ``victim``: host, resident host, controller, gateway or service."""

    victim: str
    window: Window
    pids: list[int] = field(default_factory=list)
    killed_at: float = 0.0
    dead_at: float = 0.0
    failure: BaseException | None = None  # of a strike in a thread

    def __str__(self) -> str:
        return f"{self.victim} {'restarted' if self.victim == 'service' else 'killed'} {self.window}"

    def aim(self, service: RunningService, turn: Turn) -> None:
        """Find the pid while everything is quiet."""
        pool = service.admin()
        pids = {model["model"]: model.get("pid") for model in pool["models"]}
        match self.victim:
            case "host":
                found = [pids[turn.model]]
            case "resident host":
                found = [m["pid"] for m in pool["models"] if m["state"] == "ready" and m["model"] != turn.model]
            case "controller":
                found = [pool["controller_pid"]]
            case "gateway":
                found = [service.gateway_pid()]
            case "service":
                found = [service.pid, service.redis_pid(), pool["controller_pid"], service.gateway_pid()]
                found += [pid for pid in pids.values() if pid]
        self.pids = [pid for pid in found if pid]
        if not self.pids:
            raise RuntimeError(f"turn {turn.number}: there is no {self.victim} to kill: {pool['models']}")

    def strike(self, service: RunningService) -> None:
        """Kill, and do not come back before the kernel says that it is dead."""
        victims = [psutil.Process(pid) for pid in self.pids]
        self.killed_at = time.monotonic()
        if self.victim == "service":
            service.stop()
        else:
            os.kill(self.pids[0], signal.SIGKILL)
        wait_until(lambda: not any(map(_lives, victims)), 10, f"{self.victim} {self.pids} dead")
        self.dead_at = time.monotonic()
        if self.victim == "service":
            service.start()

    def strike_later(self, service: RunningService) -> None:
        """Strike while the caller waits for its first token."""

        def run() -> None:
            time.sleep(SWITCH_SECONDS)
            try:
                self.strike(service)
            except BaseException as error:
                self.failure = error
                raise

        threading.Thread(target=run, name="fault", daemon=True).start()

    def proof(self, turn: Turn, previous_acknowledged: float) -> tuple[bool, str]:
        """Whether it died inside its window, and the times that say so, in seconds since the window began."""
        begin, end = {
            Window.BETWEEN: (previous_acknowledged, turn.begun),
            Window.SWITCHING: (turn.begun, turn.first_token),
            Window.STREAMING: (turn.first_token, turn.acknowledged),
        }[self.window]
        held = self.failure is None and begin < self.killed_at <= self.dead_at < end
        died = f"killed {self.killed_at - begin:.2f}, dead {self.dead_at - begin:.2f}, window 0 to {end - begin:.2f} s"
        return held, f"turn {turn.number}: {self}, pid {', '.join(map(str, self.pids))}: {died}"


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
