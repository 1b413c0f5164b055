"""Owns ``bench engine``'s sections on contexts: what coming back to KV costs, against copying and computing it again.

One engine, in a process of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import measured

HISTORY_TOKENS = 1_500
KEPT_TOKENS = 1_000
TURN_TOKENS = 20
SAMPLES = 5
MEMORY_BYTES = 3 * 2**30
HOST_BYTES = 256 * 2**20


def run(path: Path) -> list[Section]:
    """All sections for the model in ``path``."""
    seen: dict[str, list[float]] = measured("orchestrator.bench.contexts", str(path))

    def pairs(ours: str, baseline: str) -> list[tuple[float, float]]:
        return list(zip(seen[ours], seen[baseline], strict=True))

    again = f"computing its {KEPT_TOKENS} tokens again"
    return [
        section(
            "second_turn_ttft",
            pairs("second_turn", "cold"),
            f"the same {HISTORY_TOKENS + TURN_TOKENS} tokens with nothing cached",
            "s",
            target="<=0.15",
            limit=f"one step of {TURN_TOKENS} new tokens; {seen['recomputed'][0]:.0f} known tokens computed again",
        ),
        section(
            "swap_resume",
            pairs("swap_in", "copy"),
            "a copy of the same bytes, memory to memory",
            "s",
            target="<=3",
            limit="planning the step, and a copy per layer and run of adjoining blocks",
        ),
        section(
            "swap_resume_vs_recompute", pairs("swap_in", "recompute"), again, "s", target="<=0.1", limit="as above"
        ),
        section(
            "checkpoint_restore",
            pairs("restore", "read_and_copy"),
            "a read of the same file and a copy of the same bytes",
            "s",
            target="<=3",
            limit="checksum, and copying into blocks, layer by layer",
        ),
        section(
            "checkpoint_restore_vs_recompute",
            pairs("restore", "recompute"),
            again,
            "s",
            target="<=0.1",
            limit="as above",
        ),
    ]


# -- in the subprocess ------------------------------------------------------------------------


class Measuring:
    """One engine, and the samples taken of it."""

    def __init__(self, path: Path) -> None:
        from engine.protocol import EngineLimits
        from engine.torch_engine import TorchEngine

        limits = EngineLimits(max_model_len=2048, max_running=8, kv_host_bytes=HOST_BYTES)
        self.engine: Any = TorchEngine(path, MEMORY_BYTES, limits)
        self.engine.load()
        self.engine.warm()
        self.seen: dict[str, list[float]] = {}

    def sample(self, number: int, directory: Path) -> None:
        self._second_turn(number)
        self._swap(number)
        self._checkpoint(number, directory)

    def _second_turn(self, number: int) -> None:
        history = _tokens(number, HISTORY_TOKENS)
        self._add("first", history, 2)
        said = self._drain()
        turn = [*history, *said, *_tokens(number + 1000, TURN_TOKENS)]
        self._record("second_turn", self._first_token("second", turn))
        self._record("recomputed", float(len(history) + len(said) - self.cached))
        self._forget()
        self._record("cold", self._first_token("cold", turn))

    def _swap(self, number: int) -> None:
        """Preempted with its KV kept, others take its blocks, and it comes back."""
        scheduler = self.engine._scheduler
        self._add("swapped", _tokens(number + 2000, KEPT_TOKENS), 8)
        while scheduler.waiting or scheduler.running[0].num_generated < 2:
            self.engine.step()
        context = scheduler.running[0]
        scheduler._preempt(context, 0.0, "bench", keep=True)
        blocks = scheduler.pool.allocate(scheduler.pool.num_free)
        self.engine._move(scheduler._planned_moves())
        scheduler.pool.release(blocks, 0)
        scheduler.pool.complete(0)
        begin = time.perf_counter()
        plan = self.engine._carry_out(scheduler.schedule(time.monotonic(), time.time()))
        self._record("swap_in", time.perf_counter() - begin)
        self._record("copy", self._copy(len(plan.moves)))
        scheduler._preempt(context, 0.0, "bench", keep=False)
        self._forget()
        begin = time.perf_counter()
        self._until_caught_up(context)
        self._record("recompute", time.perf_counter() - begin)
        self._drain()

    def _checkpoint(self, number: int, directory: Path) -> None:
        path = directory / "checkpoint"
        self._add("saved", _tokens(number + 3000, KEPT_TOKENS), 8)
        while not self.engine._scheduler.running or self.engine._scheduler.running[0].num_generated < 2:
            self.engine.step()
        self.engine.save("saved", 0, path)
        self.engine.cancel("saved", 0, "bench")
        self._forget()
        begin = time.perf_counter()
        self.engine.restore(path, "bench")
        self._record("restore", time.perf_counter() - begin)
        self._drain()
        begin = time.perf_counter()
        path.read_bytes()
        read = time.perf_counter() - begin
        self._record("read_and_copy", read + self._copy(KEPT_TOKENS // self.engine.limits.block_size))

    def _copy(self, blocks: int) -> float:
        import torch

        nbytes = blocks * self.engine._kv.nbytes // len(self.engine._scheduler.pool)
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        begin = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin

    def _add(self, name: str, prompt: list[int], new: int) -> None:
        from engine.protocol import GenerationRequest, SamplingParams

        params = SamplingParams(new, 0, temperature=0, ignore_eos=True)
        self.engine.add(GenerationRequest(name, 0, tuple(prompt), params, tenant="bench"))

    def _first_token(self, name: str, prompt: list[int]) -> float:
        begin = time.perf_counter()
        self._add(name, prompt, 1)
        (output,) = self._outputs()
        self.cached = output.usage.cached_tokens
        return time.perf_counter() - begin

    def _until_caught_up(self, context: Any) -> None:
        known = context.num_tokens
        while context.num_computed < known:
            self.engine.step()

    def _drain(self) -> list[int]:
        return [token for output in self._outputs() for token in output.token_ids]

    def _outputs(self) -> list[Any]:
        outputs: list[Any] = []
        while self.engine.has_work():
            outputs += self.engine.step()
        return outputs

    def _forget(self) -> None:
        self.engine._scheduler.pool.clear_cache()
        self.engine._scheduler.host.clear()

    def _record(self, name: str, value: float) -> None:
        self.seen.setdefault(name, []).append(value)


def _tokens(seed: int, count: int) -> list[int]:
    return [300 + (seed * 7919 + n * n * 31 + n * 17) % 40_000 for n in range(count)]


def _measure(path: Path) -> dict[str, list[float]]:
    measuring = Measuring(path)
    with tempfile.TemporaryDirectory() as directory:
        measuring.sample(0, Path(directory))
        measuring.seen.clear()  # the first sample takes pages and warms caches
        for number in range(1, SAMPLES + 1):
            measuring.sample(number, Path(directory))
    return measuring.seen


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]))))
