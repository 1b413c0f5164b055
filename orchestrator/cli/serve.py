"""Owns ``serve`` and ``check``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from orchestrator.cli.app import app
from orchestrator.cli.common import ConfigOption, JsonOption, bars, err, out, read_config, size
from orchestrator.cluster import require_token
from orchestrator.config import Config
from orchestrator.front import fast_front
from policies.errors import DoesNotFit


@app.command(epilog="Example: orchestrator serve --config my.yaml --port 8080")
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where sessions, logs and secrets are kept.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray cluster instead of starting one.")] = None,
) -> None:
    """Start the whole service and stay until Ctrl-C, which stops all of it."""
    begin = time.monotonic()
    settings = read_config(config, _flags(host, port, state_dir, ray_address))
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    if settings.ray.address is None:
        os.environ.update(require_token(settings.state_dir))
        front = fast_front(settings.state_dir, settings.http.host)
        os.environ.update({**front, **os.environ})  # what the user has said stands
    from orchestrator.serve import Service, prepare_models  # Ray is slow to import: not for the small verbs

    with bars() as progress:
        prepared = prepare_models(settings, progress)
    service = Service(settings)
    out.file = sys.stdout  # ours stays on the console; what Ray prints from now on goes to a file
    with (settings.state_dir / "ray-console.log").open("a") as log, contextlib.redirect_stdout(log):
        with err.status("starting") as status:  # Ctrl-C meanwhile: start() stops what it started
            service.start(prepared, status.update if err.is_terminal else out.print)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed
            signal.signal(number, lambda *_: stop.set())
        try:
            _print_ready(settings, service.url, service.log_path, time.monotonic() - begin)
            while not stop.wait(1.0):
                service.watch(err.print)
        finally:
            with err.status("stopping"):
                service.stop()
            err.print("stopped")


@app.command(epilog="Example: orchestrator check my.yaml && orchestrator serve -c my.yaml")
def check(config: Annotated[Path, typer.Argument(help="YAML file.")], as_json: JsonOption = False) -> None:
    """Read a config, say what it means, and whether each model fits a device."""
    settings = read_config(config)
    largest = max(settings.devices, key=lambda device: device.memory)
    rows: list[dict[str, Any]] = [
        {
            "model": model.name,
            "source": model.source,
            "memory_bytes": int(model.memory),
            "fits": int(model.memory) <= int(largest.memory),
        }
        for model in settings.models
    ]
    total = sum(int(model.memory) for model in settings.models)
    budget = sum(int(device.memory) for device in settings.devices)
    if as_json:
        out.print_json(data={"models": rows, "memory_bytes": total, "budget_bytes": budget})
    else:
        table = Table("MODEL", "SOURCE", "MEMORY", "FITS")
        for row in rows:
            table.add_row(row["model"], row["source"], size(row["memory_bytes"]), "yes" if row["fits"] else "NO")
        out.print(table)
        share = "all of them fit at once" if total <= budget else "they take turns"
        out.print(f"{len(rows)} models want {size(total)} of {size(budget)}: {share}")
    too_big = [row["model"] for row in rows if not row["fits"]]
    if too_big:
        raise DoesNotFit(
            f"{', '.join(too_big)}: larger than the largest device ({largest.name}, {largest.memory} bytes)"
        )


def _flags(host: str | None, port: int | None, state_dir: Path | None, ray_address: str | None) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    http = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    if http:
        flags["http"] = http
    if state_dir is not None:
        flags["state_dir"] = state_dir
    if ray_address is not None:
        flags["ray"] = {"address": ray_address}
    return flags


def _print_ready(config: Config, url: str, log_path: Path, seconds: float) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("URL", f"{url}/v1")
    for tenant in config.tenants:
        if tenant.demo_key:
            kind = "admin" if tenant.admin else tenant.tier.name.lower()
            table.add_row("demo key", f"{tenant.demo_key}  ({tenant.name}, {kind})")
    table.add_row("models", ", ".join(model.name for model in config.models))
    table.add_row("log", str(log_path))
    table.add_row("", f"ready in {seconds:.0f} s; Ctrl-C stops everything")
    out.print(table, highlight=False, soft_wrap=True)
