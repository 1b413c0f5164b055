"""Owns the processes that ``bench engine`` compares: our engine, its peers, and the floor, each in one of its own.

A worker loads the model once and then measures a load each time it is asked, so that sides can take turns in one run.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.memory import PROCESS_ENVIRONMENT
from policies.errors import OrchestratorError

MEMORY_BYTES = 3 * 2**30
FLOOR = "the same matrix products as torch multiplies them fastest, and nothing else"


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts (lengths in tokens) that arrive at once, each answered with ``new`` tokens, greedily."""

    prompts: tuple[int, ...]
    new: int
    at_once: int = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a load."""

    tokens_per_second: float
    ttft_seconds: float | None = None  # median over the requests


LOADS = {
    "decode": Load((84,) * 16, 64),
    "mixed": Load((32, 64, 128, 256, 512, 1024), 32),
    "one": Load((84,), 16),
    "long": Load((2048, 2048), 16, at_once=2),
}
PROBE = Load((84,) * 8, 4)  # on which the number of threads is chosen


def measured(module: str, *args: str, huge_pages: bool = True) -> Any:
    """What ``python -m module`` prints in its last line, as JSON; for sections that take one process, once.

    ``huge_pages``: with the environment that engine hosts have.
    """
    command = [sys.executable, "-m", module, *args]
    environment = {**os.environ, **(PROCESS_ENVIRONMENT if huge_pages else {})}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode:
        words = ended.stderr.strip().splitlines()[-1:]
        raise OrchestratorError(f"bench worker {' '.join([module, *args])} failed: {' '.join(words)}")
    return json.loads(ended.stdout.splitlines()[-1])


class Worker:
    """One side, in a process of its own that stays up until ``close``."""

    def __init__(self, who: str, path: Path, shared: Path) -> None:
        """``shared``: what engines keep for each other; peers have nothing of the kind."""
        self.who = who
        command = [sys.executable, "-m", "orchestrator.bench.workers", who, str(path), str(shared)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **PROCESS_ENVIRONMENT},  # all sides alike
        )

    def measure(self, load: str) -> Measured:
        """Run a load of ``LOADS``; OrchestratorError with the worker's last words when it dies."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(load + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died(load)
        for line in self._process.stdout:
            if line.startswith("{"):
                return Measured(**json.loads(line))
        self._died(load)
        raise AssertionError

    def _died(self, load: str) -> None:
        assert self._process.stderr is not None
        words = self._process.stderr.read().strip().splitlines()[-1:]
        raise OrchestratorError(f"bench worker {self.who} {load} failed: {' '.join(words)}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# -- in the worker's process --------------------------------------------------------------------

Run = Callable[[Load], Measured]


def prompts(load: Load) -> list[list[int]]:
    """Random prompts without a common prefix, so that nothing is reused by anybody."""
    chooser = random.Random(7)
    return [[chooser.randrange(300, 40_000) for _ in range(length)] for length in load.prompts]


def our_engine(path: Path, shared: Path, *, max_running: int = 8, step_tokens: int = 256) -> Any:
    """Loaded and warm, its layers compiled."""
    from engine.protocol import EngineLimits, Places
    from engine.torch_engine import TorchEngine

    limits = EngineLimits(max_model_len=4096, max_running=max_running, step_tokens=step_tokens, prompt_step_tokens=512)
    places = Places(*(str(shared / name) for name in ("recipes", "layers", "cores")))
    engine = TorchEngine(path, MEMORY_BYTES, limits, places=places)
    engine.load()
    engine.warm()
    engine.settle()
    engine._kv._flat.normal_()  # takes the pool's pages, which a service has after its first minutes
    return engine


def _ours(path: Path, shared: Path) -> Run:
    from engine.protocol import GenerationRequest, SamplingParams

    engine = our_engine(path, shared)
    runs = iter(range(1_000_000))

    def run(load: Load) -> Measured:
        number = next(runs)  # a tenant of its own: no run may reuse another's KV
        begin = time.perf_counter()
        for index, prompt in enumerate(prompts(load)):
            params = SamplingParams(load.new, 0, temperature=0, ignore_eos=True)
            engine.add(GenerationRequest(f"{number}-{index}", 0, tuple(prompt), params, tenant=f"run{number}"))
        made = 0
        first: dict[str, float] = {}
        while engine.has_work():
            for output in engine.step():
                made += len(output.token_ids)
                first.setdefault(output.request_id, time.perf_counter() - begin)
        return Measured(made / (time.perf_counter() - begin), statistics.median(first.values()))

    return run


def plain_model(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def _padded(path: Path, _: Path) -> Run:
    return _with_best_threads(_generate(path, together=True))


def _one_by_one(path: Path, _: Path) -> Run:
    return _with_best_threads(_generate(path, together=False))


def _generate(path: Path, *, together: bool) -> Run:
    """transformers' ``generate`` over left-padded batches, or prompt by prompt."""
    import torch

    model = plain_model(path)

    def run(load: Load) -> Measured:
        waiting = prompts(load)
        size = load.at_once if together else 1
        made = 0
        begin = time.perf_counter()
        for start in range(0, len(waiting), size):
            batch = waiting[start : start + size]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=load.new, min_new_tokens=load.new, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
            made += (int(out.shape[1]) - width) * len(batch)
        return Measured(made / (time.perf_counter() - begin))

    return run


def _continuous(path: Path, _: Path) -> Run:
    """transformers' own continuous batching."""
    from transformers import GenerationConfig

    model = plain_model(path)
    model.set_attn_implementation("paged|sdpa")

    def run(load: Load) -> Measured:
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=load.new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        begin = time.perf_counter()
        outputs = model.generate_batch(prompts(load), generation_config=config, progress_bar=False)
        made = sum(len(output.generated_tokens) for output in outputs.values())
        return Measured(made / (time.perf_counter() - begin))

    return _with_best_threads(run)


def floor_products(model: Any) -> Callable[[int, int], None]:
    """The matrix products of a plain model alone, in torch's fastest form, of so many rows and so many sampled ones."""
    import torch

    from engine import linear

    forms: dict[int, Any] = {}
    for name in linear.choose(model, {}):
        layer = model.get_submodule(name)
        forms[id(layer)] = linear.PackedLinear(layer)
        forms[id(layer)].pack(linear.reordered(layer.weight))
    head = model.get_output_embeddings()
    body = [forms.get(id(m), m) for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    last = forms.get(id(head), head)

    def products(rows: int, sampled: int) -> None:
        with torch.inference_mode():
            for layer in body:
                layer(torch.ones(rows, layer.in_features))
            last(torch.ones(sampled, last.in_features))

    return products


def _floor(path: Path, _: Path) -> Run:
    """Each prompt once, then every row of every step."""
    products = floor_products(plain_model(path))

    def run(load: Load) -> Measured:
        begin = time.perf_counter()
        for length in load.prompts:
            products(length, 1)
        rows = min(load.at_once, len(load.prompts))
        made = load.new * len(load.prompts)
        for _ in range(made // rows):
            products(rows, rows)
        return Measured(made / (time.perf_counter() - begin))

    return _with_best_threads(run)


def _with_best_threads(run: Run) -> Run:
    """Sets one thread or all of them for good, whichever runs a small load faster now."""
    import torch

    rates = {}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        torch.set_num_threads(threads)
        run(PROBE)
        rates[threads] = run(PROBE).tokens_per_second
    torch.set_num_threads(max(rates, key=lambda threads: rates[threads]))
    return run


SIDES: dict[str, Callable[[Path, Path], Run]] = {
    "ours": _ours,
    "continuous": _continuous,
    "padded": _padded,
    "one_by_one": _one_by_one,
    "floor": _floor,
}


def _serve(who: str, path: Path, shared: Path, asked: Iterable[str]) -> None:
    run = SIDES[who](path, shared)
    for name in asked:
        print(json.dumps(asdict(run(LOADS[name.strip()]))), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.stdin)
