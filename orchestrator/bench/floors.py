"""Owns ``bench engine``'s sections on single steps: ours against the matrix products in them, and what is around them.

One process has both sides, which take turns; threads as the engine has chosen them at its load.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import FLOOR, floor_products, measured, our_engine, plain_model

DECODING_ROWS = (1, 8, 16)
HISTORY = 120  # tokens of each decoding request
PROMPT = 1_024
SAMPLES, SKIPPED = 15, 2
OVERHEAD_ROWS, OVERHEAD_STEPS = 16, 40
TOP_ITEMS = 3
TARGETS = {**{f"decode_floor_{rows}": "<=1.5" for rows in DECODING_ROWS}, "prefill_floor": "<=1.3"}


def run(path: Path, shared: Path) -> list[Section]:
    """All sections for the model in ``path``; ``shared``: where compiled layers are."""
    seen = measured("orchestrator.bench.floors", str(path), str(shared))
    sections = [
        section(name, seen[name], FLOOR, "s", target=target, limit=f"{seen['threads']} threads; {seen['items'][name]}")
        for name, target in TARGETS.items()
    ]
    overhead = seen["step_overhead"]
    limit = f"{statistics.median(ours for ours, _ in overhead) * 1e3:.1f} ms (8 at most): plan, blocks, sampling, books"
    return [
        *sections,
        section("step_overhead", overhead, "the whole step, 16 rows", "s", target="<=0.1", limit=limit),
    ]


# -- in the subprocess ------------------------------------------------------------------------


def _measure(path: Path, shared: Path) -> dict[str, Any]:
    import torch

    engine = our_engine(path, shared, max_running=OVERHEAD_ROWS, step_tokens=PROMPT)
    torch.set_num_threads(engine._governor._threads)
    floor = floor_products(plain_model(path))
    seen: dict[str, Any] = {"threads": torch.get_num_threads(), "items": {}}
    for rows in DECODING_ROWS:
        name = f"decode_floor_{rows}"
        step = _step(engine, [HISTORY] * rows, 1)
        seen[name] = _paired(step, lambda rows=rows: floor(rows, rows))  # type: ignore[misc]
        seen["items"][name] = _largest(step)
    step = _step(engine, [PROMPT], PROMPT)
    seen["prefill_floor"] = _paired(step, lambda: floor(PROMPT, 1))
    seen["items"]["prefill_floor"] = _largest(step)
    seen["step_overhead"] = _overhead(engine)
    return seen


def _step(engine: Any, lengths: list[int], new: int) -> Callable[[], object]:
    """One run of the model over requests of these lengths, the last ``new`` tokens of each being new."""
    from engine.context import Context
    from engine.scheduler import Chunk
    from orchestrator.bench.engines import request

    size, first, chunks = engine.limits.block_size, 0, []
    for length in lengths:
        context = Context(request([5] * length, 1), b"", 0.0)
        count = -(-length // size)
        context.block_table = list(range(first, first + count))
        first += count
        chunks.append(Chunk(context, length - new, new))
    return lambda: engine._runner.run(chunks, engine._kv)


def _paired(ours: Callable[[], object], floor: Callable[[], object]) -> list[tuple[float, float]]:
    return [(_seconds(ours), _seconds(floor)) for _ in range(SKIPPED + SAMPLES)][SKIPPED:]


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _largest(step: Callable[[], object]) -> str:
    """The profile's largest items."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(3):
            step()
    items = [(item.self_cpu_time_total, item.key) for item in profiled.key_averages()]
    total = sum(spent for spent, _ in items)
    return "largest: " + ", ".join(
        f"{name} {spent / total:.0%}" for spent, name in sorted(items)[: -TOP_ITEMS - 1 : -1]
    )


def _overhead(engine: Any) -> list[tuple[float, float]]:
    """(what a step takes beside the model's forward, the step)."""
    from orchestrator.bench.engines import request, tokens

    inside: list[float] = []
    forward = engine._runner.model.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return forward(*args, **kwargs)
        finally:
            inside.append(time.perf_counter() - begin)

    engine._runner.model.forward = timed
    for number in range(OVERHEAD_ROWS):
        engine.add(request(tokens(number, HISTORY), OVERHEAD_STEPS + 20, f"overhead{number}"))
    samples = []
    while engine.has_work():
        inside.clear()
        outputs: list[Any] = []
        seconds = _seconds(lambda outputs=outputs: outputs.extend(engine.step()))  # type: ignore[misc]
        if sum(len(output.token_ids) for output in outputs) == OVERHEAD_ROWS:
            samples.append((seconds - sum(inside), seconds))
    return samples[SKIPPED : SKIPPED + OVERHEAD_STEPS]


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), Path(sys.argv[2]))))
