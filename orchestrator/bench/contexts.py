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
DISK_BYTES = 2**30
WASTE_CONTEXTS = 8


def run(path: Path) -> list[Section]:
    """All sections for the model in ``path``."""
    seen: dict[str, list[float]] = measured("orchestrator.bench.contexts", str(path))
    return [*_turns(seen), *_swaps(seen), *_disk(seen), *_checkpoints(seen)]


def _pairs(seen: dict[str, list[float]], ours: str, baseline: str) -> list[tuple[float, float]]:
    return list(zip(seen[ours], seen[baseline], strict=True))


def _turns(seen: dict[str, list[float]]) -> list[Section]:
    return [
        section(
            "second_turn_ttft",
            _pairs(seen, "second_turn", "cold"),
            f"the same {HISTORY_TOKENS + TURN_TOKENS} tokens with nothing cached",
            "s",
            target="<=0.15",
            limit=f"one step of {TURN_TOKENS} new tokens; {seen['recomputed'][0]:.0f} known tokens computed again",
        ),
        section(
            "kv_waste",
            _pairs(seen, "slots_held", "slots_of_tokens"),
            f"slots of their tokens, {WASTE_CONTEXTS} running contexts",
            "slots",
            target="<=1.1",
            limit=f"the tail of each last block; slots beyond those: {seen['slots_unowned'][0]:.0f}",
        ),
    ]


def _swaps(seen: dict[str, list[float]]) -> list[Section]:
    return [
        section(
            "swap_resume",
            _pairs(seen, "swap_in", "copy"),
            "a copy of the same bytes, memory to memory",
            "s",
            target="<=3",
            limit="planning the step, and a copy per layer and run of adjoining blocks",
        ),
        _against_computing(seen, "swap_resume", "swap_in"),
    ]


def _disk(seen: dict[str, list[float]]) -> list[Section]:
    return [
        section(
            "disk_restore",
            _pairs(seen, "disk_in", "read_file_and_copy"),
            f"a read of the same {KEPT_TOKENS // 16} files and a copy of the same bytes",
            "s",
            target="<=3",
            limit="a checksum over all of it, and copying into blocks, layer by layer, in the disk's thread",
        ),
        _against_computing(seen, "disk_restore", "disk_in"),
    ]


def _checkpoints(seen: dict[str, list[float]]) -> list[Section]:
    return [
        section(
            "checkpoint_restore",
            _pairs(seen, "restore", "read_and_copy"),
            "a read of the same file and a copy of the same bytes",
            "s",
            target="<=3",
            limit="checksum, and copying into blocks, layer by layer",
        ),
        _against_computing(seen, "checkpoint_restore", "restore"),
    ]


def _against_computing(seen: dict[str, list[float]], name: str, ours: str) -> Section:
    again = f"computing its {KEPT_TOKENS} tokens again"
    return section(
        f"{name}_vs_recompute", _pairs(seen, ours, "recompute"), again, "s", target="<=0.1", limit="as above"
    )


# -- in the subprocess ------------------------------------------------------------------------


