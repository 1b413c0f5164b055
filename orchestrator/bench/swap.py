"""Owns ``bench swap``: what sleeping, waking, switching and loading cost, against the least they could.

Engines run in subprocesses, so that each group starts from a clean process and gives all of its memory back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.bench import cold, cycles, neighbours, switching, waking
from orchestrator.bench.report import Section


def run(path: Path, other: Path, say: Callable[[str], None] = lambda _: None) -> list[Section]:
    """All sections: for the model in ``path``, and for it and another one that take turns."""
    groups: list[tuple[str, Callable[[], list[Section]]]] = [
        ("sleep and wake", lambda: waking.run(path)),
        ("switches between two models", lambda: switching.run((path, other))),
        ("cold starts", lambda: cold.run(path)),
        ("a neighbour that loads", lambda: neighbours.run(path, other)),
        (f"{cycles.CYCLES} cycles of two models", lambda: cycles.run((path, other))),
    ]
    sections: list[Section] = []
    for what, measure in groups:
        say(what)
        sections += measure()
    return sections
