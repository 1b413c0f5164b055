"""Owns the throw-away service that a benchmark drives when it is given none."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.cluster import PrivateCluster
from policies.errors import NotReachable

START_SECONDS = 1800.0  # the first time, models are fetched and converted
STOP_SECONDS = 60.0
PORTS = (15_000, 30_000)

Say = Callable[[str], None]


@contextlib.contextmanager
def own_service(config: Path, say: Say) -> Iterator[str]:
    """The URL of ``orchestrator serve`` with a state directory that is thrown away; ``say`` is told how it goes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, its children too
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: else they would end us and leave the service running
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="orchestrator-bench-") as state_dir:
        port = _free_port()
        output = Path(state_dir) / "serve.out"
        command = [
            sys.executable, "-m", "orchestrator.cli", "serve", "--config", str(config),
            "--host", "127.0.0.1", "--port", str(port), "--state-dir", state_dir,
        ]  # fmt: skip
        with output.open("wb") as said:  # a session of its own: Ctrl-C must reach us first
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _await_ready(process, output, say)
            yield f"http://127.0.0.1:{port}"
        finally:
            say("stopping the service")
            _stop(process, Path(state_dir))


def _free_port() -> int:
    """Not of the range that outgoing connections take theirs from: one of them could have it before the service."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def _await_ready(process: subprocess.Popen[bytes], output: Path, say: Say) -> None:
    deadline = time.monotonic() + START_SECONDS
    told = ""
    while "ready in" not in (said := output.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise NotReachable(f"the service did not start: {' | '.join(said.strip().splitlines()[-3:])}")
        if said != told:
            told = said
            say(f"starting a service: {said.strip().rpartition(chr(10))[2]}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes], state_dir: Path) -> None:
    """As Ctrl-C does."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        PrivateCluster(state_dir, None).clean()
