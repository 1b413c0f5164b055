"""Owns ``doctor``: what this machine has and lacks, one line each, with the fix."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import httpx
import psutil
from rich.markup import escape

from engine import code_files
from orchestrator import holders
from orchestrator.cli.app import app
from orchestrator.cli.common import ConfigOption, JsonOption, KeyOption, UrlOption, admin, out, read_config, run_file
from orchestrator.cluster import check_port
from orchestrator.config import Config
from orchestrator.contexts import parse
from orchestrator.diagnosis import conclude, summary
from policies.errors import NotReachable, OrchestratorError
from session_store.client import check_reachable
from session_store.embedded import find_server

WANTED_DISK_BYTES = 5 * 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    good: bool
    said: str
    fix: str = ""
    warning: bool = False  # not good, and not a reason for another exit code: traffic made it


MARKS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "BAD": "[red]BAD [/red]"}


@app.command(epilog="Example: orchestrator doctor --config my.yaml")
def doctor(
    config: ConfigOption = None, url: UrlOption = None, key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """Look at Python, torch, threads, memory and its holders, Redis, disk, ports, cache; exit code 1 if any is wrong.

    Where a service runs, also at what its engines do: what is concluded from that is a warning.
    """
    settings = read_config(config)
    findings = [*_findings(settings), *_contexts(url, key)]
    if as_json:
        out.print_json(data={"findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            mark = MARKS["ok" if finding.good else "warn" if finding.warning else "BAD"]
            fix = "" if finding.good else f"  → {finding.fix}"
            out.print(f"{mark} {finding.name}: {escape(finding.said + fix)}", highlight=False, soft_wrap=True)
    bad = [finding.name for finding in findings if not finding.good and not finding.warning]
    if bad:
        raise OrchestratorError(f"{len(bad)} of {len(findings)} are wrong: {', '.join(bad)}")


def _findings(config: Config) -> Iterator[Finding]:
    version = platform.python_version_tuple()
    yield Finding(
        "python", (int(version[0]), int(version[1])) >= (3, 11), platform.python_version(), "install Python 3.11"
    )
    for package in ("torch", "transformers", "ray", "triton"):
        yield _package(package)
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", cores >= 2, f"{cores} usable", "give the service at least 2 cores")
    yield _compiler()
    available, ours, budget = _sizes(config)
    yield _memory(available, ours, budget)
    yield from _holders(config, available, budget)
    yield _disk(config)
    yield _redis(config)
    yield _port(config)
    yield _cache(config)


def _compiler() -> Finding:
    found = code_files.compiler()
    fix = "install g++: compiled layers make a decoding step on the CPU up to a sixth shorter"
    return Finding(
        "compiler", found is not None, found or "none: layers stay plain, and torch attends", fix, warning=True
    )


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", "make install")


def _sizes(config: Config) -> tuple[int, int, int]:
    """Bytes: available to a service here, how many of them a running one holds, and what the CPU devices may hold."""
    service = run_file().get("pid")
    ours = _held() if service and psutil.pid_exists(service) else 0
    budget = sum(int(device.memory) for device in config.devices if device.kind == "cpu")
    return psutil.virtual_memory().available + ours, ours, budget


def _memory(available: int, ours: int, budget: int) -> Finding:
    held = f" ({ours / 2**20:,.0f} of it held by the running service)" if ours else ""
    said = f"{available / 2**20:,.0f} MiB available{held}, the config's CPU devices may hold {budget / 2**20:,.0f} MiB"
    return Finding("memory", available >= budget, said, "lower devices[].memory")


def _held() -> int:
    """Bytes of the hosts that a running service says it has."""
    try:
        devices = admin("GET", "/admin/models", None, None)["devices"]
    except OrchestratorError:
        return 0
    return sum(int(device["held_bytes"]) for device in devices)


def _holders(config: Config, available: int, budget: int) -> Iterator[Finding]:
    """Processes that hold what is ours by now, or what we count on."""
    picture, found = holders.settled(lambda: holders.look(config.state_dir, available, budget))
    for one in found:
        yield Finding("holders", False, one.said, one.fix, one.warning)
    if not found:
        yield Finding("holders", True, holders.summary(picture))


def _disk(config: Config) -> Finding:
    place = next(p for p in (config.cache_dir, *config.cache_dir.parents) if p.exists())
    free = shutil.disk_usage(place).free
    return Finding("disk", free >= WANTED_DISK_BYTES, f"{free / 2**30:.0f} GiB free at {place}", "free 5 GiB there")


def _redis(config: Config) -> Finding:
    if config.redis.url is not None:
        url = config.redis.url
        return _tried("redis", lambda: check_reachable(url), "reachable", "start it, or correct redis.url")
    return _tried("redis", find_server, "a private server can be started", "make install, or apt install redis-server")


def _port(config: Config) -> Finding:
    running = run_file().get("url")
    if running == f"http://{config.http.host}:{config.http.port}":
        try:
            httpx.get(f"{running}/health", timeout=3).raise_for_status()
            return Finding("port", True, f"our service answers at {running}")
        except httpx.HTTPError:
            pass  # a leftover run file; the port itself tells
    host, port = config.http.host, config.http.port
    return _tried("port", lambda: check_port(host, port), f"{port} on {host} is free", "choose another with --port")


def _cache(config: Config) -> Finding:
    demos = [model.source.removeprefix("demo:") for model in config.models if model.source.startswith("demo:")]
    ready = [name for name in demos if (config.cache_dir / "models" / name).is_dir()]
    return Finding("cache", True, f"{len(ready)} of {len(demos)} demo models are prepared in {config.cache_dir}")


def _tried(name: str, attempt: Callable[[], object], said: str, fix: str) -> Finding:
    try:
        attempt()
    except OrchestratorError as error:
        return Finding(name, False, error.message, fix)
    return Finding(name, True, said)


def _contexts(url: str | None, key: str | None) -> Iterator[Finding]:
    """What the engines of the running service tell, if one runs and we may ask it."""
    if not (key or run_file().get("admin_key")):
        yield Finding("contexts", True, "not looked at: no service runs here, or no admin key is known")
        return
    try:
        hosts = parse(admin("GET", "/admin/contexts", url, key))
    except NotReachable as error:
        yield Finding("contexts", True, f"not looked at: {error.message}")
        return
    except (OrchestratorError, ValueError) as error:
        yield Finding("contexts", False, str(error), "name an admin key with --key", warning=True)
        return
    found = conclude(hosts)
    for one in found:
        yield Finding("contexts", False, f"{one.host}: {one.said}", one.fix, warning=True)
    if not found:
        yield Finding("contexts", True, summary(hosts))
