"""Owns the form of a benchmark's result: one JSON object, or a table of the same."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "transformers", "ray", "triton")


@dataclass(frozen=True, slots=True)
class Section:
    """One figure. ``ratio`` is the median of paired runs, ours ÷ baseline; ``target`` is like ``"<=1.5"`` or empty."""

    name: str
    ours: float
    baseline: float
    baseline_name: str
    unit: str
    ratio: float
    target: str
    limit: str
    samples: int

    @property
    def met(self) -> bool | None:
        if not self.target:
            return None
        bound = float(self.target[2:])
        return self.ratio <= bound if self.target.startswith("<=") else self.ratio >= bound


def section(
    name: str, pairs: list[tuple[float, float]], baseline_name: str, unit: str, *, target: str = "", limit: str
) -> Section:
    """Fold paired samples (ours, baseline) into a section."""
    return Section(
        name,
        statistics.median(ours for ours, _ in pairs),
        statistics.median(baseline for _, baseline in pairs),
        baseline_name,
        unit,
        statistics.median(ours / baseline for ours, baseline in pairs),
        target,
        limit,
        len(pairs),
    )


def report(bench: str, sections: list[Section]) -> dict[str, Any]:
    return {**header(bench), "sections": [asdict(each) for each in sections]}


def header(bench: str) -> dict[str, Any]:
    """What every result begins with: of which benchmark, code and machine it is."""
    return {
        "bench": bench,
        "commit": _commit(),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in PACKAGES}},
    }


def print_table(console: Console, sections: list[Section]) -> None:
    table = Table("SECTION", "OURS", "BASELINE", "UNIT", "RATIO", "TARGET")
    for each in sections:
        verdict = {None: "", True: " met", False: " MISSED"}[each.met]
        table.add_row(
            each.name,
            f"{each.ours:.4g}",
            f"{each.baseline:.4g}",
            each.unit,
            f"{each.ratio:.3f}",
            each.target + verdict,
        )
    console.print(table)
    for each in sections:
        console.print(f"{each.name}: baseline is {each.baseline_name}; bound by {each.limit}", highlight=False)


def _commit() -> str:
    try:
        ended = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return ended.stdout.strip()


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
