"""Owns the sections of ``bench swap`` on cold starts: from the start of a process to the first token it answers with.

A sample is a floor, a load by the recipe of an earlier one, and the same in a prepared process, one after the other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.bench.asking import READY, Asked
from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import measured

SAMPLES = 5
FIRST_SAMPLES = 2
PROCESS = "orchestrator.bench.cold_process"

Seconds = dict[str, float]  # that each part took, in their order, and ``all``
FLOOR = "a process that does the same imports and reads the same bytes into memory"


def run(path: Path) -> list[Section]:
    with tempfile.TemporaryDirectory() as directory:
        recipes = Path(directory)
        firsts = [(_started("first", path, recipes), _started("floor", path, recipes)) for _ in range(FIRST_SAMPLES)]
        samples = [_sample(path, recipes) for _ in range(SAMPLES)]
    floors, knowns, prepareds = zip(*samples, strict=True)
    return [
        section(
            "cold_vs_floor",
            _pairs(knowns, floors),
            FLOOR,
            "s",
            target="<=1.5",
            limit=f"by a recipe, in ms: {_parts(knowns)}; the load is tokenizer, skeleton, fresh memory and the canary",
        ),
        section(
            "cold_first_load",
            _pairs([first for first, _ in firsts], [floor for _, floor in firsts]),
            FLOOR,
            "s",
            limit=f"no recipe yet, in ms: {_parts([first for first, _ in firsts])}; scores are compared, the largest "
            "step and threads are measured",
        ),
        section(
            "cold_prepared",
            _pairs(prepareds, knowns),
            "the same from the start of a process on",
            "s",
            target="<=0.6",
            limit=f"all but the imports, in ms: {_parts(prepareds)}",
        ),
    ]


def _pairs(ours: Sequence[Seconds], baseline: Sequence[Seconds]) -> list[tuple[float, float]]:
    return [(one["all"], other["all"]) for one, other in zip(ours, baseline, strict=True)]


def _parts(samples: Sequence[Seconds]) -> str:
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0] if name != "all"}
    return ", ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in medians.items())


def _sample(path: Path, recipes: Path) -> tuple[Seconds, Seconds, Seconds]:
    """A floor, a load by recipe, and one in a prepared process."""
    return _started("floor", path, recipes), _started("known", path, recipes), _prepared(path, recipes)


def _started(what: str, path: Path, recipes: Path) -> Seconds:
    """From before the process starts; it ends in nobody's time."""
    begin = time.monotonic()
    return _seconds(begin, measured(PROCESS, what, str(path), str(recipes)))


def _prepared(path: Path, recipes: Path) -> Seconds:
    """From being told on."""
    with Asked(PROCESS, "prepared", str(path), str(recipes)) as process:
        process.ask(READY)
        begin = time.monotonic()
        return _seconds(begin, process.ask("load"))


def _seconds(begin: float, moments: dict[str, float]) -> Seconds:
    parts = {name: at - before for before, (name, at) in zip([begin, *moments.values()], moments.items(), strict=False)}
    return {**parts, "all": max(moments.values()) - begin}
