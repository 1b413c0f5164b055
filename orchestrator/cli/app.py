"""Owns the one typer application that every verb registers with."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="orchestrator",
    help="Many models, many tenants, too little memory: serve them through one OpenAI-compatible endpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
