"""Owns the words of GET /admin/contexts: one entry per engine host, with its snapshot or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from engine.snapshot import EngineSnapshot


@dataclass(frozen=True, slots=True)
class HostContexts:
    """What one engine host holds."""

    model: str
    host: str
    state: str
    snapshot: EngineSnapshot | None
    error: str | None  # why there is no snapshot


def parse(body: dict[str, Any]) -> list[HostContexts]:
    """The route's JSON body, as its readers want it; ValueError when it is something else."""
    return TypeAdapter(list[HostContexts]).validate_python(body["hosts"])
