"""Owns ``bench engine``'s sections on scheduling: what a step costs beside the model, what a long prompt does to all.

Engines run in a process of their own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import measured

FEW, MANY = 256, 1_024
STEPS = 40
STREAMS = 4
LONG_TOKENS = 3_000
CHUNK_TOKENS, WHOLE_TOKENS = 256, 4_096
SAMPLES = 3
MEMORY_BYTES = 4 * 2**30


def run(path: Path) -> list[Section]:
    """All sections for the model in ``path``."""
    steps = [(_step_seconds(MANY), _step_seconds(FEW)) for _ in range(SAMPLES)]
    seen: dict[str, list[float]] = measured("orchestrator.bench.scheduling", str(path))
    return [
        section(
            "scheduler_step",
            steps,
            f"the same with {FEW} running",
            "s",
            target="<=5",
            limit=f"{MANY} running contexts in plain Python; a context's record is {_record_bytes():,} bytes",
        ),
        section(
            "stall_gap",
            list(zip(seen["p99_gap"], seen["median_gap"], strict=True)),
            f"their median gap meanwhile, {STREAMS} streams",
            "s",
            target="<=4",
            limit=f"chunks of {CHUNK_TOKENS} of a {LONG_TOKENS}-token prompt, the later ones over more history",
        ),
        section(
            "stall_ttft",
            list(zip(seen["chunked_ttft"], seen["whole_ttft"], strict=True)),
            "that prompt in one chunk, beside the same streams",
            "s",
            target="<=1.3",
            limit="a decode step of the streams with every chunk",
        ),
    ]


def _scheduler(running: int) -> Any:
    from engine.context import Context
    from engine.kv_cache import KVCache
    from engine.protocol import EngineLimits, GenerationRequest, SamplingParams
    from engine.scheduler import Scheduler

    limits = EngineLimits(max_model_len=4096, max_running=running, step_tokens=2 * running, max_waiting=running)
    scheduler = Scheduler(limits, KVCache(limits.block_size, 40 * running))
    for number in range(running):
        prompt = tuple(range(number, number + 100))
        request = GenerationRequest(f"r{number}", 0, prompt, SamplingParams(200, 0), "bench", arrival=float(number))
        scheduler.add(Context(request, b"namespace", 0.0))
    return scheduler


def _step_seconds(running: int) -> float:
    """Median seconds of planning and booking one decode step of so many contexts."""
    scheduler = _scheduler(running)
    seconds: list[float] = []
    while len(seconds) < STEPS:
        begin = time.perf_counter()
        plan = scheduler.schedule(0.0, 0.0)
        scheduler.kv.launched()
        scheduler.computed(plan)
        took = time.perf_counter() - begin
        if len(plan.chunks) == running and all(chunk.count == 1 for chunk in plan.chunks):
            seconds.append(took)
        for chunk in plan.chunks:
            if chunk.start + chunk.count == chunk.context.num_tokens:
                chunk.context.token_ids.append(7)
    return statistics.median(seconds)


def _record_bytes() -> int:
    """Of one running context of 100 tokens: the record and its own lists, not the request's tokens."""
    scheduler = _scheduler(1)
    scheduler.schedule(0.0, 0.0)
    (context,) = scheduler.running
    parts = [context, context.token_ids, context.block_table, context.block_keys, *context.block_keys, context.events]
    return sum(map(sys.getsizeof, parts))


# -- in the subprocess ------------------------------------------------------------------------


def _measure(path: Path) -> dict[str, list[float]]:
    from engine.device import ThreadGovernor
    from engine.protocol import EngineLimits
    from engine.torch_engine import TorchEngine

    engines: dict[int, Any] = {}
    for step_tokens in (CHUNK_TOKENS, WHOLE_TOKENS):
        limits = EngineLimits(max_model_len=4096, max_running=8, step_tokens=step_tokens)
        engines[step_tokens] = TorchEngine(path, MEMORY_BYTES, limits)
        engines[step_tokens].load()
        engines[step_tokens].warm()
        engines[step_tokens]._governor = ThreadGovernor(1)  # each would choose for itself, and not alike
    seen: dict[str, list[float]] = {"p99_gap": [], "median_gap": [], "chunked_ttft": [], "whole_ttft": []}
    for number in range(SAMPLES):
        ttft, gaps = _beside_streams(engines[CHUNK_TOKENS], number)
        seen["chunked_ttft"].append(ttft)
        seen["p99_gap"].append(sorted(gaps)[min(len(gaps) - 1, int(0.99 * len(gaps)))])
        seen["median_gap"].append(statistics.median(gaps))
        seen["whole_ttft"].append(_beside_streams(engines[WHOLE_TOKENS], number)[0])
    return seen


def _beside_streams(engine: Any, number: int) -> tuple[float, list[float]]:
    """(seconds to the long prompt's first token, gaps between tokens of the streams meanwhile)."""
    for stream in range(STREAMS):
        engine.add(_request(f"stream{stream}", [300 + stream + 5 * n for n in range(84)], 400, number))
    for _ in range(10):
        engine.step()
    begin = last = time.perf_counter()
    engine.add(_request("long", [400 + (n * n) % 40_000 for n in range(LONG_TOKENS)], 1, number))
    gaps = []
    while True:
        outputs = engine.step()
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        if any(output.request_id == "long" for output in outputs):
            break
    for stream in range(STREAMS):
        engine.cancel(f"stream{stream}", 0, "bench")
    return last - begin, gaps


def _request(name: str, prompt: list[int], new: int, number: int) -> Any:
    from engine.protocol import GenerationRequest, SamplingParams

    params = SamplingParams(new, 0, temperature=0, ignore_eos=True)
    return GenerationRequest(name, 0, tuple(prompt), params, tenant=f"run{number}")  # no run reuses another's KV


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]))))
