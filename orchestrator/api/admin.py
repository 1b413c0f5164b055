"""Owns the bodies of /admin: what an operator sees and may ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from model_pool.effects import PoolEvent
from orchestrator.config import Config
from orchestrator.controller import ModelPicture, PoolPicture
from policies.errors import BadRequest, ModelNotFound, NotFound

VERBS = ("load", "wake", "sleep", "unload", "pin", "unpin")


def models(pool: PoolPicture) -> dict[str, Any]:
    return {
        "models": [_model(entry) for entry in pool.models],
        "devices": [dataclasses.asdict(book) for book in pool.books],
        "controller_pid": pool.pid,
    }


def events(found: Sequence[PoolEvent]) -> dict[str, Any]:
    return {"events": [dataclasses.asdict(event) for event in found]}


def one_model(listed: dict[str, Any], name: str) -> dict[str, Any]:
    entry: dict[str, Any]
    for entry in listed["data"]:
        if entry["id"] == name:
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
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise BadRequest(f"limit must be 1 to {most}, not {text!r}", param="limit")
    return int(text)


def _model(entry: ModelPicture) -> dict[str, Any]:
    status = dataclasses.asdict(entry.status)
    host = entry.host
    if host is not None:
        status["pid"] = host.pid
        status["stats"] = dataclasses.asdict(host.stats)
        status["loaded"] = None if host.loaded is None else dataclasses.asdict(host.loaded)
    return status
