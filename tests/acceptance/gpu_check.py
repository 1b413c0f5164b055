"""What only a machine with a GPU can show: the kernels and a whole engine on it, right first, then how fast.

    python -m tests.acceptance.gpu_check               # on a CUDA device: under 5 minutes
    python -m tests.acceptance.gpu_check --rehearse    # the same program on the CPU, tiny, kernels interpreted

Nothing is fetched: the model is a llama of random weights, made on the spot. Prints one short table at the end. Exit
code 1 if anything is wrong, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.attention.kv import KVMemory, LayerShape
from engine.attention.step import Score, Span
from engine.canary import made_up_step
from engine.protocol import EngineLimits
from tests.attention_cases import Case, Part, answers
from tests.engine_helpers import request, save_tiny

KERNEL_BOUNDS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}  # absolute, of values around 1
OWN_ERROR = 2.0  # our error in bfloat16 ÷ that of transformers' own bfloat16, both against its float32
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Size:
    """How large everything is."""

    device: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    memory_bytes: int
    rows: int  # decoding at once
    keys: int  # that each sees, where attention's bandwidth is measured
    new_tokens: int


WHOLE = Size("cuda", 2048, 16, 32, 8, 32_000, 24 * 2**30, 64, 4096, 128)  # about 1.1 billion parameters
REHEARSAL = Size("cpu", 64, 2, 4, 2, 320, 2 * 2**30, 2, 40, 4)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    what: str
    found: str
    good: bool | None = None  # None: a figure, not a check


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny, kernels interpreted")
    options = parser.parse_args(arguments)
    if options.rehearse and "TRITON_INTERPRET" not in os.environ:  # Triton decides when it is imported
        again = [sys.executable, "-m", "tests.acceptance.gpu_check", "--rehearse"]
        return subprocess.call(again, env=os.environ | {"TRITON_INTERPRET": "1"})
    if not options.rehearse and not torch.cuda.is_available():
        print("no CUDA device is to be seen by torch (is it a CPU build?); --rehearse runs the program without one")
        return 2
    size = REHEARSAL if options.rehearse else WHOLE
    begin, lines, console = time.monotonic(), [], Console(width=120)
    for part in (kernels, attention_bandwidth, engine):
        console.print(f"{time.monotonic() - begin:5.0f} s  {part.__name__.replace('_', ' ')}")
        lines += list(part(size))
    name = torch.cuda.get_device_name() if size.device == "cuda" else "CPU, kernels interpreted: a rehearsal"
    table = Table("what", "found", "", title=f"{name}; torch {torch.__version__}; {time.monotonic() - begin:.0f} s")
    for line in lines:
        table.add_row(line.what, line.found, {True: "right", False: "WRONG", None: ""}[line.good])
    console.print(table)
    return 1 if any(line.good is False for line in lines) else 0


def kernels(size: Size) -> Iterator[Line]:
    """Every kernel against the definition in float64, poisoned memory around it."""
    from engine.attention.triton_step import TritonStep

    steps = ((Part(0, 40, False), Part(30, 20, True)), (Part(1500, 1, False), Part(3, 1, True), Part(90, 7, False)))
    dtypes = ("float32", "float16") if size.device == "cpu" else tuple(KERNEL_BOUNDS)  # see kernels.py on bfloat16
    for dtype in dtypes:
        worst = 0.0
        for dim in (64,) if size.device == "cpu" else (64, 80, 128, 256):
            for parts in steps:
                for window, softcap, sinks in ((None, None, False), (40, 20.0, True)):
                    case = Case(2, 4, dim, 0, parts, window, softcap, sinks, dim**-0.5, dim)
                    ours, theirs = answers(case, TritonStep, dtype, size.device)
                    worst = max(worst, float((ours - theirs).abs().max()))
        bound = KERNEL_BOUNDS[dtype]
        yield Line(f"kernels, {dtype}: largest error", f"{worst:.1e} (bound {bound:.0e})", worst <= bound)


def attention_bandwidth(size: Size) -> Iterator[Line]:
    """Decoding reads every key and value once: its bytes a second against a plain copy's on the device."""
    from engine.attention.triton_step import TritonStep

    dim, block = 128 if size.device == "cuda" else 16, 16
    dtype = torch.bfloat16 if size.device == "cuda" else torch.float32
    blocks = -(-size.keys // block)
    kv = KVMemory({0: LayerShape(size.kv_heads, dim, dim)}, size.rows * blocks * block, dtype, size.device)
    kv._flat.normal_()
    order = torch.randperm(size.rows * blocks).view(size.rows, blocks).tolist()
    for rows in (1, size.rows):
        spans = [
            Span.over(table, block, first=row, start=size.keys - 1, count=1) for row, table in enumerate(order[:rows])
        ]
        step = TritonStep(kv, spans)
        query = torch.randn(size.heads, rows, dim, device=size.device, dtype=dtype)
        new = torch.randn(size.kv_heads, rows, dim, device=size.device, dtype=dtype)
        seconds = _seconds(size, partial(step.attend, 0, query, new, new, Score(dim**-0.5)))
        read = rows * size.keys * size.kv_heads * 2 * dim * dtype.itemsize
        source = torch.empty(max(read, 2**24), dtype=torch.uint8, device=size.device)
        copying = _seconds(size, partial(torch.empty_like(source).copy_, source))
        rate, plain = read / seconds / 1e9, 2 * source.numel() / copying / 1e9
        what = f"decode attention, {rows} × {size.keys} keys"
        yield Line(what, f"{seconds * 1e6:.0f} µs, {rate:.0f} GB/s = {rate / plain:.2f} of a device copy's {plain:.0f}")


def engine(size: Size) -> Iterator[Line]:
    """A whole engine: its scores against transformers' own, its decoding, its sleeping and waking."""
    from engine.torch_engine import TorchEngine

    limits = EngineLimits(max_model_len=1024, block_size=16, step_tokens=256, max_running=size.rows)
    with tempfile.TemporaryDirectory() as directory:
        dtype = "bfloat16" if size.device == "cuda" else "float32"
        path = _model(size, Path(directory), dtype)
        begin = time.monotonic()
        ours = TorchEngine(path, size.memory_bytes, limits, dtype)
        report = ours.load()
        ours.warm()
        yield Line("load and warm-up", f"{time.monotonic() - begin:.1f} s, {report.weight_bytes / 2**20:,.0f} MiB")
        yield from _scores(size, path, ours, dtype)
        yield from _decoding(size, ours)
        yield from _sleeping(size, ours, report.weight_bytes)


def _model(size: Size, directory: Path, dtype: str) -> Path:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llama", vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    return save_tiny(config, directory, dtype)


def _scores(size: Size, path: Path, ours: Any, dtype: str) -> Iterator[Line]:
    from transformers import AutoModelForCausalLM

    prompt = [2 + (7 * n * n + 3 * n) % (size.vocabulary - 2) for n in range(200)]
    said = made_up_step(ours._runner, ours._kv, ours.limits.block_size, [prompt])().float().cpu()
    scores = {}
    for kind in ("float32", dtype):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, kind), attn_implementation="eager")
        model = model.eval().to(size.device)
        with torch.inference_mode():
            ids = torch.tensor([prompt], device=size.device)
            scores[kind] = model(ids, use_cache=False, logits_to_keep=1).logits[0].float().cpu()
        del model
    largest = float(scores["float32"].abs().max())
    own = max(1e-5, float((scores[dtype] - scores["float32"]).abs().max()) / largest)
    error = float((said - scores["float32"]).abs().max()) / largest
    found = f"{error:.1e} of the largest; transformers' own {dtype} {own:.1e}"
    yield Line("engine's scores against float32", found, error <= OWN_ERROR * own)


