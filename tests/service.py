"""The whole service as a child process, for tests and acceptance programs: start, look at, kill parts of it, stop."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from orchestrator.cluster import PrivateCluster

ADMIN = "sk-demo-admin"
START_SECONDS = 240


def free_port() -> int:
    """Not of the range that outgoing connections take theirs from: one of them had it before the service did."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


PORTS = (15_000, 30_000)


class RunningService:
    """``orchestrator serve`` with its own state directory and port."""

    def __init__(self, config: Path, state_dir: Path, environment: Mapping[str, str] | None = None) -> None:
        self.config = config
        self.environment = os.environ | (environment or {})
        self.environment.pop("TRITON_INTERPRET", None)  # of the tests' own process
        self.state_dir = state_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.output = state_dir / "serve.out"

    def start(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "orchestrator.cli", "serve", "--config", str(self.config),
            "--port", str(self.port), "--state-dir", str(self.state_dir),
        ]  # fmt: skip
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=self.environment)
        deadline = time.monotonic() + START_SECONDS
        while b"ready in" not in self.output.read_bytes():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start:\n{self.output.read_text()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """As Ctrl-C does."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process = None

    def kill(self) -> None:
        """SIGKILL ``orchestrator serve`` alone: Ray and Redis have sessions of their own and live on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def sweep(self) -> list[int]:
        """End what a stop left behind; the pids. Nothing should be."""
        mark = str(self._cluster.temp_dir)
        left = [p for p in psutil.process_iter(["cmdline"]) if any(mark in word for word in p.info["cmdline"] or [])]
        redis_file = self.state_dir / "redis.pid"
        if redis_file.exists() and psutil.pid_exists(int(redis_file.read_text())):
            left.append(psutil.Process(int(redis_file.read_text())))
        for process in left:
            process.kill()
        self._cluster.clean()
        return [process.pid for process in left]

    @property
    def ray_address(self) -> str:
        return (self._cluster.temp_dir / "ray_current_cluster").read_text().strip()

    @property
    def _cluster(self) -> PrivateCluster:
        return PrivateCluster(self.state_dir, None)

    def admin(self) -> dict[str, Any]:
        """What ``orchestrator ps --json`` shows."""
        response = httpx.get(f"{self.url}/admin/models", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30)
        response.raise_for_status()
        return response.json()

    def model(self, name: str) -> dict[str, Any]:
        return self.hosts(name)[0]

    def hosts(self, model: str) -> list[dict[str, Any]]:
        """Every host of a model."""
        return [host for host in self.admin()["models"] if host["model"] == model]

    def operate(self, model: str, verb: str) -> None:
        """What ``orchestrator sleep`` and its like do."""
        url = f"{self.url}/admin/models/{model}/{verb}"
        httpx.post(url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30).raise_for_status()

    def transitions(self, model: str, since: float) -> list[tuple[str, str]]:
        """The (old, new) states of a model since a time, seconds since the epoch."""
        found = self.events(model)
        return [(e["old"], e["new"]) for e in found if e["kind"] == "transition" and e["at"] >= since]

    @property
    def pid(self) -> int:
        """Of ``orchestrator serve`` itself."""
        assert self.process is not None
        return self.process.pid

    def redis_pid(self) -> int:
        return int((self.state_dir / "redis.pid").read_text())

    def events(self, model: str) -> list[dict[str, Any]]:
        """What ``orchestrator events --json --model`` shows."""
        url = f"{self.url}/admin/events?limit=1000&model={model}"
        response = httpx.get(url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30)
        return response.raise_for_status().json()["events"]

    def engine_pids(self) -> set[int]:
        """Processes of engine hosts, as the kernel sees them."""
        mark = str(self._cluster.temp_dir)
        raylets = [p for p in psutil.process_iter(["cmdline"]) if _is_raylet(p, mark)]
        workers = [worker for raylet in raylets for worker in raylet.children(recursive=True)]
        return {worker.pid for worker in workers if _title(worker).startswith("ray::EngineHost")}

    def gateways(self) -> dict[str, int]:
        """The gateways that answer now: name → pid. One of two is missed once in half a million."""
        found = (httpx.get(f"{self.url}/health", timeout=30).json() for _ in range(20))
        return {health["gateway"]: health["pid"] for health in found}

    def gateway_pid(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=30).json()["pid"]


def _is_raylet(process: psutil.Process, mark: str) -> bool:
    words = process.info["cmdline"] or []
    return bool(words) and words[0].endswith("/raylet") and any(mark in word for word in words)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # gone, or a zombie
        return ""


def wait_until(true: Any, seconds: float, what: str) -> None:
    """Poll ``true()`` until it holds; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def kill_hard(pid: int) -> None:
    """SIGKILL, and the proof that the process is gone."""
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 10, f"pid {pid} dead")
