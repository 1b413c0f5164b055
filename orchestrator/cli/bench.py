"""Owns ``bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.app import app
from orchestrator.cli.common import JsonOption, bars, err, out, read_config
from policies.errors import ConfigError

DEMO_SOURCE = "demo:smollm2-135m-instruct"

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

    with bars() as progress:
        path = catalog.resolve(source, read_config(None).cache_dir, lambda what, share: progress(source, what, share))
    if path is None:
        raise ConfigError("the fake engine has nothing to measure; name a real model")
    with err.status("measuring"):
        sections = swap.run(path)
    if as_json:
        out.print_json(data=report.report("swap", sections))
    else:
        report.print_table(out, sections)
