"""Owns the private Ray cluster: started on its own ports, ended whole, leftovers of an earlier life cleaned up.

A cluster made by ``ray.init()`` dies with its driver; ours outlives a killed ``serve`` until the next one starts.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from policies.errors import NotReachable

OBJECT_STORE_BYTES = 128 * 2**20  # nothing large passes through it
START_SECONDS = 60.0
FRONT = "ha"  # in the cluster's directory: HAProxy's, for us alone
POLITE_SECONDS = 1.0  # Ray's workers do not end on SIGTERM; what we keep is in Redis and in files by then


class PrivateCluster:
    """One head node of our own."""

    def __init__(self, state_dir: Path, num_cpus: int | None) -> None:
        self.temp_dir = temp_dir(state_dir)
        self._num_cpus = num_cpus or len(os.sched_getaffinity(0))
        self._log_path = state_dir / "ray.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self) -> None:
        """Start the head node; NotReachable with the log's tail when it does not come up."""
        self.clean()
        (self.temp_dir / FRONT).mkdir(mode=0o700, parents=True, exist_ok=True)
        port, client, agent, metrics = free_ports(4)
        self.address = f"127.0.0.1:{port}"
        command = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block",
            "--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={client}",
            f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}",
            "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={self.temp_dir}",
            f"--num-cpus={self._num_cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}",
        ]  # fmt: skip
        with self._log_path.open("wb") as log:
            # a session of its own: Ctrl-C in the terminal must reach us, not the processes we still have to drain
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while not listens(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log_path.read_text(errors="replace").strip().splitlines()[-3:]
                self.clean()
                raise NotReachable(f"Ray did not start: {' | '.join(tail)}")
            time.sleep(0.1)
        self.temp_dir.chmod(0o700)  # Ray opens it to everybody

    @property
    def alive(self) -> bool:
        """``ray start --block`` ends when any process of the head node does."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        self.clean()
        if self._process is not None:
            self._process.wait(timeout=10)
            self._process = None
            shutil.rmtree(self.temp_dir, ignore_errors=True)  # sockets and logs of this life

    def clean(self) -> None:
        """End every process of this cluster, of this life or an earlier one."""
        family: dict[int, psutil.Process] = {}
        for process in self._roots():
            family[process.pid] = process
            for child in _children(process):
                family[child.pid] = child
        for process in family.values():
            _signal(process, kill=False)
        _, alive = psutil.wait_procs(list(family.values()), timeout=POLITE_SECONDS)
        for process in alive:
            _signal(process, kill=True)
        psutil.wait_procs(alive, timeout=5)

    def _roots(self) -> list[psutil.Process]:
        mark = str(self.temp_dir)
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if process.pid != os.getpid() and any(mark in word for word in words):
                found.append(process)
        return found


def require_token(state_dir: Path) -> dict[str, str]:
    """Environment with which only those who can read our token may speak to the cluster; set before Ray is imported.

    Ray listens on all interfaces and runs what it is told.
    """
    path = state_dir / "ray.token"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def temp_dir(state_dir: Path) -> Path:
    """Where the cluster of this state directory has its sockets, logs and configuration."""
    digest = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir()) / f"orc-{digest}"  # short: unix sockets allow 107 characters


def check_port(host: str, port: int) -> None:
    """NotReachable when something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise NotReachable(
                f"port {port} on {host} is taken ({error.strerror}); stop what uses it or choose another with --port"
            ) from error


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def listens(port: int) -> bool:
    """Does anybody, on the loopback interface?"""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            process.kill()
        else:
            process.terminate()
    except psutil.NoSuchProcess:
        return
