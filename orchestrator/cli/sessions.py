"""Owns ``sessions``: what an operator sees of the stored conversations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import orjson
import typer
from rich.table import Table

from orchestrator.cli.app import app
from orchestrator.cli.common import JsonOption, KeyOption, UrlOption, admin, admin_text, out

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
    table = Table("SESSION", "KIND", "CHANGES", "ITEMS", "LAST-USED", "EXPIRES-IN", "RUNNING")
    for session in page["sessions"]:
        table.add_row(
            session["session_id"],
            session["kind"],
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
    body = admin("GET", f"/admin/sessions/{tenant}/{_quoted(session_id)}?limit={limit}", url, key)
    if as_json:
        out.print_json(data=body)
        return
    out.print(
        f"{body['version']} changes, {body['items']} items, {body['incomplete']} attempts that were not committed"
    )
    for item in body["last_items"]:
        out.print(_line(item), highlight=False, markup=False)


@sessions.command("export", epilog="Example: orchestrator sessions export acme tour > tour.jsonl")
def export(tenant: TenantArgument, session_id: str, url: UrlOption = None, key: KeyOption = None) -> None:
    """Write a session to standard output: JSON lines, the session first, then its items."""
    typer.echo(admin_text("GET", f"/admin/sessions/{tenant}/{_quoted(session_id)}/export", url, key), nl=False)


@sessions.command("import", epilog="Example: orchestrator sessions import acme tour.jsonl")
def import_(
    tenant: TenantArgument,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What export has written.")],
    name: Annotated[str | None, typer.Option(help="Another name than it had.")] = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Make an exported session again. One of that name must not be there."""
    query = f"?session_id={quote(name, safe='')}" if name else ""
    said = admin_text("POST", f"/admin/sessions/{tenant}/import{query}", url, key, file.read_bytes())
    made = orjson.loads(said)
    out.print(f"made {tenant}/{made['session_id']} with {made['items']} items")


@sessions.command("rm", epilog="Example: orchestrator sessions rm acme tour")
def rm(tenant: TenantArgument, session_id: str, url: UrlOption = None, key: KeyOption = None) -> None:
    """Delete a session; a turn that runs on it fails."""
    admin("DELETE", f"/admin/sessions/{tenant}/{_quoted(session_id)}", url, key)
    out.print(f"deleted {tenant}/{session_id}")


def _quoted(session_id: str) -> str:
    return quote(session_id, safe="")


def _line(item: dict[str, Any]) -> str:
    by = f" ({item['model']})" if item["model"] else ""
    match item["type"]:
        case "message":
            return f"{item['role']}{by}: {''.join(part.get('text', '') for part in item['content'])}"
        case "function_call":
            return f"calls{by}: {item['name']}({item['arguments']})"
        case "function_call_output":
            return f"output of {item['call_id']}: {item['output']}"
        case kind:
            return f"{kind}{by}"
