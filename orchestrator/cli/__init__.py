"""Owns the command line. Exit codes: 0 ok, 2 bad usage or config, 3 service not reachable, 4 does not fit, 1 else."""

from __future__ import annotations

import sys

from rich.markup import escape

from orchestrator.cli import bench, bench_matrix, chat, contexts, doctor, operate, serve, sessions
from orchestrator.cli.app import app
from orchestrator.cli.common import err
from policies.errors import OrchestratorError

__all__ = ["bench", "bench_matrix", "chat", "contexts", "doctor", "main", "operate", "serve", "sessions"]


def main() -> None:
    """Entry point: our own errors end in one line and the code of their kind."""
    try:
        app()
    except OrchestratorError as error:
        err.print(f"[red]error:[/red] {escape(error.message)}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
