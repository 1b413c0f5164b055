"""Owns what the processes of ``bench swap`` do with an engine, and the memcpy they are compared with.

Nothing heavy is imported before it is used: the time of a cold start counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.bench.asking import Asked, obey

MEMORY_BYTES = 3 * 2**30

Result = TypeVar("Result")


def in_thread(work: Callable[[], Result]) -> Result:
    """Where a host has its engine: malloc gives other threads than the main one other memory, without 2 MiB pages."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="engine")
    thread.start()
    thread.join()
    if not results:
        raise SystemExit(1)  # the thread has printed why
    return results[0]


def limits(kv_host_bytes: int = 0) -> Any:
    from engine.protocol import EngineLimits

    return EngineLimits(max_model_len=2048, max_running=8, kv_host_bytes=kv_host_bytes)


def loaded(path: Path, kv_host_bytes: int = 0, recipes: Path | None = None) -> Any:
    """An engine that takes requests."""
    from engine.protocol import Places
    from engine.torch_engine import TorchEngine

    engine = TorchEngine(path, MEMORY_BYTES, limits(kv_host_bytes), places=Places(recipes=str(recipes or "")))
    engine.load()
    engine.warm()
    return engine


def request(prompt: list[int], new: int, name: str = "bench") -> Any:
    """A greedy one of exactly ``new`` tokens."""
    from engine.protocol import GenerationRequest, SamplingParams

    return GenerationRequest(
        name, 0, tuple(prompt), SamplingParams(new, 0, temperature=0, ignore_eos=True), tenant="bench"
    )


def answer(engine: Any, prompt: list[int], new: int) -> list[int]:
    engine.add(request(prompt, new))
    said: list[int] = []
    while engine.has_work():
        said += [token for output in engine.step() for token in output.token_ids]
    return said


def tokens(seed: int, count: int) -> list[int]:
    """A prompt that begins like no other."""
    return [300 + (seed * 7919 + n * n * 31 + n * 17) % 40_000 for n in range(count)]


def memcpy(nbytes: int) -> float:
    """Seconds to copy so many bytes into fresh pages, with one thread."""
    import torch

    torch.set_num_threads(1)
    source = torch.ones(nbytes, dtype=torch.uint8)
    begin = time.perf_counter()
    fresh = torch.empty(nbytes, dtype=torch.uint8)
    fresh.copy_(source)
    return time.perf_counter() - begin


def plain_memcpy() -> Asked:
    """A process as it comes, which is asked to ``memcpy``."""
    return Asked("orchestrator.bench.engines", huge_pages=False)


if __name__ == "__main__":
    obey({"memcpy": memcpy})
