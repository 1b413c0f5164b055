"""Owns the independent view of where generations run, and the rule by which a move is judged.

Hosts are asked past gateway and controller, by a process of its own that joins the Ray cluster. The rule is the one of
docs/design.md, written anew: a gateway skips a session's own host only when that host would hold more than 1.25 × the
mean of the gateway's own generations in flight.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from orchestrator.cluster import require_token
from tests.service import RunningService, wait_until

PROBE = """
import json, sys, ray
ray.init(address=sys.argv[1], namespace="orchestrator", log_to_driver=False, logging_level="ERROR")
hosts = [ray.get_actor(name) for name in sys.argv[2:]]
print("[]", flush=True)
for _ in sys.stdin:
    print(json.dumps([seen.report.in_flight for seen in ray.get([h.picture.remote() for h in hosts])]), flush=True)
"""


class Hosts:
    """The hosts of one model; ``in_flight`` says how many generations each has now."""

    def __init__(self, service: RunningService, names: list[str]) -> None:
        self.names = names
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROBE, service.ray_address, *names],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | require_token(service.state_dir),
        )  # fmt: skip
        self._lock = threading.Lock()
        self._read()  # it has joined

    def in_flight(self) -> list[int]:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> list[int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("no look at the hosts any more: one has died, or the cluster; see the lines above")
        found: list[int] = json.loads(line)
        return found


def risen(before: list[int], now: list[int]) -> int | None:
    """The one host that has one generation more; None when it cannot be told."""
    grown = [number for number, (then, count) in enumerate(zip(before, now, strict=True)) if count == then + 1]
    return grown[0] if len(grown) == 1 else None


@dataclass
class GatewayLoad:
    """What we keep running through each gateway: gateway → host number → generations."""

    running: dict[str, Counter[int]] = field(default_factory=dict)

    def add(self, gateway: str, host: int, count: int = 1) -> None:
        self.running.setdefault(gateway, Counter())[host] += count

    def must_spill(self, gateway: str, home: int, hosts: int) -> str:
        """Why a turn through this gateway must not go to its home; "" when it must."""
        load = self.running.get(gateway, Counter())
        most = math.ceil(1.25 * (load.total() + 1) / hosts)
        if load[home] + 1 <= most:
            return ""
        return f"host {home} has {load[home]} of the {load.total()} generations of gateway {gateway}, at most {most}"


@dataclass(frozen=True)
class Seen:
    """Where one turn ran."""

    session: str
    turn: int
    gateway: str
    host: int
    reason: str  # why it had to spill; "" when it had not

    def problem(self, home: int) -> str:
        """What the rule does not explain."""
        if self.host != home and not self.reason:
            return f"{self.session} turn {self.turn} moved from host {home} to {self.host} without a reason"
        if self.host == home and self.reason:
            return f"{self.session} turn {self.turn} stayed on its hot host: {self.reason}"
        return ""


class Hog:
    """A long streamed answer that keeps its host busy until it is stopped."""

    def __init__(self, service: RunningService, model: str, key: str, session: str) -> None:
        self.session = session
        self._lines = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(service, model, key), daemon=True)
        self._thread.start()
        wait_until(lambda: self._lines > 4, 30, f"{session} generates")

    def stop(self) -> None:
        """The client goes away."""
        self._stop.set()
        self._thread.join(10)

    def _read(self, service: RunningService, model: str, key: str) -> None:
        body: dict[str, Any] = {
            "model": model, "stream": True, "max_tokens": 6000,
            "messages": [{"role": "user", "content": "talk for a long time"}],
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {key}", "X-Session-ID": self.session}
        url = f"{service.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
            for line in response.iter_lines():
                self._lines += line.startswith("data: ")
                if self._stop.is_set():
                    return
