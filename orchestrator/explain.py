"""Owns the sentences that say why a model is where it is, and what would happen if it was asked for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from model_pool.prepared import MODEL as PREPARED

MIB = 2**20


def explain(name: str, models: Sequence[dict[str, Any]], devices: Sequence[dict[str, Any]],
            events: Sequence[dict[str, Any]], plan: Sequence[dict[str, Any]], now: float) -> list[str]:  # fmt: skip
    """One line per fact.

    Args:
        models, devices: of GET /admin/models; events: of GET /admin/events for this model, oldest first.
        plan: actions (kind, model, host, reason) that a request for it would cause now; none while it is up.
    """
    hosts = [entry for entry in models if entry["model"] == name]
    lines = [line for host in hosts for line in _host(host, events, now)]
    lines += [f"{device['device']}: {_size(device['held_bytes'])} of {_size(device['budget_bytes'])} held by "
              f"{_holders(models, device)}" for device in devices]  # fmt: skip
    if plan:
        lines.append("if it was asked for now:")
        lines += [f"  {_action(action)}: {action['reason']}" for action in plan]
    return lines


def _host(host: dict[str, Any], events: Sequence[dict[str, Any]], now: float) -> Iterable[str]:
    mine = [event for event in events if event["host"] == host["host"]]
    moves = [event for event in mine if event["old"] != event["new"]]
    since = f", {_ago(now - host['since'])}" if host["since"] else ""
    yield f"{host['host']} is {host['state']}{since}" + (f": {moves[-1]['reason']}" if moves else "")
    decided = [event for event in mine if event["kind"] == "decision"]
    if decided and (not moves or decided[-1]["at"] >= moves[-1]["at"]):
        yield f"  decided {_ago(now - decided[-1]['at'])}: {decided[-1]['reason']}"
    if host["waiting"]:
        yield f"  {host['waiting']} requests wait for it"
    if host["in_flight"]:
        yield f"  {host['in_flight']} in flight"
    if host["cause"]:
        yield f"  last failure: {host['cause']}"
    if host["cooldown_until"] > now:
        yield f"  no new try for {host['cooldown_until'] - now:.0f} s"
    took = [f"{host[f'{verb}_seconds']:.1f} s to {verb}" for verb in ("load", "wake") if host.get(f"{verb}_seconds")]
    if took:
        yield f"  took {' and '.join(took)}, the last time"
    for what in ("layers", "attention", "weights"):
        if host.get("stats", {}).get(what):
            yield f"  {what}: {host['stats'][what]}"
    yield f"  {_stays(host, now)}"


def _stays(host: dict[str, Any], now: float) -> str:
    if host["pinned"]:
        return "pinned: it is never put to sleep for another model"
    if host["keep_alive_seconds"] is None:
        return "keep_alive: none, it stays until another model needs its memory"
    left = host["keep_alive_seconds"] - (now - host["last_used"])
    soon = f", {left:.0f} s are left" if host["state"] == "ready" and left > 0 else ""
    return f"keep_alive: put to sleep after {host['keep_alive_seconds']:g} s without a request{soon}"


def _holders(models: Sequence[dict[str, Any]], device: dict[str, Any]) -> str:
    states = {model["host"]: model["state"] for model in models}
    held = sorted(((entry["held_bytes"], entry["host"]) for entry in device["entries"]), reverse=True)
    said = [f"{host} ({states.get(host, 'no model')}, {_size(size)})" for size, host in held if size]
    return ", ".join(said) or "nobody"


def prepared(device: dict[str, Any]) -> str:
    """What processes without a model hold of a device; empty when there are none."""
    sizes = [entry["held_bytes"] for entry in device["entries"] if entry["host"].startswith(f"host:{PREPARED}:")]
    what = "process" if len(sizes) == 1 else "processes"
    return f", {_size(sum(sizes))} of it by {len(sizes)} prepared {what}" if sizes else ""


def _action(action: dict[str, Any]) -> str:
    verbs = {
        "start": "it would be started",
        "stage": "it would be loaded in the background",
        "wait": "it would wait",
        "refuse": "it would be refused",
        "sleep": f"{action['host']} would be put to sleep",
        "deep_sleep": f"{action['host']} would let go of all but its process",
        "unload": f"{action['host']} would be ended",
    }
    return verbs[action["kind"]]


def _size(count: int) -> str:
    return f"{count / MIB:,.0f} MiB"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
