"""Owns ``bench matrix``: what a user may say, and what is shown of the result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from orchestrator.bench import drive, heatmap, matrix, report
from orchestrator.bench.matrix import Cell, CellResult, Change, Grid
from orchestrator.bench.service import own_service
from orchestrator.cli.bench import bench_app
from orchestrator.cli.chat import ApiKeyOption
from orchestrator.cli.common import DEMO_CONFIG, ConfigOption, JsonOption, err, out, read_config
from orchestrator.config import Config, hash_key
from policies.errors import ConfigError, OrchestratorError

TABLE_WIDTH = 100  # characters

# -- what a user may say -----------------------------------------------------------------------

ServiceOption = Annotated[
    str | None, typer.Option("--url", help="A running service; none: one of its own, stopped afterwards.")
]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(help="Removes the sessions; none: the config's demo admin.", envvar="ORCHESTRATOR_ADMIN_KEY"),
]
ModelOption = Annotated[str | None, typer.Option(help="One model; none: each of the service, one grid after another.")]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="A small grid, on the first model only; a few minutes on two cores.")
]
ConcurrencyOption = Annotated[str | None, typer.Option(help="Sessions at once, as in 1,4,8.")]
LengthsOption = Annotated[str | None, typer.Option(help="Tokens of the first prompt, about, as in 128,512.")]
TurnsOption = Annotated[str | None, typer.Option(help="Turns of each session, as in 1,2,4.")]
MaxTokensOption = Annotated[int | None, typer.Option(min=1, help="Tokens of every answer.")]
CellSecondsOption = Annotated[
    float | None, typer.Option(min=0, help="A cell is repeated with new sessions until it took so long.")
]
SaveOption = Annotated[Path | None, typer.Option(help="Write the JSON result here.")]
CompareOption = Annotated[Path | None, typer.Option(help="Print new ÷ saved for each cell of a saved result.")]
FailOption = Annotated[
    float | None, typer.Option(min=1, help="With --compare: exit code 1 when a cell is more than so many times worse.")
]
PictureOption = Annotated[Path, typer.Option(help="The heat map; of several models, one file each.")]


@bench_app.command(name="matrix", epilog="Example: orchestrator bench matrix --quick --save before.json")
def bench_matrix(
    config: ConfigOption = None,
    url: ServiceOption = None,
    key: ApiKeyOption = None,
    admin_key: AdminKeyOption = None,
    model: ModelOption = None,
    quick: QuickOption = False,
    concurrency: ConcurrencyOption = None,
    lengths: LengthsOption = None,
    turns: TurnsOption = None,
    max_tokens: MaxTokensOption = None,
    cell_seconds: CellSecondsOption = None,
    save: SaveOption = None,
    compare: CompareOption = None,
    fail_above: FailOption = None,
    picture: PictureOption = Path("matrix.png"),
    as_json: JsonOption = False,
) -> None:
    """Latency, speed and reuse over concurrency × prompt length × turns, through HTTP as a client sees them.

    With --url, --config is that service's config: without the key's tenant in it, the sessions cannot be removed.
    KV use is read about once a second, so a short cell has none. The client shares the machine's cores.
    """
    settings = read_config(config)
    grid = _grid(matrix.QUICK if quick else matrix.FULL, (concurrency, lengths, turns), max_tokens, cell_seconds)
    saved = _baseline(compare, fail_above, grid)
    _check_places(picture, save)
    access = _access(settings, url, key, admin_key)
    seed = secrets.token_hex(4)
    with contextlib.ExitStack() as stack:
        if url is None:
            access = replace(access, url=stack.enter_context(_service(config or DEMO_CONFIG, settings, model)))
        on_cell = stack.enter_context(_cell_bars(grid))
        outcome = asyncio.run(drive.run(access, grid, model, quick, seed, on_cell))
    changes = matrix.compare(outcome.results, saved)
    result = _result(grid, seed, outcome, changes)
    _keep(result, outcome.results, save, picture)
    _show(result, outcome.results, changes, as_json)
    _end(outcome, changes, compare, fail_above)


def _grid(
    base: Grid, lists: tuple[str | None, str | None, str | None], max_tokens: int | None, cell_seconds: float | None
) -> Grid:
    concurrency, lengths, turns = lists
    return Grid(
        matrix.numbers(concurrency, "--concurrency") if concurrency is not None else base.concurrency,
        matrix.numbers(lengths, "--lengths") if lengths is not None else base.lengths_tokens,
        matrix.numbers(turns, "--turns") if turns is not None else base.turns,
        max_tokens or base.max_tokens,
        base.cell_seconds if cell_seconds is None else cell_seconds,
    )


def _baseline(path: Path | None, fail_above: float | None, grid: Grid) -> list[CellResult]:
    """The saved cells, of which at least one is in the grid: found out before minutes are spent."""
    if path is None:
        if fail_above is not None:
            raise ConfigError(f"--fail-above {fail_above:g} needs --compare FILE")
        return []
    saved = matrix.read_saved(path, grid.max_tokens)
    if not {each.cell for each in saved} & set(grid.cells()):
        raise ConfigError(f"{path} has no cell of this grid: nothing to compare")
    return saved


def _check_places(*paths: Path | None) -> None:
    """That the results can be written, the picture's drawing included: found out before minutes are spent."""
    if not heatmap.can_draw():
        raise ConfigError("the picture needs matplotlib: pip install 'context-orchestrator[bench]'")
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no directory {path.absolute().parent}")


