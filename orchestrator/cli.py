"""Owns the command line. Exit codes: 0 ok, 2 bad usage or config, 3 service not reachable, 4 does not fit, 1 else."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from orchestrator.config import Config, load_config
from policies.errors import ConfigError, DoesNotFit, NotReachable, OrchestratorError

app = typer.Typer(
    name="orchestrator",
    help="Many models, many tenants, too little memory: serve them through one OpenAI-compatible endpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out = Console()
err = Console(stderr=True)
DEMO_CONFIG = Path(__file__).with_name("demo.yaml")
DEMO_SOURCE = "demo:smollm2-135m-instruct"

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; none: the demo.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
UrlOption = Annotated[
    str | None,
    typer.Option(help="The service; none: the one that runs from the state directory.", envvar="ORCHESTRATOR_URL"),
]
KeyOption = Annotated[str | None, typer.Option(help="An admin key.", envvar="ORCHESTRATOR_ADMIN_KEY")]


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
    settings = _load(config, _flags(host, port, state_dir, ray_address))
    from orchestrator.serve import Service, prepare_models  # Ray is slow to import: not for the small verbs

    with _bars() as progress:
        prepared = prepare_models(settings, progress)
    service = Service(settings)
    with err.status("starting") as status:  # Ctrl-C meanwhile: KeyboardInterrupt, and start() stops what it started
        service.start(prepared, status.update)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        _print_ready(settings, service.url, service.log_path, time.monotonic() - begin)
        while not stop.wait(1.0):
            pass
    finally:
        with err.status("stopping"):
            service.stop()
        err.print("stopped")


@app.command(epilog="Example: orchestrator check my.yaml && orchestrator serve -c my.yaml")
def check(config: Annotated[Path, typer.Argument(help="YAML file.")], as_json: JsonOption = False) -> None:
    """Read a config, say what it means, and whether each model fits a device."""
    settings = _load(config, {})
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
            table.add_row(row["model"], row["source"], _size(row["memory_bytes"]), "yes" if row["fits"] else "NO")
        out.print(table)
        share = "all of them fit at once" if total <= budget else "they take turns"
        out.print(f"{len(rows)} models want {_size(total)} of {_size(budget)}: {share}")
    too_big = [row["model"] for row in rows if not row["fits"]]
    if too_big:
        raise DoesNotFit(
            f"{', '.join(too_big)}: larger than the largest device ({largest.name}, {largest.memory} bytes)"
        )


@app.command(epilog="Example: orchestrator ps --json | jq .models")
def ps(url: UrlOption = None, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Which model holds memory, and what it is doing."""
    body = _admin("GET", "/admin/models", url, key)
    if as_json:
        out.print_json(data=body)
        return
    table = Table("MODEL", "STATE", "MEMORY", "RESIDUAL", "SESSIONS", "IN-FLIGHT", "LAST-USED", "CAUSE")
    for model in body["models"]:
        used = model["last_used"]
        table.add_row(
            model["model"],
            model["state"],
            _size(model["memory_bytes"]),
            _size(model["residual_bytes"]),
            str(model.get("stats", {}).get("sessions", 0)),
            str(model["in_flight"]),
            f"{time.time() - used:.0f} s ago" if used else "never",
            model["cause"] or "",
        )
    out.print(table)
    for book in body["devices"]:
        out.print(f"{book['device']}: {_size(book['held_bytes'])} of {_size(book['budget_bytes'])} held")


@app.command(epilog="Example: orchestrator events --model gemma-3-270m")
def events(
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 30,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """The last transitions and decisions, each with the numbers it was made on."""
    query = f"?limit={limit}" + (f"&model={model}" if model else "")
    body = _admin("GET", f"/admin/events{query}", url, key)
    if as_json:
        out.print_json(data=body)
        return
    for event in body["events"]:
        moved = f"{event['old']} → {event['new']}" if event["old"] != event["new"] else event["kind"]
        at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        out.print(f"{at}  {event['model']}  {moved}  {event['reason']}", highlight=False)


bench_app = typer.Typer(help="Measure, both sides in one run, as ratios.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.command(name="swap", epilog="Example: orchestrator bench swap --json > swap.json")
def bench_swap(
    source: Annotated[str, typer.Option("--model", help="A model source, as in a config.")] = DEMO_SOURCE,
    as_json: JsonOption = False,
) -> None:
    """What sleeping, waking and loading a model cost."""
    from model_pool import catalog
    from orchestrator.bench import report, swap

    with _bars() as progress:
        path = catalog.resolve(source, _load(None, {}).cache_dir, lambda what, share: progress(source, what, share))
    if path is None:
        raise ConfigError("the fake engine has nothing to measure; name a real model")
    with err.status("measuring"):
        sections = swap.run(path)
    if as_json:
        out.print_json(data=report.report("swap", sections))
    else:
        report.print_table(out, sections)


def _ask(verb: str) -> Callable[..., None]:
    def command(model: str, url: UrlOption = None, key: KeyOption = None) -> None:
        body = _admin("POST", f"/admin/models/{model}/{verb}", url, key)
        out.print(f"{body['model']}: {body['state']}")

    command.__doc__ = f"Ask for a model to be {'put to sleep' if verb == 'sleep' else verb + 'ed'}."
    return command


for _verb in ("load", "sleep", "unload"):
    app.command(name=_verb)(_ask(_verb))


def main() -> None:
    """Entry point: our own errors end in one line and the code of their kind."""
    try:
        app()
    except OrchestratorError as error:
        err.print(f"[red]error:[/red] {error.message}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def _load(path: Path | None, flags: dict[str, Any]) -> Config:
    return load_config(path or DEMO_CONFIG, flags)


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


class _bars:
    """Progress bars on stderr, one per model that takes work; nothing when all are ready."""

    def __enter__(self) -> Callable[[str, str, float], None]:
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.fields[model]}"), BarColumn(), TextColumn("{task.description}"),
            TimeElapsedColumn(), console=err, transient=True,
        )  # fmt: skip
        self._progress.start()
        tasks: dict[str, Any] = {}

        def progress(model: str, what: str, share: float) -> None:
            if model not in tasks:
                if share >= 1:
                    return
                tasks[model] = self._progress.add_task(what, total=1.0, model=model)
            self._progress.update(tasks[model], completed=share, description=what)

        return progress

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


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


def _admin(method: str, path: str, url: str | None, key: str | None) -> Any:
    """Call the running service; NotReachable (exit code 3) when there is none."""
    found = _run_file()
    base = url or found.get("url")
    if base is None:
        raise NotReachable("no service is running here; start one with 'orchestrator serve', or name it with --url")
    headers = {"Authorization": f"Bearer {key or found.get('admin_key') or ''}"}
    try:
        response = httpx.request(method, f"{base.rstrip('/')}{path}", headers=headers, timeout=15)
        body = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise NotReachable(f"the service at {base} does not answer: {error}") from error
    if response.is_error:
        said = body.get("error", {}) if isinstance(body, dict) else {}
        raise OrchestratorError(said.get("message") or f"{base} answered {response.status_code}")
    return body


def _run_file() -> dict[str, Any]:
    try:
        config = _load(None, {})
        found: dict[str, Any] = json.loads((config.state_dir / "run.json").read_text())
        return found
    except (OSError, ValueError, ConfigError):
        return {}


def _size(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


if __name__ == "__main__":
    main()
