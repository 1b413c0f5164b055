"""Owns what the verbs share: consoles, options, bars, and the way to the running service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from orchestrator.config import Config, load_config
from policies.errors import ConfigError, NotReachable, OrchestratorError

out = Console()
err = Console(stderr=True)
DEMO_CONFIG = Path(__file__).parents[1] / "demo.yaml"

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; none: the demo.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
UrlOption = Annotated[
    str | None,
    typer.Option(help="The service; none: the one that runs from the state directory.", envvar="ORCHESTRATOR_URL"),
]
KeyOption = Annotated[str | None, typer.Option(help="An admin key.", envvar="ORCHESTRATOR_ADMIN_KEY")]


def read_config(path: Path | None, flags: dict[str, Any] | None = None) -> Config:
    return load_config(path or DEMO_CONFIG, flags)


class bars:
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
                if not err.is_terminal:  # a log file gets a line, once per model
                    out.print(f"preparing {model}", highlight=False)
                tasks[model] = self._progress.add_task(what, total=1.0, model=model)
            self._progress.update(tasks[model], completed=share, description=what)

        return progress

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def admin(method: str, path: str, url: str | None, key: str | None) -> Any:
    """Call the running service; NotReachable (exit code 3) when there is none."""
    text = admin_text(method, path, url, key)
    try:
        return json.loads(text)
    except ValueError as error:
        raise NotReachable(f"what answers at {find_url(url)} is not this service: {error}") from error


def admin_text(method: str, path: str, url: str | None, key: str | None, body: bytes | None = None) -> str:
    """The same for answers that are not JSON, and with a body to send."""
    base = find_url(url)
    headers = {"Authorization": f"Bearer {key or run_file().get('admin_key') or ''}"}
    try:
        response = httpx.request(method, f"{base}{path}", headers=headers, content=body, timeout=60 if body else 15)
    except httpx.HTTPError as error:
        raise NotReachable(f"the service at {base} does not answer: {error}") from error
    if response.is_error:
        try:
            said = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            said = f"{base} answered {response.status_code}"
        raise OrchestratorError(said)
    return response.text


def find_url(url: str | None) -> str:
    """The service to speak to; NotReachable when none is named and none runs here."""
    found = url or run_file().get("url")
    if not found:
        raise NotReachable("no service is running here; start one with 'orchestrator serve', or name it with --url")
    return str(found).rstrip("/")


def run_file() -> dict[str, Any]:
    try:
        config = read_config(None)
        found: dict[str, Any] = json.loads((config.state_dir / "run.json").read_text())
        return found
    except (OSError, ValueError, ConfigError):
        return {}


def size(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
