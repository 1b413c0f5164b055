"""Owns the section ``neighbour_ttft`` of ``bench swap``: what a model that answers feels of another one's first load.

Two processes: one answers short prompts all the time; in the other an engine host (without Ray) loads as hosts do, its
load's thread at the lowest priority, again and again. Phases with and without loads take turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.memory import PROCESS_ENVIRONMENT
from orchestrator.bench import engines
from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import measured
from policies.errors import OrchestratorError

PROMPT_TOKENS, NEW_TOKENS = 80, 4
ROUNDS = 3
LEAST = 36  # samples of a phase; one with loads goes on until the load that runs then has ended
WARM = 5


def run(resident: Path, loaded: Path) -> list[Section]:
    seen: dict[str, list[float]] = measured("orchestrator.bench.neighbours", "resident", str(resident), str(loaded))
    return [ttft_section(seen["beside"], seen["alone"], seen["load"])]


def ttft_section(beside: Sequence[float], alone: Sequence[float], loads: Sequence[float]) -> Section:
    """Seconds to the first token beside loads and with none, and the seconds of those loads."""
    folded = section(
        "neighbour_ttft",
        [(_p90(beside), _p90(alone))],
        f"p90 of {len(alone)} times to first token with no load ({PROMPT_TOKENS} prompt tokens), in {ROUNDS} turns",
        "s",
        target="<=1.5",
        limit=f"two cores for three threads; median {_median(beside) / _median(alone):.2f} ×; {len(loads)} first loads "
        f"of {_median(loads):.0f} s, whose warm-up is at normal priority",
    )
    return replace(folded, samples=min(len(beside), len(alone)))


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.9)]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


# -- the process that answers --------------------------------------------------------------------


def _resident(path: Path, other: Path) -> dict[str, list[float]]:
    engine = engines.loaded(path)
    seen: dict[str, list[float]] = {"alone": [], "beside": [], "load": []}
    for _ in range(WARM):
        _ttft(engine)
    for _ in range(ROUNDS):
        seen["alone"] += [_ttft(engine) for _ in range(LEAST)]
        seen["beside"] += _beside(engine, other, seen["load"])
    return seen


def _beside(engine: Any, other: Path, loads: list[float]) -> list[float]:
    """Samples during whole loads, as many loads as it takes."""
    samples: list[float] = []
    engine.lend_core(True)  # as the controller tells every host
    while len(samples) < LEAST:
        begin = time.perf_counter()
        with subprocess.Popen(loader(other), env={**os.environ, **PROCESS_ENVIRONMENT}) as loading:
            while loading.poll() is None:
                samples.append(_ttft(engine))
        if loading.returncode:
            raise OrchestratorError(f"the load of {other.name} beside {engine.path.name} failed")
        loads.append(time.perf_counter() - begin)
    engine.lend_core(False)
    return samples


def loader(path: Path) -> list[str]:
    """The command that loads a model once."""
    return [sys.executable, "-m", "orchestrator.bench.neighbours", "load", str(path)]


def _ttft(engine: Any) -> float:
    """Of one short prompt that nothing is cached of; its answer is finished too."""
    prompt = [random.randrange(300, 40_000) for _ in range(PROMPT_TOKENS)]
    begin = time.perf_counter()
    engine.add(engines.request(prompt, NEW_TOKENS))
    first = 0.0
    while engine.has_work():
        if engine.step():
            first = first or time.perf_counter() - begin
    return first


# -- the process that loads ----------------------------------------------------------------------


async def _load(path: Path) -> None:
    from orchestrator.bench import hosting

    await hosting.load(hosting.new_host(path))
    os._exit(0)  # nobody waits for a process to be taken apart


if __name__ == "__main__":
    if sys.argv[1] == "load":
        asyncio.run(_load(Path(sys.argv[2])))
    else:
        print(json.dumps(engines.in_thread(lambda: _resident(Path(sys.argv[2]), Path(sys.argv[3])))))
