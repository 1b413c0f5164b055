"""Random operations on the real engine: whatever happens to a generation, it says what it would have said undisturbed.

    python -m tests.acceptance.context_storm                 # 10,000 operations
    python -m tests.acceptance.context_storm --operations 500 --seed 3
    python -m tests.acceptance.context_storm --window 20     # a model none of whose layers sees farther than 20 tokens

A tiny model of a real architecture (random weights, float32), a KV pool far too small for what is asked of it, host
memory too small for what leaves it, and a disk too small for what leaves that. Operations: add (alone or several of
one prompt), step, cancel in any state, preempt (kept or computed again), let others take every free block, checkpoint
and restore, sleep and wake, shrink and grow the pool, delete a session, copies that fail, a disk that loses or damages
files, scores that are not finite. After each one the books must balance; what a generation said is compared with an
undisturbed run in another engine.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.protocol import EngineLimits, GenerationRequest, SamplingParams
from engine.tiers import Move
from policies.errors import EngineError, QueueFull, RequestTooLarge
from tests.engine_helpers import tiny_llama, tiny_mistral, with_pool

BLOCK = 8
POOL_BLOCKS = 24
HOST_BLOCKS = 12
DISK_BYTES = 400_000  # some forty blocks with their headers
LIMITS = EngineLimits(
    max_model_len=160, block_size=BLOCK, step_tokens=48, max_running=5, max_waiting=8, kv_host_bytes=2**20
)
PROMPTS = 12
SESSIONS = 6
PIN_BYTES = 6 * 10_000
MOST_LIVE = 7


class Storm:
    """One run. ``violations`` says what went wrong; empty when nothing did."""

    def __init__(self, path: Path, directory: Path, seed: int) -> None:
        self._chooser = random.Random(seed)
        self._directory = directory
        self._kv = directory / "kv"
        limits = replace(LIMITS, kv_disk=str(self._kv), kv_disk_bytes=DISK_BYTES)
        self._engine = _engine(path, limits, host_blocks=HOST_BLOCKS)
        self._oracle = _engine(path, LIMITS, host_blocks=0)
        self._prompts = self._make_prompts()
        self._expected: dict[tuple[int, float], tuple[int, ...]] = {}
        self._asked: dict[str, tuple[int, float]] = {}  # live generations → what they are
        self._said: dict[str, list[int]] = {}
        self._numbers = iter(range(10**9))
        self._move = self._engine._carrier._move
        self._compute = self._engine._compute
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def run(self, operations: int) -> None:
        rates = {
            self.add: 10, self.step: 30, self.cancel: 2, self.preempt: 4, self.evict: 2, self.checkpoint: 2,
            self.sleep: 1, self.fail_copies: 1, self.fail_scores: 1, self.resize: 1, self.forget: 1, self.hurt_disk: 1,
        }  # fmt: skip
        for number in range(operations):
            operation = self._chooser.choices(list(rates), list(rates.values()))[0]
            operation()
            self.counts[operation.__name__] += 1
            self._check(f"after operation {number}, {operation.__name__}")
        while self._engine.has_work():
            self.step()
        self._engine.sleep()
        self._check("at the end")
        stats = self._engine.stats()
        if stats.kv_blocks_used:
            self.violations.append(f"{stats.kv_blocks_used} blocks are held by nobody")
        self.counts["blocks to host memory"] = stats.kv_blocks_moved_out
        self.counts["blocks from host memory"] = stats.kv_blocks_moved_in
        self.counts["blocks to disk"], self.counts["blocks from disk"] = stats.kv_disk.written, stats.kv_disk.fetched
        self.counts["blocks not found on disk"] = stats.kv_disk.missed
        self._engine.close()

    # -- operations ----------------------------------------------------------------------------

    def add(self) -> None:
        if len(self._asked) >= MOST_LIVE:
            return self.step()
        which = (self._chooser.randrange(PROMPTS), self._chooser.choice([0.0, 0.8]))
        group = f"group{next(self._numbers)}"
        for _ in range(self._chooser.choice([1, 1, 1, 2, 3])):
            name = f"g{next(self._numbers)}"
            session = f"acme/s{self._chooser.randrange(SESSIONS)}"
            pin = self._chooser.choice([0.0, 0.0, 5.0])
            asked = replace(
                self._request(name, which), group=group, session=session, pin_seconds=pin, pin_bytes=PIN_BYTES
            )
            try:
                self._engine.add(asked)
            except (QueueFull, RequestTooLarge):
                return None
            self._asked[name], self._said[name] = which, []
        return None

    def step(self) -> None:
        for _ in range(self._chooser.randrange(1, 4)):
            if self._engine.has_work():
                self._take(self._engine.step())

    def cancel(self) -> None:
        name = self._any()
        if name is not None:
            self._engine.cancel(name, 0, "storm")
            self._forget(name)

    def preempt(self) -> None:
        scheduler = self._engine._scheduler
        if scheduler.running:
            victim = self._chooser.choice(scheduler.running)
            scheduler._preempt(victim, time.monotonic(), "storm", keep=self._chooser.random() < 0.7)

    def evict(self) -> None:
        """Others take every free block, and give it back with other content."""
        scheduler = self._engine._scheduler
        blocks = scheduler.kv.pool.allocate(scheduler.kv.pool.num_free)
        self._engine._carrier.carry_out(scheduler.kv.planned_moves())
        for row in self._engine._kv._rows(BLOCK):
            row[blocks] = float("nan")
        scheduler.kv.pool.release(blocks, 0)
        scheduler.kv.pool.complete(0)

    def checkpoint(self) -> None:
        name = self._any()
        if name is None:
            return
        path = self._directory / "storm"
        self._engine.save(name, 0, path)
        self._engine.cancel(name, 0, "saved")
        if self._chooser.random() < 0.3:
            self.evict()
        try:
            restored = self._engine.restore(path, "acme")
        except QueueFull:
            self._forget(name)
            return
        if list(restored.delivered_token_ids) != self._said[name]:
            self.violations.append(f"{name}: restored with {restored.delivered_token_ids}, said {self._said[name]}")

    def sleep(self) -> None:
        while self._engine.has_work():
            self._take(self._engine.step())
        self._engine.sleep()
        self._engine.wake()

    def resize(self) -> None:
        """Any size from a third of the pool to all of it; what is given back reads as zeros, and here as NaN."""
        engine = self._engine
        engine.resize_kv(self._chooser.randrange(POOL_BLOCKS // 3, POOL_BLOCKS + 1) * engine._block_bytes)
        for row in engine._kv._rows(BLOCK):
            row[engine._kv_cache.pool.end :] = float("nan")

    def forget(self) -> None:
        self._engine.forget_session(f"acme/s{self._chooser.randrange(SESSIONS)}")

    def hurt_disk(self) -> None:
        """A file is damaged or lost, or the whole directory."""
        files = sorted(self._kv.rglob("*.kv"))
        if not files or self._chooser.random() < 0.1:
            shutil.rmtree(self._kv, ignore_errors=True)
        elif self._chooser.random() < 0.5:
            self._chooser.choice(files).unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError), self._chooser.choice(files).open("r+b") as file:
                file.seek(-9, 2)
                file.write(b"storm")

    def fail_copies(self) -> None:
        """The next copies fail, half done."""

        def fails(moves: Sequence[Move]) -> None:
            self._engine._carrier._move = self._move
            self._move(moves[: len(moves) // 2])
            raise MemoryError("storm")

        self._engine._carrier._move = fails
        self.step()
        self._engine._carrier._move = self._move

    def fail_scores(self) -> None:
        """One row of the next step is not finite: that generation fails, the others do not notice."""

        def fails(chunks: Any) -> Any:
            self._engine._compute = self._compute
            choices = self._compute(chunks)
            return [None, *choices[1:]] if choices else choices

        self._engine._compute = fails
        if self._engine.has_work():
            self._take(self._engine.step(), failing=True)
        self._engine._compute = self._compute

    # -- inside --------------------------------------------------------------------------------

    def _take(self, outputs: Sequence[Any], failing: bool = False) -> None:
        for output in outputs:
            name = output.request_id
            self._said[name] += output.token_ids
            if output.error is not None:
                if not failing:
                    self.violations.append(f"{name} failed: {output.error.message}")
                self._forget(name)
            elif output.finish_reason is not None:
                self._compare(name)

    def _compare(self, name: str) -> None:
        expected = self._undisturbed(self._asked[name])
        if tuple(self._said[name]) != expected:
            self.violations.append(f"{name} {self._asked[name]}: said {self._said[name]}, undisturbed {expected}")
        self.counts["finished, as undisturbed"] += tuple(self._said[name]) == expected
        self._forget(name)

    def _undisturbed(self, which: tuple[int, float]) -> tuple[int, ...]:
        if which not in self._expected:
            self._oracle.add(self._request("oracle", which))
            said: list[int] = []
            while self._oracle.has_work():
                said += [token for output in self._oracle.step() for token in output.token_ids]
            self._oracle._kv_cache.pool.clear_cache()
            self._expected[which] = tuple(said)
        return self._expected[which]

    def _check(self, when: str) -> None:
        try:
            self._engine.check()
        except EngineError as error:
            self.violations.append(f"{when}: {error.message}")
        live = {context.request.request_id for context in self._engine._contexts.values()}
        if live != set(self._asked):
            self.violations.append(f"{when}: live are {sorted(live)}, should be {sorted(self._asked)}")

    def _request(self, name: str, which: tuple[int, float]) -> GenerationRequest:
        number, temperature = which
        params = SamplingParams(8 + 5 * (number % 6), 7, temperature=temperature, ignore_eos=True)
        return GenerationRequest(name, 0, self._prompts[number], params, "acme", arrival=time.time())

    def _make_prompts(self) -> list[tuple[int, ...]]:
        """Some begin alike, to different lengths: blocks are shared."""
        common = [self._chooser.randrange(2, 320) for _ in range(80)]
        return [
            tuple(common[: 8 * (number % 9)] + [self._chooser.randrange(2, 320) for _ in range(5 + 4 * (number % 5))])
            for number in range(PROMPTS)
        ]

    def _any(self) -> str | None:
        return self._chooser.choice(sorted(self._asked)) if self._asked else None

    def _forget(self, name: str) -> None:
        del self._asked[name], self._said[name]


def _engine(path: Path, limits: EngineLimits, host_blocks: int) -> Any:
    import torch

    from engine.torch_engine import TorchEngine

    engine: Any = TorchEngine(path, 2**30, limits)
    engine.load()
    torch.set_num_threads(1)
    engine.warm()
    engine._governor._threads = 1
    with_pool(engine, POOL_BLOCKS, host_blocks, disk=engine._disk)
    return engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--window", type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = tiny_mistral(Path(name), given.window) if given.window else tiny_llama(Path(name))
        storm = Storm(path, Path(name), given.seed)
        begin = time.monotonic()
        storm.run(given.operations)
    table = Table("WHAT", "TIMES", title=f"seed {given.seed}, {time.monotonic() - begin:.0f} s")
    for what, times in sorted(storm.counts.items()):
        table.add_row(what, f"{times:,}")
    Console().print(table)
    for violation in storm.violations[:20]:
        print(violation)
    print(f"violations: {len(storm.violations)}")
    return 1 if storm.violations else 0


if __name__ == "__main__":
    sys.exit(main())
