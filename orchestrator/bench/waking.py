"""Owns the sections of ``bench swap`` on one model that sleeps and wakes, with and without a conversation to keep."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.bench import engines
from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import measured

CYCLES = 9
HISTORY_TOKENS = 1_500
SESSION_SAMPLES = 5


def run(path: Path) -> list[Section]:
    seen: dict[str, list[float]] = measured("orchestrator.bench.waking", "cycles", str(path))
    kept: dict[str, list[float]] = measured("orchestrator.bench.waking", "sessions", str(path))
    return [*_waking(seen), *_conversations(kept)]


def _waking(seen: dict[str, list[float]]) -> list[Section]:
    canary = statistics.median(seen["canary"])
    return [
        section(
            "wake_vs_memcpy",
            _pairs(seen, "wake", "plain_memcpy"),
            "memcpy of the same bytes into fresh pages, in a process as it comes",
            "s",
            target="<=1.2",
            limit=f"reordering for decoding, in 2 MiB pages; the canary that follows takes {canary * 1000:.0f} ms more",
        ),
        section(
            "wake_vs_huge_memcpy",
            _pairs(seen, "wake", "huge_memcpy"),
            "the same memcpy into fresh 2 MiB pages, as our hosts have them",
            "s",
            limit="reordering moves small pieces; plain weights would wake faster, and decode at half the speed",
        ),
        section(
            "sleep_vs_wake",
            _pairs(seen, "sleep", "wake"),
            "wake",
            "s",
            target="<=0.3",
            limit="the kernel taking pages back; no KV is parked",
        ),
        section(
            "memory_returned",
            _pairs(seen, "asleep_bytes", "awake_less_weights_bytes"),
            "awake - weights",
            "bytes",
            target="<=1.05",
            limit="interpreter, libraries and allocator of a live process; awake, KV pages in use count too",
        ),
    ]


def _conversations(kept: dict[str, list[float]]) -> list[Section]:
    return [
        section(
            "park_vs_memcpy",
            _pairs(kept, "park", "copy"),
            f"a memcpy of the same bytes: KV of {HISTORY_TOKENS:,} tokens",
            "s",
            target="<=2",
            limit="a copy per layer and run of adjoining blocks",
        ),
        section(
            "switch_with_session",
            _pairs(kept, "ttft_kept", "ttft_lost"),
            f"the same with its {HISTORY_TOKENS:,} tokens computed again",
            "s",
            target="<=0.2",
            limit="waking and its canary, on both sides; then one step of 20 new tokens",
        ),
    ]


def _pairs(seen: dict[str, list[float]], ours: str, baseline: str) -> list[tuple[float, float]]:
    return list(zip(seen[ours], seen[baseline], strict=True))


# -- in the subprocess ------------------------------------------------------------------------


def _cycles(path: Path) -> dict[str, list[float]]:
    """Sleep and wake one engine, beside memcpys of as many bytes, in turns."""
    import torch

    engine = engines.loaded(path)
    torch.set_num_threads(1)  # both sides alike; the copy is bound by memory, not by threads
    with engines.plain_memcpy() as plain:
        samples = [_cycle(engine, plain) for _ in range(CYCLES + 1)][1:]  # the first takes pages
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _cycle(engine: Any, plain: Any) -> dict[str, float]:
    from engine.memory import held_bytes

    weight_bytes = engine.report.weight_bytes
    awake = held_bytes() - weight_bytes
    begin = time.perf_counter()
    engine.sleep()
    sleep = time.perf_counter() - begin
    asleep = held_bytes()
    copies = {"plain_memcpy": plain.ask("memcpy", weight_bytes), "huge_memcpy": engines.memcpy(weight_bytes)}
    woken = engine.wake()
    return {
        "sleep": sleep,
        "wake": woken.copy_seconds,
        "canary": woken.canary_seconds,
        **copies,
        "asleep_bytes": asleep,
        "awake_less_weights_bytes": awake,
    }


def _sessions(path: Path) -> dict[str, list[float]]:
    """A conversation whose model sleeps and wakes: its KV parked in host memory, or lost."""
    engine = engines.loaded(path, kv_host_bytes=256 * 2**20)
    samples = [_session(engine, number) for number in range(SESSION_SAMPLES + 1)][1:]  # the first takes pages
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _session(engine: Any, number: int) -> dict[str, float]:
    history = engines.tokens(number, HISTORY_TOKENS)
    said = engines.answer(engine, history, 2)
    moves = engine._kv_cache.park()
    begin = time.perf_counter()
    engine._carrier.carry_out(moves)
    seen = {"park": time.perf_counter() - begin, "copy": _copy(len(moves) * engine._block_bytes)}
    turn = [*history, *said, *engines.tokens(number + 1000, 20)]
    for name in ("ttft_kept", "ttft_lost"):
        engine.sleep()
        if name == "ttft_lost":
            engine._kv_cache.host.clear()
        begin = time.perf_counter()
        engine.wake()
        engines.answer(engine, turn, 1)
        seen[name] = time.perf_counter() - begin
    engine._kv_cache.pool.clear_cache()
    engine._kv_cache.host.clear()
    return seen


def _copy(nbytes: int) -> float:
    """Seconds, memory to memory whose pages are there."""
    import torch

    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin


if __name__ == "__main__":
    work = {"cycles": _cycles, "sessions": _sessions}[sys.argv[1]]
    print(json.dumps(engines.in_thread(lambda: work(Path(sys.argv[2])))))