class Measuring:
    """One engine, and the samples taken of it."""

    def __init__(self, path: Path, directory: Path) -> None:
        from engine.protocol import EngineLimits
        from engine.torch_engine import TorchEngine

        self.disk = directory / "kv"
        limits = EngineLimits(
            max_model_len=2048,
            max_running=8,
            kv_host_bytes=HOST_BYTES,
            kv_disk_bytes=DISK_BYTES,
            kv_disk=str(self.disk),
        )
        self.engine: Any = TorchEngine(path, MEMORY_BYTES, limits)
        self.engine.load()
        self.engine.warm()
        self.seen: dict[str, list[float]] = {}

    def sample(self, number: int, directory: Path) -> None:
        self._second_turn(number)
        self._swap(number)
        self._checkpoint(number, directory)
        self._disk(number)
        self._waste(number)

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
        blocks = scheduler.kv.pool.allocate(scheduler.kv.pool.num_free)
        self.engine._carrier.carry_out(scheduler.kv.planned_moves())
        scheduler.kv.pool.release(blocks, 0)
        scheduler.kv.pool.complete(0)
        begin = time.perf_counter()
        plan = self.engine._carry_out_plan(scheduler.schedule(time.monotonic(), time.time()))
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

    def _disk(self, number: int) -> None:
        """A conversation whose KV is on disk alone goes on, in a process that is warm."""
        engine, disk = self.engine, self.engine._disk
        history = _tokens(number + 4000, KEPT_TOKENS)
        self._add("parked", history, 1, f"talk{number}")  # what belongs to nobody is not worth a file
        self._drain()
        for spill in engine._kv_cache.park_on_disk():
            assert disk.wait_room(time.monotonic() + 60)
            engine._carrier.spill([spill])
        assert disk.flush(60)
        self._forget()
        self._add("back", [*history, 7], 1, f"talk{number}")
        begin = time.perf_counter()
        engine._scheduler.schedule(time.monotonic(), time.time())
        engine._kv_cache.launched()
        while not engine._scheduler.running:
            disk.wait(1.0)
            engine._scheduler._take_up(time.monotonic())
        self._record("disk_in", time.perf_counter() - begin)
        (context,) = engine._scheduler.running
        assert context.num_computed == KEPT_TOKENS // 16 * 16, context.events
        engine.cancel("back", 0, "bench")
        files = sorted(self.disk.rglob("*.kv"), key=lambda file: file.stat().st_mtime)[-(KEPT_TOKENS // 16) :]
        begin = time.perf_counter()
        for file in files:
            file.read_bytes()
        read = time.perf_counter() - begin
        self._record("read_file_and_copy", read + self._copy(len(files)))
        engine._kv_cache.forget(context.block_keys)
        assert disk.flush(60)

    def _waste(self, number: int) -> None:
        """Slots held by running contexts of all lengths, and those no token explains."""
        engine, size = self.engine, self.engine.limits.block_size
        for context in range(WASTE_CONTEXTS):
            self._add(f"w{context}", _tokens(number + 5000 + context, 40 + 83 * context), 8)
        while engine._scheduler.waiting or any(c.num_generated < 2 for c in engine._scheduler.running):
            engine.step()
        running = engine._scheduler.running
        held = engine.stats().kv_blocks_used * size
        tails = sum(-context.num_tokens % size for context in running)
        self._record("slots_held", float(held))
        self._record("slots_of_tokens", float(sum(context.num_tokens for context in running)))
        self._record("slots_unowned", float(held - tails - sum(context.num_tokens for context in running)))
        self._drain()
        self._forget()

    def _copy(self, blocks: int) -> float:
        import torch

        nbytes = blocks * self.engine._kv.nbytes // len(self.engine._kv_cache.pool)
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        begin = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin

    def _add(self, name: str, prompt: list[int], new: int, session: str | None = None) -> None:
        from engine.protocol import GenerationRequest, SamplingParams

        params = SamplingParams(new, 0, temperature=0, ignore_eos=True)
        self.engine.add(GenerationRequest(name, 0, tuple(prompt), params, tenant="bench", session=session))

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
        self.engine._kv_cache.pool.clear_cache()
        self.engine._kv_cache.host.clear()

    def _record(self, name: str, value: float) -> None:
        self.seen.setdefault(name, []).append(value)


def _tokens(seed: int, count: int) -> list[int]:
    return [300 + (seed * 7919 + n * n * 31 + n * 17) % 40_000 for n in range(count)]


def _measure(path: Path) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as directory:
        measuring = Measuring(path, Path(directory))
        measuring.sample(0, Path(directory))
        measuring.seen.clear()  # the first sample takes pages and warms caches
        for number in range(1, SAMPLES + 1):
            measuring.sample(number, Path(directory))
    return measuring.seen


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]))))
