"""Owns ``bench swap``: what sleeping, waking and loading a model cost, against the least they could.

Engines run in subprocesses, so that each sample starts from a clean process and gives all of its memory back.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import measured

CYCLES = 7
COLD_SAMPLES = 3
HISTORY_TOKENS = 1_500
SESSION_SAMPLES = 5
BUSY_CYCLES, SETTLED_CYCLES = 120, 20
MEMORY_BYTES = 3 * 2**30


def run(path: Path) -> list[Section]:
    """All sections for the model in ``path``."""
    cycles = measured("orchestrator.bench.swap", "cycles", str(path))
    plain = measured("orchestrator.bench.swap", "memcpy", str(path), huge_pages=False)
    cold = [(_timed("load", path), _timed("floor", path)) for _ in range(COLD_SAMPLES)]
    kept = measured("orchestrator.bench.swap", "sessions", str(path))
    used = measured("orchestrator.bench.swap", "busy", str(path))
    canary = sorted(cycles["canary_seconds"])[len(cycles["canary_seconds"]) // 2]
    return [
        section(
            "wake_vs_memcpy",
            list(zip(cycles["wake_seconds"], plain, strict=True)),
            "memcpy of the same bytes into fresh pages, in a process as it comes",
            "s",
            target="<=1.5",
            limit=f"reordering for decoding, in 2 MiB pages; the canary that follows takes {canary * 1000:.0f} ms more",
        ),
        section(
            "wake_vs_huge_memcpy",
            list(zip(cycles["wake_seconds"], cycles["memcpy_seconds"], strict=True)),
            "the same memcpy into fresh 2 MiB pages, as our hosts have them",
            "s",
            limit="reordering moves small pieces; plain weights would wake faster, and decode at half the speed",
        ),
        section(
            "sleep_vs_wake",
            list(zip(cycles["sleep_seconds"], cycles["wake_seconds"], strict=True)),
            "wake",
            "s",
            target="<=0.4",
            limit="the kernel taking pages back; no KV is parked",
        ),
        section(
            "cold_load",
            cold,
            "imports + read of the same bytes",
            "s",
            limit="model construction, measuring the largest step, warm-up",
        ),
        section(
            "memory_returned",
            list(zip(cycles["asleep_bytes"], cycles["awake_less_weights_bytes"], strict=True)),
            "awake - weights",
            "bytes",
            target="<=1.05",
            limit="interpreter, libraries and allocator of a live process; awake, KV pages in use count too",
        ),
        section(
            "park_vs_memcpy",
            list(zip(kept["park_seconds"], kept["copy_seconds"], strict=True)),
            f"a memcpy of the same bytes: KV of {HISTORY_TOKENS:,} tokens",
            "s",
            target="<=2",
            limit="a copy per layer and run of adjoining blocks",
        ),
        section(
            "switch_with_session",
            list(zip(kept["ttft_kept"], kept["ttft_lost"], strict=True)),
            f"the same with its {HISTORY_TOKENS:,} tokens computed again",
            "s",
            target="<=0.2",
            limit="waking and its canary, on both sides; then one step of 20 new tokens",
        ),
        section(
            "cycles_memory",
            [(used["held_bytes"][-1], used["held_bytes"][0])],
            f"after {SETTLED_CYCLES} of them",
            "bytes asleep",
            target="<=1.02",
            limit=f"{BUSY_CYCLES} cycles, two prompts of new lengths in each: what is compiled for their shapes",
        ),
    ]


def _timed(what: str, path: Path) -> float:
    begin = time.perf_counter()
    measured("orchestrator.bench.swap", what, str(path))
    return time.perf_counter() - begin


# -- in the subprocess ------------------------------------------------------------------------


def _cycles(path: Path) -> dict[str, list[float]]:
    """Sleep and wake one engine, beside a memcpy of as many bytes, in turns."""
    import torch

    from engine.memory import held_bytes

    engine, report = _loaded(path)
    torch.set_num_threads(1)  # both sides alike; the copy is bound by memory, not by threads
    result: dict[str, list[float]] = {name: [] for name in (
        "sleep_seconds", "wake_seconds", "canary_seconds", "memcpy_seconds", "asleep_bytes", "awake_less_weights_bytes",
    )}  # fmt: skip
    for _ in range(CYCLES):
        result["awake_less_weights_bytes"].append(held_bytes() - report.weight_bytes)
        begin = time.perf_counter()
        engine.sleep()
        result["sleep_seconds"].append(time.perf_counter() - begin)
        result["asleep_bytes"].append(held_bytes())
        result["memcpy_seconds"].append(_memcpy(report.weight_bytes))
        woken = engine.wake()
        result["wake_seconds"].append(woken.copy_seconds)
        result["canary_seconds"].append(woken.canary_seconds)
    return result


def _memcpies(path: Path) -> list[float]:
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return [_memcpy(nbytes) for _ in range(CYCLES)]


def _memcpy(nbytes: int) -> float:
    import torch

    torch.set_num_threads(1)
    source = torch.ones(nbytes, dtype=torch.uint8)
    begin = time.perf_counter()
    fresh = torch.empty(nbytes, dtype=torch.uint8)
    fresh.copy_(source)
    return time.perf_counter() - begin


def _load(path: Path) -> None:
    _loaded(path)


def _floor(path: Path) -> None:
    """Imports, and the same bytes read into memory."""
    import tokenizers  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401

    AutoConfig.from_pretrained(path)  # the model's own module is an import too
    for file in sorted(path.glob("*.safetensors")):
        buffer = bytearray(file.stat().st_size)
        with file.open("rb", buffering=0) as source:
            view = memoryview(buffer)
            while view and (count := source.readinto(view)):
                view = view[count:]


def _loaded(path: Path, kv_host_bytes: int = 0) -> Any:
    from engine.protocol import EngineLimits
    from engine.torch_engine import TorchEngine

    engine = TorchEngine(
        path, MEMORY_BYTES, EngineLimits(max_model_len=2048, max_running=8, kv_host_bytes=kv_host_bytes)
    )
    report = engine.load()
    engine.warm()
    return engine, report


def _sessions(path: Path) -> dict[str, list[float]]:
    """A conversation whose model sleeps and wakes: its KV parked in host memory, or lost."""
    import torch

    engine, _ = _loaded(path, kv_host_bytes=256 * 2**20)
    seen: dict[str, list[float]] = {name: [] for name in ("park_seconds", "copy_seconds", "ttft_kept", "ttft_lost")}
    for number in range(SESSION_SAMPLES + 1):
        history = _tokens(number, HISTORY_TOKENS)
        said = _answer(engine, history, 2)
        moves = engine._kv_cache.park()
        begin = time.perf_counter()
        engine._carrier.carry_out(moves)
        seen["park_seconds"].append(time.perf_counter() - begin)
        nbytes = len(moves) * engine._block_bytes
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        begin = time.perf_counter()
        target.copy_(source)
        seen["copy_seconds"].append(time.perf_counter() - begin)
        turn = [*history, *said, *_tokens(number + 1000, 20)]
        for name in ("ttft_kept", "ttft_lost"):
            engine.sleep()
            if name == "ttft_lost":
                engine._kv_cache.host.clear()
            begin = time.perf_counter()
            engine.wake()
            _answer(engine, turn, 1)
            seen[name].append(time.perf_counter() - begin)
        engine._kv_cache.pool.clear_cache()
        engine._kv_cache.host.clear()
    return {name: values[1:] for name, values in seen.items()}  # the first takes pages


def _busy(path: Path) -> dict[str, list[int]]:
    """What is held asleep, over cycles with work between them; the canary sees to it that the answers stay."""
    from engine.memory import held_bytes

    engine, _ = _loaded(path)
    held = []
    for cycle in range(BUSY_CYCLES):
        for prompt in range(2):
            _answer(engine, _tokens(cycle, 20 + (cycle * 2 + prompt) * 37 % 256), 6)
        engine.sleep()
        held.append(held_bytes())
        engine.wake()
    return {"held_bytes": held[SETTLED_CYCLES:]}


def _answer(engine: Any, prompt: list[int], new: int) -> list[int]:
    from engine.protocol import GenerationRequest, SamplingParams

    params = SamplingParams(new, 0, temperature=0, ignore_eos=True)
    engine.add(GenerationRequest("bench", 0, tuple(prompt), params, tenant="bench"))
    said: list[int] = []
    while engine.has_work():
        said += [token for output in engine.step() for token in output.token_ids]
    return said


def _tokens(seed: int, count: int) -> list[int]:
    return [300 + (seed * 7919 + n * n * 31 + n * 17) % 40_000 for n in range(count)]


WORK = {"sessions": _sessions, "busy": _busy, "cycles": _cycles, "memcpy": _memcpies, "load": _load, "floor": _floor}

if __name__ == "__main__":
    print(json.dumps(WORK[sys.argv[1]](Path(sys.argv[2]))))
