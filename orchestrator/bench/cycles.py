"""Owns the sections of ``bench swap`` on many cycles of sleep: memory must not creep, answers must not change, and
nothing must hang.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.bench import engines
from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import measured
from policies.errors import OrchestratorError

CYCLES = 300  # of both models together: one is awake at a time
SETTLED_CYCLES = 40
BUSY_EVERY = 8  # cycles of a model; those carry prompts of lengths that were not there before
COMPARED = 10  # samples of memory, whose median counts
FIXED_TOKENS, FIXED_NEW = 12, 4
CLEAR_MARGIN = 0.02  # lead of every greedy token over the runner-up: no rounding can change the fixed answer
FAKE_CYCLES = 2_000
HANGING_SECONDS = 5.0


def run(paths: Sequence[Path]) -> list[Section]:
    held: list[int] = measured("orchestrator.bench.cycles", "real", *map(str, paths))
    seconds: list[float] = measured("orchestrator.bench.cycles", "fake")
    return [memory_section(held), fake_section(seconds)]


def memory_section(held: Sequence[int]) -> Section:
    """``held``: bytes with both asleep, after every cycle."""
    after, before = statistics.median(held[-COMPARED:]), statistics.median(held[SETTLED_CYCLES:][:COMPARED])
    return section(
        "cycles_memory",
        [(after, before)],
        f"after {SETTLED_CYCLES} of {len(held)} cycles of two models in one process",
        "bytes asleep",
        target="<=1.02",
        limit=f"two prompts of new lengths in every {BUSY_EVERY}th cycle of each: what is compiled for their shapes; "
        "the answers to a fixed prompt stayed the same",
    )


def fake_section(seconds: Sequence[float]) -> Section:
    return section(
        "cycles_fake",
        [(statistics.quantiles(seconds, n=100)[98], statistics.median(seconds))],
        f"the median of {len(seconds):,} cycles of the fake engine, each with a request; ours is the 99th percentile",
        "s",
        limit=f"the slowest took {max(seconds):.3f} s; what else runs on the machine",
    )


# -- in the subprocess: real engines -----------------------------------------------------------


@dataclass(slots=True)
class _Sleeper:
    """One of the engines in the process, and what it must go on saying."""

    engine: Any
    name: str
    prompt: list[int]
    said: list[int]

    def check(self, cycle: int) -> None:
        said = engines.answer(self.engine, self.prompt, FIXED_NEW)
        if said != self.said:
            raise OrchestratorError(f"{self.name} answers {said} after {cycle} cycles, and {self.said} before them")


def _real(paths: list[Path]) -> list[int]:
    """Bytes held after each cycle of one model's sleep, with all asleep."""
    from engine.memory import held_bytes

    sleepers = []
    for path in paths:
        sleepers.append(_sleeper(path))
        sleepers[-1].engine.sleep()
    held = []
    for cycle in range(CYCLES):
        sleeper = sleepers[cycle % len(sleepers)]
        sleeper.engine.wake()
        sleeper.check(cycle)
        if cycle // len(sleepers) % BUSY_EVERY == 0:
            for prompt in range(2):
                engines.answer(sleeper.engine, engines.tokens(cycle, 20 + (cycle * 2 + prompt) * 37 % 256), 6)
        sleeper.engine.sleep()
        held.append(held_bytes())
    return held


def _sleeper(path: Path) -> _Sleeper:
    engine = engines.loaded(path)
    for seed in range(1, 50):
        prompt = engines.tokens(seed, FIXED_TOKENS)
        said, margin = _answer_and_margin(engine, prompt)
        if margin > CLEAR_MARGIN:
            return _Sleeper(engine, path.name, prompt, said)
    raise OrchestratorError(f"{path.name} has no clear answer to any of 49 prompts")


def _answer_and_margin(engine: Any, prompt: list[int]) -> tuple[list[int], float]:
    """The greedy answer, and the least lead that a token of it had."""
    from dataclasses import replace

    request = engines.request(prompt, FIXED_NEW)
    engine.add(replace(request, sampling=replace(request.sampling, logprobs=2)))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    leads = [one.top[0].logprob - one.top[1].logprob for output in outputs for one in output.logprobs]
    return [token for output in outputs for token in output.token_ids], min(leads)


# -- in the subprocess: the fake engine behind its host ------------------------------------------


async def _fake(cycles: int = FAKE_CYCLES) -> list[float]:
    """Seconds of each cycle of an engine host: drain, sleep, wake, a request; OrchestratorError when one hangs."""
    from engine.fake import FakeSettings
    from orchestrator.bench import hosting

    host = hosting.new_host(Path("fake"), fake=FakeSettings())
    await hosting.load(host)
    seconds = []
    for cycle in range(cycles):
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(HANGING_SECONDS):
                await hosting.go_to_sleep(host)
                await hosting.wake(host)
                async with hosting.Stream(host) as stream:
                    await stream.answer([cycle % 200 + 1, 2, 3], 8)
        except TimeoutError:
            raise OrchestratorError(f"cycle {cycle} hangs: more than {HANGING_SECONDS} s") from None
        seconds.append(time.perf_counter() - begin)
        left = (await host.picture()).report.in_flight
        if left:
            raise OrchestratorError(f"{left} generations are in flight after cycle {cycle}, and none is asked for")
    return seconds


if __name__ == "__main__":
    if sys.argv[1] == "fake":
        print(json.dumps(asyncio.run(_fake())))
    else:
        print(json.dumps(engines.in_thread(lambda: _real([Path(arg) for arg in sys.argv[2:]]))))