def _decoding(size: Size, ours: Any) -> Iterator[Line]:
    for rows in (1, size.rows):
        for number in range(rows):
            ours.add(request(f"{rows}/{number}", [2 + number] * 64, size.new_tokens, ignore_eos=True))
        begin, tokens = time.monotonic(), 0
        while ours.has_work():
            tokens += sum(len(output.token_ids) for output in ours.step())
        seconds = time.monotonic() - begin
        yield Line(f"generation, {rows} at once", f"{tokens / seconds:,.0f} tokens/s (64 in, {size.new_tokens} out)")


def _sleeping(size: Size, ours: Any, weight_bytes: int) -> Iterator[Line]:
    before = _answer(ours, "before")
    raw = torch.empty(weight_bytes, dtype=torch.uint8)
    raw.fill_(1)
    copying = _seconds(size, lambda: raw.to(size.device, copy=True), 3)
    pinned = raw.pin_memory() if size.device == "cuda" else raw
    fastest = _seconds(size, lambda: pinned.to(size.device, copy=True), 3)
    sleeps, wakes = [], []
    held = _held(size)
    for _ in range(3):
        begin = time.monotonic()
        ours.sleep()
        sleeps.append(time.monotonic() - begin)
        asleep = _held(size)
        begin = time.monotonic()
        ours.wake()
        wakes.append(time.monotonic() - begin)
    wake, gib = statistics.median(wakes), weight_bytes / 2**30
    given = f"{(held - asleep) / 2**20:,.0f} MiB of the device given back"
    yield Line("sleep", f"{statistics.median(sleeps):.2f} s, {given}")
    copies = f"{copying:.2f} s from pageable memory, {fastest:.2f} s from pinned"
    yield Line("wake", f"{wake:.2f} s for {gib:.2f} GiB; the same bytes copied: {copies}")
    same = before == _answer(ours, "after")
    yield Line("answer after sleeping", "the same" if same else "another", same)


def _answer(ours: Any, name: str) -> list[int]:
    ours.add(request(name, list(range(2, 34)), 8, ignore_eos=True))
    said: list[int] = []
    while ours.has_work():
        said += [token for output in ours.step() for token in output.token_ids]
    return said


def _held(size: Size) -> int:
    if size.device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _seconds(size: Size, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median of some runs after a first one."""
    samples = []
    for _ in range(repeats + 1):
        if size.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if size.device == "cuda":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples[1:])


if __name__ == "__main__":
    sys.exit(main())
