"""Owns the section ``switch_ttft`` of ``bench swap``: from a model that is awake to the first token of one that sleeps.

Two engine hosts without Ray in one process, whose engines have a thread each: what a host does in a switch, and nothing
of what a gateway and a controller add. One sleeps before the other wakes, as when both do not fit.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_pool.host import EngineHost
from orchestrator.bench import engines, hosting
from orchestrator.bench.asking import Asked
from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import measured

ROUND_TRIPS = 8
PROMPT_TOKENS = 12  # less than a block: nothing of it is cached
PARTS = ("sleep", "wake", "token")

Sample = dict[str, float]


def run(paths: Sequence[Path]) -> list[Section]:
    """One section over both directions, and one for each."""
    seen: dict[str, list[Sample]] = measured("orchestrator.bench.switching", *map(str, paths))
    everything = [sample for samples in seen.values() for sample in samples]
    return [
        _section("switch_ttft", everything, "both directions"),
        *(_section(f"switch_ttft_to_{name}", samples, f"to {name}") for name, samples in seen.items()),
    ]


def _section(name: str, samples: list[Sample], which: str) -> Section:
    parts = ", ".join(f"{part} {_median(samples, part) * 1000:.0f}" for part in PARTS)
    wakes = sorted(sample["wake"] * 1000 for sample in samples)
    return section(
        name,
        [(s["switch"], s["memcpy"] + s["forward"]) for s in samples],
        f"memcpy of the weights into fresh pages of a process as it comes, and a warm forward of the prompt; {which}",
        "s",
        target="<=1.5",
        limit=f"in ms: {parts}, of which the canary and the token are a forward each, bare "
        f"{_median(samples, 'forward') * 1000:.0f}; wakes took {wakes[0]:.0f} to {wakes[-1]:.0f}",
    )


def _median(samples: list[Sample], name: str) -> float:
    return statistics.median(sample[name] for sample in samples)


# -- in the subprocess ------------------------------------------------------------------------


async def _switches(paths: list[Path]) -> dict[str, list[Sample]]:
    hosts = [hosting.new_host(path) for path in paths]
    for host in hosts:
        await hosting.load(host)
        await hosting.go_to_sleep(host)
    await hosting.wake(hosts[0])
    seen: dict[str, list[Sample]] = {path.name: [] for path in paths}
    with engines.plain_memcpy() as plain:
        for number in range(2 * (ROUND_TRIPS + 1)):
            here, there = number % 2, 1 - number % 2
            sample = await _switch(hosts[here], hosts[there], number)
            baseline = await _baseline(hosts[there], plain, number)
            if number >= 2:  # the first of each direction takes pages
                seen[paths[there].name].append(sample | baseline)
    return seen


async def _switch(here: EngineHost, there: EngineHost, number: int) -> Sample:
    async with hosting.Stream(there) as stream:
        begin = time.perf_counter()
        await hosting.go_to_sleep(here)
        slept = time.perf_counter()
        await hosting.wake(there)
        woken = time.perf_counter()
        first, _ = await stream.answer(engines.tokens(number, PROMPT_TOKENS), 2)
    return {"sleep": slept - begin, "wake": woken - slept, "token": first - woken, "switch": first - begin}


async def _baseline(there: EngineHost, plain: Asked, number: int) -> Sample:
    picture = await there.picture()
    assert picture.loaded is not None
    weight_bytes = picture.loaded.weight_bytes
    return {
        "forward": await there._call(lambda engine: _forward(engine, engines.tokens(number + 1000, PROMPT_TOKENS))),
        "memcpy": await asyncio.to_thread(plain.ask, "memcpy", weight_bytes),
    }


def _forward(engine: Any, prompt: list[int]) -> float:
    """Seconds of the model's bare forward, with the threads that the engine would use; nothing is cached by now."""
    from engine import canary

    step = canary.made_up_step(engine._runner, engine._kv, engine.limits.block_size, [prompt])
    with engine._governor.step():
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_switches([Path(arg) for arg in sys.argv[1:]]))))