def _access(settings: Config, url: str | None, key: str | None, admin_key: str | None) -> drive.Access:
    """Keys and tenant as far as the config says them."""
    demo = {bool(tenant.admin): tenant.demo_key for tenant in reversed(settings.tenants) if tenant.demo_key}
    key = key or demo.get(False)
    if key is None:
        raise ConfigError("no API key: give --key or ORCHESTRATOR_API_KEY")
    tenant = next((each.name for each in settings.tenants if hash_key(key) in each.key_hashes), None)
    if url is None and tenant is None:
        raise ConfigError(
            "the key is of no tenant of the config; give another with --key, or name its service with --url"
        )
    return drive.Access((url or "").rstrip("/"), key, tenant, admin_key or demo.get(True))


@contextlib.contextmanager
def _service(config: Path, settings: Config, model: str | None) -> Iterator[str]:
    """The URL of a service of our own."""
    if settings.redis.url is not None or settings.ray.address is not None:
        raise ConfigError(f"{config} names a running Redis or Ray: start its service and name it with --url")
    names = [each.name for each in settings.models]
    if model is not None and model not in names:
        raise ConfigError(f"model {model!r} is not one of {', '.join(names)}")
    with err.status("starting a service") as status, contextlib.ExitStack() as stack:
        url = stack.enter_context(own_service(config, lambda what: status.update(escape(what))))
        status.stop()  # the cells have bars of their own
        yield url
        status.start()


# -- what a user sees --------------------------------------------------------------------------


@contextlib.contextmanager
def _cell_bars(grid: Grid) -> Iterator[drive.OnCell]:
    """On stderr: a bar per model that advances by cells; where it is no terminal, a line per cell that has ended."""
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.fields[model]}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}

    def on_cell(model: str, cell: Cell, result: CellResult | None) -> None:
        if model not in tasks:
            tasks[model] = progress.add_task("", total=len(list(grid.cells())), model=model)
        if result is None:
            progress.update(tasks[model], description=str(cell))
            return
        progress.advance(tasks[model])
        if not err.is_terminal:
            speed = f"{result.tokens_per_second:.1f} tokens/s" if result.tokens_per_second else result.status
            err.print(f"{model}: {cell}: {speed}", highlight=False, soft_wrap=True)

    with progress if err.is_terminal else contextlib.nullcontext():
        yield on_cell


def _result(grid: Grid, seed: str, outcome: drive.Outcome, changes: list[Change]) -> dict[str, Any]:
    return {
        **report.header("matrix"),
        "date": time.strftime("%Y-%m-%d"),
        "seed": seed,
        "grid": asdict(grid),
        "cells": [asdict(each) for each in outcome.results],
        "not_measured": outcome.failed,
        "changes": [asdict(each) for each in changes],
    }


def _keep(result: dict[str, Any], results: list[CellResult], save: Path | None, picture: Path) -> None:
    if save is not None:
        save.write_text(json.dumps(result, indent=1) + "\n")
    models = _by_model(results)
    subtitle = f"{result['date']}, max_tokens {result['grid']['max_tokens']}, commit {result['commit']}"
    for model, cells in models.items():
        path = picture if len(models) == 1 else picture.with_stem(f"{picture.stem}-{model}")
        heatmap.draw(path, cells, f"{subtitle}\n{result['machine']}")
        err.print(f"picture: {path}", highlight=False, markup=False, soft_wrap=True)


def _show(result: dict[str, Any], results: list[CellResult], changes: list[Change], as_json: bool) -> None:
    if as_json:
        out.print_json(data=result)
        return
    wide = Console(width=max(out.width, TABLE_WIDTH))  # a narrower terminal wraps lines: better than cells cut off
    for cells in _by_model(results).values():
        wide.print(matrix.table(cells))
    if changes:
        wide.print(matrix.change_table(changes))
    out.print(f"commit {result['commit']}; {result['machine']}", highlight=False, soft_wrap=True)


def _by_model(results: list[CellResult]) -> dict[str, list[CellResult]]:
    models: dict[str, list[CellResult]] = {}
    for each in results:
        models.setdefault(each.model, []).append(each)
    return models


def _end(outcome: drive.Outcome, changes: list[Change], compared: Path | None, fail_above: float | None) -> None:
    """What is left to say, and the exit code."""
    if outcome.left_sessions:
        err.print(f"{outcome.left_sessions} sessions could not be removed; they expire (see --config, --admin-key)")
    if outcome.failed:
        raise OrchestratorError("not measured: " + "; ".join(outcome.failed.values()))
    if compared is not None and not changes:
        raise OrchestratorError(f"{compared} has no cell of these models: nothing was compared")
    worst = max(changes, key=lambda each: each.worse, default=None)
    if fail_above is not None and worst is not None and worst.worse > fail_above:
        cell = f"{worst.model}, {Cell(worst.concurrency, worst.length_tokens, worst.turns)}"
        raise OrchestratorError(
            f"{cell}: {worst.note or f'{worst.worse:.2f} times worse'}, --fail-above {fail_above:g}"
        )
