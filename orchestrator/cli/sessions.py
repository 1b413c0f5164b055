"""Owns ``sessions``: what an operator sees of the stored conversations."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from orchestrator.cli.app import app
from orchestrator.cli.common import JsonOption, KeyOption, UrlOption, admin, out

sessions = typer.Typer(help="List, show and remove stored conversations.", no_args_is_help=True)
app.add_typer(sessions, name="sessions")
TenantArgument = Annotated[str, typer.Argument(help="A tenant of the config.")]


@sessions.command("ls", epilog="Example: orchestrator sessions ls acme")
def ls(
    tenant: TenantArgument,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 50,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """A tenant's sessions, last used first."""
    query = f"?tenant={tenant}&limit={limit}" + (f"&cursor={cursor}" if cursor else "")
    page = admin("GET", f"/admin/sessions{query}", url, key)
    if as_json:
        out.print_json(data=page)
        return
    table = Table("SESSION", "TURNS", "ITEMS", "LAST-USED", "EXPIRES-IN", "RUNNING")
    for session in page["sessions"]:
        table.add_row(
            session["session_id"],
            str(session["version"]),
            str(session["items"]),
            f"{time.time() - session['updated']:.0f} s ago",
            f"{session['expires_in_seconds'] / 3600:.1f} h",
            session["running_turn_id"] or "",
        )
    out.print(table)
    if page["cursor"]:
        out.print(f"more: --cursor {page['cursor']}")


@sessions.command("show", epilog="Example: orchestrator sessions show acme tour")
def show(
    tenant: TenantArgument,
    session_id: str,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest items.")] = 50,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """A session's newest items."""
    body = admin("GET", f"/admin/sessions/{tenant}/{session_id}?limit={limit}", url, key)
    if as_json:
        out.print_json(data=body)
        return
    out.print(f"{body['version']} turns, {body['items']} items, {body['incomplete']} attempts that were not committed")
    for item in body["last_items"]:
        by = f" ({item['model']})" if item["model"] else ""
        out.print(f"{item['role']}{by}: {item['content']}", highlight=False, markup=False)


@sessions.command("rm", epilog="Example: orchestrator sessions rm acme tour")
def rm(tenant: TenantArgument, session_id: str, url: UrlOption = None, key: KeyOption = None) -> None:
    """Delete a session; a turn that runs on it fails."""
    admin("DELETE", f"/admin/sessions/{tenant}/{session_id}", url, key)
    out.print(f"deleted {tenant}/{session_id}")
