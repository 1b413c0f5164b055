"""The Triton kernels without a GPU: interpreted against float64, and compiled ahead of time for two targets.

    python -m tests.acceptance.kernels            # every head width, dtype and feature: about 3 minutes
    python -m tests.acceptance.kernels --quick

Prints kernel, largest error under the interpreter, and per target registers, shared memory and spilled bytes. Exit code
1 for an error above its bound, a spill, or more shared memory than the target has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TARGETS = {"sm_80": 80, "sm_90": 90}
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # of one program; NVIDIA's tuning guides
BOUNDS = {"float32": 2e-5, "float16": 2e-3}  # absolute, of values around 1; the reference is in float64
BLOCK = 16
KV_HEADS = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """What one kernel is compiled for."""

    kernel: str  # store, prefill, decode, split, merge
    dtype: str
    dim: int
    group: int = 4
    features: bool = False  # window, softcap and sinks

    @property
    def shape(self) -> str:
        return f"{self.dtype}, {self.dim} wide, {self.group} to 1{', window softcap sinks' if self.features else ''}"


@dataclass(frozen=True, slots=True)
class Built:
    """What a compiled kernel takes, per thread and per program."""

    registers: int
    shared_bytes: int
    spilled_bytes: int


# -- compiled ahead of time ----------------------------------------------------------------------


def variants(*, quick: bool) -> list[Variant]:
    dims = (64, 128) if quick else (64, 80, 128, 256)
    dtypes = ("bfloat16",) if quick else ("bfloat16", "float16", "float32")
    found = [Variant(kernel, dtype, dim) for dtype in dtypes for dim in dims for kernel in ("store", "merge")]
    for dtype in dtypes:
        for dim in dims:
            for group in (4,) if quick else (1, 4, 16):
                for kernel in ("prefill", "decode", "split"):
                    both = (True,) if quick else (False, True)
                    found += [Variant(kernel, dtype, dim, group, features) for features in both]
    return found


def build(variant: Variant, capability: int) -> Built:
    """Compile for a GPU of this capability as a launch would: pointers and strides are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = _constants(variant)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    signature = {name: _type(name, variant, constants) for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith("_stride")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults of a later Triton
        source = ASTSource(kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return Built(used["REG"], compiled.metadata.shared, used["STACK"] + used["LOCAL"])


def _constants(variant: Variant) -> tuple[Any, dict[str, Any]]:
    """A kernel, and what the engine would compile it for."""
    import torch

    from engine.attention import triton_kernels as kernels
    from engine.attention.step import Score
    from engine.attention.triton_step import MOST_SPLITS, attend_constants, tiling

    dim, padded = variant.dim, max(16, 1 << (variant.dim - 1).bit_length())
    heads = KV_HEADS * variant.group
    if variant.kernel == "store":
        return kernels.store_kernel, {"heads": KV_HEADS, "dim": dim, "DIM": padded}
    if variant.kernel == "merge":
        wide = {"value_dim": dim, "VALUE_DIM": padded}
        return kernels.merge_kernel, {"heads": heads, **wide, "MOST_SPLITS": MOST_SPLITS, "HAS_SINKS": True}
    dtype = getattr(torch, variant.dtype)
    kv = torch.empty(1, KV_HEADS, dim, dtype=dtype)
    score = Score(1.0, 1024, 30.0, torch.zeros(heads)) if variant.features else Score(1.0)
    tile = tiling(variant.group, dim, dim, dtype, decoding=variant.kernel != "prefill")
    split = variant.kernel == "split"
    return kernels.attend_kernel, attend_constants(variant.group, kv, kv, BLOCK, score, tile, split=split)


def _type(name: str, variant: Variant, constants: dict[str, Any]) -> str:
    kv = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[variant.dtype]
    if name in constants:
        return "constexpr"
    if name in ("tiles", "spans", "table"):
        return "*i32"
    if name == "slots":
        return "*i64"
    if name in ("lse", "sinks", "partial") or (name == "out" and variant.kernel == "split"):
        return "*fp32"
    if name in ("query", "keys", "values", "out", "new", "store"):
        return kv
    return "fp32" if name in ("scale", "softcap") else "i32"


# -- interpreted ---------------------------------------------------------------------------------


def interpret(*, quick: bool) -> dict[str, float]:
    """Largest difference from the definition, by kernel and dtype. To be called where ``TRITON_INTERPRET`` is set."""
    from engine.attention import triton_step
    from tests.attention_cases import Case, answers

    found: dict[str, float] = {}
    for dtype in BOUNDS:
        for name, parts, splits in _steps():
            triton_step.splits_of = lambda *_, splits=splits: splits  # type: ignore[assignment]
            worst = 0.0
            for dim in (64,) if quick else (64, 80, 128, 256):
                for window, softcap, sinks in ((None, None, False), (40, 20.0, True)):
                    case = Case(KV_HEADS, 4, dim, 0, parts, window, softcap, sinks, dim**-0.5, dim)
                    ours, theirs = answers(case, triton_step.TritonStep, dtype)
                    worst = max(worst, float((ours - theirs).abs().max()))
            found[f"{name} {dtype}"] = worst
    return found


def _steps() -> Iterator[tuple[str, Any, int]]:
    from tests.attention_cases import Part

    yield "prefill", (Part(0, 40, False), Part(30, 20, True)), 1
    yield "decode", (Part(70, 1, False), Part(3, 1, True)), 1
    yield "split", (Part(200, 1, False), Part(3, 1, True)), 4


def interpreted(*, quick: bool) -> dict[str, float]:
    """The same from a process of its own: whether kernels are interpreted is decided when they are imported."""
    command = [sys.executable, "-m", "tests.acceptance.kernels", "--interpreted", *(["--quick"] if quick else [])]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    errors: dict[str, float] = json.loads(said)
    return errors


# -- the program -----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes: half a minute")
    parser.add_argument("--interpreted", action="store_true", help="print the interpreter's errors as JSON and end")
    options = parser.parse_args(arguments)
    if options.interpreted:
        print(json.dumps(interpret(quick=options.quick)))
        return 0
    console, wrong = Console(width=120), 0
    table = Table("kernel", "largest error", "bound", title="interpreted, against float64")
    for name, error in interpreted(quick=options.quick).items():
        bound = BOUNDS[name.split()[-1]]
        wrong += error > bound
        table.add_row(name, f"{error:.1e}", f"{bound:.0e}")
    console.print(table)
    table = Table("kernel", "compiled for", "target", "registers", "shared", "spilled", title="compiled ahead of time")
    for variant in variants(quick=options.quick):
        for target, capability in TARGETS.items():
            built = build(variant, capability)
            wrong += built.spilled_bytes > 0 or built.shared_bytes > SHARED_BYTES[target]
            taken = (str(built.registers), f"{built.shared_bytes:,}", str(built.spilled_bytes))
            table.add_row(variant.kernel, variant.shape, target, *taken)
    console.print(table)
    console.print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
