"""Owns the picture of ``bench matrix``: one figure per model, a row per metric, a column per number of turns."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.bench.matrix import TOO_LONG, Cell, CellResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

DOTS_PER_INCH = 110
CELL_INCHES = (0.8, 0.36)
FRAME_INCHES = (2.2, 1.6)  # labels, titles
LEAST_WIDTH_INCHES = 7.0  # for the title
MISSING = (0.93, 0.93, 0.93, 1.0)
DARK = 0.5  # luminance; white text on what is darker


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. ``colours`` is a matplotlib colour map; ``log``: values span orders of magnitude."""

    title: str
    value: Callable[[CellResult], float | None]
    form: str
    colours: str
    log: bool = False


METRICS = (
    Metric("TTFT p50\nseconds", lambda each: each.ttft_p50_seconds, ".3g", "YlOrRd", log=True),
    Metric("gap between\ntokens p50\nms", lambda each: _times(each.gap_p50_seconds, 1000), ".3g", "YlOrRd", log=True),
    Metric("tokens/s\nall sessions", lambda each: each.tokens_per_second, ".3g", "YlGn"),
    Metric("reuse\n% of prompt\ntokens", lambda each: _times(each.reuse_ratio, 100), ".0f", "YlGn"),
    Metric("KV use, highest\n% of blocks", lambda each: _times(each.kv_use_ratio, 100), ".2g", "PuBu"),
    Metric("refused\nrequests", lambda each: float(each.refused), ".0f", "Reds"),
)


def can_draw() -> bool:
    """Whether matplotlib is there; asked before anything is measured."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, results: Sequence[CellResult], subtitle: str) -> None:
    """Write one model's results as a PNG; ``subtitle`` says when and on what they were measured."""
    from matplotlib.figure import Figure  # draws with Agg: no display, no global state

    turns, lengths, concurrency = (
        sorted({getattr(each, name) for each in results}) for name in ("turns", "length_tokens", "concurrency")
    )
    width = max(LEAST_WIDTH_INCHES, FRAME_INCHES[0] + CELL_INCHES[0] * len(turns) * max(2, len(concurrency)))
    height = FRAME_INCHES[1] + CELL_INCHES[1] * len(METRICS) * max(2, len(lengths) + 0.5)
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(f"{results[0].model}, {subtitle}", fontsize=10)
    panels = figure.subplots(len(METRICS), len(turns), squeeze=False)
    found = {each.cell: each for each in results}
    for metric, row in zip(METRICS, panels, strict=True):
        colours, scale = _scale(metric, results)
        for count, axes in zip(turns, row, strict=True):
            cells = [[found.get(Cell(many, length, count)) for many in concurrency] for length in lengths]
            _panel(axes, metric, cells, colours, scale)
        row[0].set_yticks(range(len(lengths)), [f"{each} tok" for each in lengths])
        row[0].set_ylabel(metric.title, rotation=0, ha="right", va="center", fontsize=9, labelpad=10)
    for count, top, bottom in zip(turns, panels[0], panels[-1], strict=True):
        top.set_title(f"{count} turn{'s' if count > 1 else ''}", fontsize=10)
        bottom.set_xticks(range(len(concurrency)), [str(each) for each in concurrency])
        bottom.set_xlabel("sessions at once", fontsize=9)
    figure.savefig(path, format="png")


def _scale(metric: Metric, results: Sequence[CellResult]) -> tuple[Colormap, Normalize]:
    """One scale for the whole row, so that its panels can be compared."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    values = [value for each in results if (value := _value(metric, each)) is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if metric.log and 0 < low < high:
        return colormaps[metric.colours], LogNorm(low, high)
    return colormaps[metric.colours], Normalize(0.0, high or 1.0)


def _panel(
    axes: Axes, metric: Metric, cells: Sequence[Sequence[CellResult | None]], colours: Colormap, scale: Normalize
) -> None:
    """One heat map, with the number in each cell."""
    values = [[_value(metric, each) for each in row] for row in cells]
    fills = [[MISSING if value is None else colours(float(scale(value))) for value in row] for row in values]
    axes.imshow(fills, aspect="auto")
    axes.tick_params(length=0, labelsize=8)
    axes.set_xticks([])
    axes.set_yticks([])
    for between in range(1, len(cells)):
        axes.axhline(between - 0.5, color="white")
    for between in range(1, len(cells[0])):
        axes.axvline(between - 0.5, color="white")
    for y, row in enumerate(cells):
        for x, each in enumerate(row):
            value, (red, green, blue, _) = values[y][x], fills[y][x]
            said = TOO_LONG if each is not None and each.status == TOO_LONG else "–"
            text = said if value is None else format(value, metric.form)
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < DARK
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")


def _value(metric: Metric, each: CellResult | None) -> float | None:
    return None if each is None or each.status == TOO_LONG else metric.value(each)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
