"""Owns the bodies of /admin: what an operator sees and may ask."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.snapshot import EngineSnapshot
from model_pool.effects import ModelStatus, PoolEvent
from model_pool.ledger import DeviceBooks
from orchestrator.api.items import shown
from orchestrator.config import Config
from orchestrator.contexts import HostContexts
from orchestrator.pool_words import ModelPicture, PoolPicture
from policies.errors import BadRequest, ModelNotFound, NotFound, OrchestratorError
from policies.types import ModelState
from session_store.items import Item

VERBS = ("load", "wake", "sleep", "unload", "pin", "unpin")
MOST_IMPORTED_BYTES = 256 * 2**20
NO_PROCESS = (ModelState.COLD, ModelState.FAILED, ModelState.LOST, ModelState.UNLOADING)


def models(pool: PoolPicture) -> dict[str, Any]:
    return {
        "models": [_model(entry) for entry in pool.models],
        "devices": [_device(books) for books in pool.books],
        "controller_pid": pool.pid,
    }


def events(found: Sequence[PoolEvent]) -> dict[str, Any]:
    return {"events": [dataclasses.asdict(event) for event in found]}


async def contexts(
    pool: PoolPicture, model: str | None, ask: Callable[[str], Awaitable[EngineSnapshot | OrchestratorError]]
) -> dict[str, list[HostContexts]]:
    """What the engines hold: of all live hosts, or of every host of one model. ``ask`` bounds its own time."""
    statuses = [entry.status for entry in pool.models]
    known = list(dict.fromkeys(status.model for status in statuses))
    if model is not None and model not in known:
        near = difflib.get_close_matches(model, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise ModelNotFound(f"the model {model!r} does not exist; {hint}", param="model")
    chosen = [s for s in statuses if s.model == model or (model is None and s.state not in NO_PROCESS)]
    return {"hosts": await asyncio.gather(*(_contexts_of(status, ask) for status in chosen))}


async def _contexts_of(
    status: ModelStatus, ask: Callable[[str], Awaitable[EngineSnapshot | OrchestratorError]]
) -> HostContexts:
    state = str(status.state)
    if status.state in NO_PROCESS:
        return HostContexts(status.model, status.host, state, None, f"{status.host} is {state}: it holds nothing")
    answer = await ask(status.actor)
    if isinstance(answer, OrchestratorError):
        return HostContexts(status.model, status.host, state, None, answer.message)
    return HostContexts(status.model, status.host, state, answer, None)


def item(stored: Item) -> dict[str, Any]:
    """An item for an operator: as its API shows it, and whose it is."""
    return {**shown(stored), "turn_id": stored.turn_id, "created": stored.created, "model": stored.model,
            "pinned": stored.pinned}  # fmt: skip


def one_model(listed: dict[str, Any], name: str) -> dict[str, Any]:
    entry: dict[str, Any]
    for entry in listed["data"]:
        if name in (entry["id"], *entry["aliases"]):
            return entry
    raise ModelNotFound(f"the model {name!r} does not exist", param="model")


def check_verb(verb: str) -> None:
    if verb not in VERBS:
        raise NotFound(f"there is no verb {verb!r}; one of {', '.join(VERBS)}")


def tenant_param(config: Config, name: str | None) -> str:
    known = [tenant.name for tenant in config.tenants]
    if name not in known:
        raise BadRequest(f"tenant {name!r} is not one of {', '.join(known)}", param="tenant")
    return name


def count_param(text: str | None, *, default: int, most: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or not 1 <= int(text) <= most:
        raise BadRequest(f"limit must be 1 to {most}, not {text!r}", param="limit")
    return int(text)


def time_param(text: str | None) -> float:
    """Seconds since the epoch; 0 when it is left out."""
    try:
        value = float(text or 0.0)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRequest(f"after must be seconds since the epoch, not {text!r}", param="after")
    return value


def _device(books: DeviceBooks) -> dict[str, Any]:
    entries = [{**dataclasses.asdict(entry), "held_bytes": entry.held_bytes} for entry in books.entries]
    return {**dataclasses.asdict(books), "entries": entries}


def _model(entry: ModelPicture) -> dict[str, Any]:
    status = dataclasses.asdict(entry.status)
    host = entry.host
    if host is not None:
        status["pid"] = host.pid
        status["stats"] = dataclasses.asdict(host.stats)
        status["loaded"] = None if host.loaded is None else dataclasses.asdict(host.loaded)
    return status
