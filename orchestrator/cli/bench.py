"""Owns ``bench swap``, ``bench engine`` and ``bench sessions``; ``bench matrix`` has a file of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from orchestrator.bench import report
from orchestrator.bench.report import Section
from orchestrator.cli.app import app
from orchestrator.cli.common import JsonOption, bars, err, out, read_config
from policies.errors import ConfigError

DEMO_SOURCE = "demo:smollm2-135m-instruct"
OTHER_SOURCE = "demo:gemma-3-270m"

bench_app = typer.Typer(help="Measure what the service costs.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

SourceOption = Annotated[str, typer.Option("--model", help="A model source, as in a config.")]
OtherOption = Annotated[str, typer.Option("--other", help="The model that takes turns with it.")]
PairsOption = Annotated[int, typer.Option(min=1, help="How often both sides are measured; medians are reported.")]


@bench_app.command(name="swap", epilog="Example: orchestrator bench swap --json > swap.json")
def bench_swap(
    source: SourceOption = DEMO_SOURCE, other: OtherOption = OTHER_SOURCE, as_json: JsonOption = False
) -> None:
    """What sleeping, waking, switching and loading cost: both sides in one run, as ratios. Takes eight minutes."""
    from orchestrator.bench import swap

    path, other_path = _prepared(source), _prepared(other)
    with err.status("measuring") as status:
        sections = swap.run(path, other_path, lambda what: status.update(escape(what)))
    _show("swap", sections, as_json)


@bench_app.command(name="engine", epilog="Example: orchestrator bench engine --json > engine.json")
def bench_engine(source: SourceOption = DEMO_SOURCE, pairs: PairsOption = 3, as_json: JsonOption = False) -> None:
    """Our engine against its peers, bare and through HTTP: both sides in one run, as ratios. Takes ten minutes."""
    from orchestrator.bench import contexts, engine, floors, http, loading, scheduling

    path = _prepared(source)
    with err.status("measuring") as status, tempfile.TemporaryDirectory(prefix="orchestrator-bench-") as directory:
        shared = Path(directory)
        status.update("loads: measuring, reordering, compiling layers")
        loads = loading.run(path, shared)
        sections, peer = engine.run(path, shared, lambda what: status.update(escape(what)), pairs=pairs)
        status.update("single steps against their matrix products")
        sections += floors.run(path, shared) + loads
        status.update("contexts: second turn, swap, checkpoint")
        sections += contexts.run(path)
        status.update("scheduling: a step's cost, a long prompt beside streams")
        sections += scheduling.run(path)
        sections += http.run(path, shared, peer, lambda what: status.update(escape(what)), pairs=pairs)
    _show("engine", sections, as_json)


@bench_app.command(name="sessions", epilog="Example: orchestrator bench sessions --json > sessions.json")
def bench_sessions(
    sessions: Annotated[int, typer.Option(min=100, help="How many sessions are made and listed.")] = 100_000,
    as_json: JsonOption = False,
) -> None:
    """What a turn costs in the session store, on a private Redis of its own. Takes three minutes."""
    from orchestrator.bench import sessions as measuring

    with err.status("measuring") as status:
        found = measuring.run(lambda what: status.update(escape(what)), sessions)
    _show("sessions", found, as_json)


def _prepared(source: str) -> Path:
    from model_pool import catalog

    with bars() as progress:
        path = catalog.resolve(source, read_config(None).cache_dir, lambda what, share: progress(source, what, share))
    if path is None:
        raise ConfigError("the fake engine has nothing to measure; name a real model")
    return path


def _show(bench: str, sections: list[Section], as_json: bool) -> None:
    if as_json:
        out.print_json(data=report.report(bench, sections))
    else:
        report.print_table(out, sections)
