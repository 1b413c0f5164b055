"""Owns ``bench engine``: our engine against its peers on the same model, prompts and threads, in one run.

Peers run in subprocesses of their own, in turns with ours; each side takes the better of one thread and all of them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.bench.report import Section, section
from policies.errors import OrchestratorError

PAIRS = 3
PEERS = ("continuous", "padded", "one_by_one")
MEMORY_BYTES = 3 * 2**30
LOADS: dict[str, dict[str, Any]] = {
    "decode": {"prompts": [84] * 16, "new": 64, "at_once": 8},
    "mixed": {"prompts": [32, 64, 128, 256, 512, 1024], "new": 32, "at_once": 8},
}


def run(path: Path, *, pairs: int = PAIRS) -> list[Section]:
    """All sections for the model in ``path``."""
    return [
        _throughput("throughput_decode", "decode", ("continuous", "padded"), path, pairs, target=">=1.2"),
        *_mixed(path, pairs),
    ]


def _throughput(name: str, load: str, peers: tuple[str, ...], path: Path, pairs: int, *, target: str) -> Section:
    """Tokens per second of ours ÷ the best peer's. Peers are tried once to find the best, then paired with ours."""
    best = max(peers, key=lambda peer: _measure(peer, load, path))
    samples = [(_measure("ours", load, path), _measure(best, load, path)) for _ in range(pairs)]
    return section(
        name,
        samples,
        f"transformers {best}",
        "tokens/s",
        target=target,
        limit="float32 matrix products of few rows",
    )


def _mixed(path: Path, pairs: int) -> list[Section]:
    against_peers = _throughput("throughput_mixed", "mixed", PEERS, path, pairs, target=">=1.3")
    floor = [(_measure("ours", "mixed", path), _measure("floor", "mixed", path)) for _ in range(pairs)]
    against_floor = section(
        "throughput_mixed_floor",
        floor,
        "the same matrix products and nothing else",
        "tokens/s",
        limit="attention, norms, rotary and sampling, which the floor leaves out",
    )
    return [against_peers, against_floor]


def _measure(who: str, load: str, path: Path) -> float:
    """Tokens per second in a fresh process."""
    command = [sys.executable, "-m", "orchestrator.bench.engine", who, load, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise OrchestratorError(f"bench worker {who} {load} failed: {ended.stderr.strip().splitlines()[-1]}")
    return float(json.loads(ended.stdout.splitlines()[-1]))


# -- in the subprocess ------------------------------------------------------------------------


def _prompts(load: dict[str, Any]) -> list[list[int]]:
    """Different prompts without a common prefix, so that nothing is reused by anybody."""
    chooser = random.Random(7)
    return [[chooser.randrange(300, 40_000) for _ in range(length)] for length in load["prompts"]]


def _worker(who: str, load: dict[str, Any], path: Path) -> float:
    work = {"ours": _ours, "floor": _floor}.get(who) or _PEERS[who]
    prepared = work(path, load)
    return max(_rate(prepared, load, threads) for threads in _thread_counts())


def _rate(prepared: Callable[[], int], load: dict[str, Any], threads: int) -> float:
    import torch

    torch.set_num_threads(threads)
    begin = time.perf_counter()
    made = prepared()
    return made / (time.perf_counter() - begin)


def _thread_counts() -> list[int]:
    return sorted({1, len(os.sched_getaffinity(0))})


def _ours(path: Path, load: dict[str, Any]) -> Callable[[], int]:
    from engine.protocol import EngineLimits, GenerationRequest, SamplingParams
    from engine.torch_engine import TorchEngine

    engine = TorchEngine(path, MEMORY_BYTES, EngineLimits(max_model_len=2048, max_running=load["at_once"]))
    engine.load()
    engine.warm()
    runs = iter(range(1000))

    def go() -> int:
        run = next(runs)  # a tenant of its own: no run may reuse another's KV
        for number, prompt in enumerate(_prompts(load)):
            params = SamplingParams(load["new"], 0, temperature=0, ignore_eos=True)
            engine.add(GenerationRequest(f"{run}-{number}", 0, tuple(prompt), params, tenant=f"run{run}"))
        made = 0
        while engine.has_work():
            made += sum(len(output.token_ids) for output in engine.step())
        return made

    return go


def _load_model(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def _padded(path: Path, load: dict[str, Any]) -> Callable[[], int]:
    return _generate(path, load, load["at_once"])


def _one_by_one(path: Path, load: dict[str, Any]) -> Callable[[], int]:
    return _generate(path, load, 1)


def _generate(path: Path, load: dict[str, Any], at_once: int) -> Callable[[], int]:
    """transformers' ``generate`` over left-padded batches."""
    import torch

    model = _load_model(path)

    def go() -> int:
        prompts = _prompts(load)
        made = 0
        for start in range(0, len(prompts), at_once):
            batch = prompts[start : start + at_once]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=load["new"], min_new_tokens=load["new"], do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
            made += (int(out.shape[1]) - width) * len(batch)
        return made

    return go


def _continuous(path: Path, load: dict[str, Any]) -> Callable[[], int]:
    """transformers' own continuous batching."""
    from transformers import GenerationConfig

    model = _load_model(path)
    model.set_attn_implementation("paged|sdpa")
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=load["new"], do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def go() -> int:
        outputs = model.generate_batch(_prompts(load), generation_config=config, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return go


def _floor(path: Path, load: dict[str, Any]) -> Callable[[], int]:
    """The model's matrix products alone: each prompt once, then ``new`` steps of all rows; no attention, no norms."""
    import torch

    model = _load_model(path)
    body = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name]
    head = model.get_output_embeddings()

    def products(rows: int, sampled: int) -> None:
        for linear in body:
            linear(torch.ones(rows, linear.in_features))
        head(torch.ones(sampled, head.in_features))

    def go() -> int:
        with torch.inference_mode():
            for length in load["prompts"]:
                products(length, 1)
            rows = min(load["at_once"], len(load["prompts"]))
            made = int(load["new"]) * len(load["prompts"])
            for _ in range(made // rows):
                products(rows, rows)
        return made

    return go


_PEERS = {"continuous": _continuous, "padded": _padded, "one_by_one": _one_by_one}

if __name__ == "__main__":
    print(json.dumps(_worker(sys.argv[1], LOADS[sys.argv[2]], Path(sys.argv[3]))))
