"""Owns the verbs that look at, and steer, a running service."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from orchestrator.cli.app import app
from orchestrator.cli.common import JsonOption, KeyOption, UrlOption, admin, out, size
from orchestrator.explain import explain as sentences
from orchestrator.explain import prepared

FOLLOW_SECONDS = 1.0
NO_PLAN = ("ready", "loading", "warming", "waking")  # a request would start nothing


@app.command(epilog="Example: orchestrator ps --json | jq .models")
def ps(url: UrlOption = None, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Which model holds memory, and what it is doing."""
    body = admin("GET", "/admin/models", url, key)
    if as_json:
        out.print_json(data=body)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("MODEL", "STATE", "MEMORY", "RESIDUAL", "SESSIONS", "IN-FLIGHT", "LAST-USED", "CAUSE"):
        table.add_column(name, no_wrap=True, overflow="ignore" if name == "MODEL" else "fold")
    for model in body["models"]:
        used = model["last_used"]
        table.add_row(
            model["model"] + _number(model["host"]),
            model["state"] + (" (pinned)" if model["pinned"] else ""),
            size(model["memory_bytes"]),
            size(model["residual_bytes"]),
            str(model.get("stats", {}).get("sessions", 0)),
            str(model["in_flight"]),
            _ago(time.time() - used) if used else "never",
            "below" if model["cause"] else "",
        )
    Console(width=max(out.width, PS_WIDTH)).print(table)
    for model in body["models"]:
        if model["cause"]:
            out.print(f"{model['model']}: {model['cause']}", highlight=False, soft_wrap=True)
    for book in body["devices"]:
        held = f"{size(book['held_bytes'])} of {size(book['budget_bytes'])} held{prepared(book)}"
        out.print(f"{book['device']}: {held}", highlight=False)


@app.command(epilog="Example: orchestrator events --model gemma-3-270m")
def events(
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 30,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """The last transitions and decisions, each with the numbers it was made on; with --json and -f, one a line."""

    def ask(limit: int, after: float) -> Any:
        query = f"?limit={limit}&after={after!r}" + (f"&model={quote(model)}" if model else "")
        return admin("GET", f"/admin/events{query}", url, key)

    body = ask(limit, 0.0)
    if as_json and not follow:
        out.print_json(data=body)
        return
    with contextlib.suppress(KeyboardInterrupt):
        after = _show(body["events"], 0.0, as_json)
        while follow:
            time.sleep(FOLLOW_SECONDS)
            after = _show(ask(1000, after)["events"], after, as_json)


def _show(found: Sequence[dict[str, Any]], after: float, as_json: bool) -> float:
    """Print events; when the last one was."""
    for event in found:
        after = event["at"]
        if as_json:
            print(json.dumps(event), flush=True)
            continue
        moved = f"{event['old']} → {event['new']}" if event["old"] != event["new"] else event["kind"]
        at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        out.print(f"{at}  {event['model']}  {moved}  {event['reason']}", highlight=False, soft_wrap=True)
    return after


@app.command(epilog="Example: orchestrator explain gemma-3-270m")
def explain(
    model: Annotated[str, typer.Argument(help="A model's name.")],
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Why a model is in its state, who holds the memory, and what a request for it would cause now."""
    pool = admin("GET", "/admin/models", url, key)
    planned = admin("GET", f"/admin/models/{quote(model)}/plan", url, key)
    model, plan = planned["model"], planned["actions"]  # its own name, of an alias
    mine = [entry for entry in pool["models"] if entry["model"] == model]
    if any(entry["state"] in NO_PLAN for entry in mine):
        plan = []
    found = admin("GET", f"/admin/events?limit=200&model={quote(model)}", url, key)["events"]
    if as_json:
        out.print_json(data={"hosts": mine, "devices": pool["devices"], "plan": plan, "events": found})
        return
    for line in sentences(model, pool["models"], pool["devices"], found, plan, time.time()):
        out.print(line, highlight=False, soft_wrap=True)


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _number(host: str) -> str:
    """`` #2`` for a model's second host."""
    number = int(host.rsplit(":", 1)[1])
    return f" #{number + 1}" if number else ""


PS_WIDTH = 120  # characters; a narrower terminal wraps lines, which is better than words cut off


VERBS = {
    "load": "Make a model ready without a request.",
    "wake": "Make a sleeping model ready without a request.",
    "sleep": "Drain a model and put it to sleep: its process stays, its memory goes.",
    "unload": "Drain a model and end its process.",
    "pin": "Keep a model from being evicted for another.",
    "unpin": "Let a model be evicted again.",
}


def _ask(verb: str) -> Callable[..., None]:
    def command(model: str, url: UrlOption = None, key: KeyOption = None) -> None:
        body = admin("POST", f"/admin/models/{model}/{verb}", url, key)
        out.print(f"{body['model']}: {body['state']}")

    command.__doc__ = VERBS[verb]
    return command


for _verb in VERBS:
    app.command(name=_verb)(_ask(_verb))
