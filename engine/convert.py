"""Owns GGUF → safetensors. Run as a subprocess (``python -m engine.convert SRC.gguf DEST``), once per model.

``python -m engine.convert DIRECTORY`` only folds the weights of a directory that was converted before.

The conversion needs gigabytes and minutes; in a process of its own it gives both back when it ends. Progress leaves as
one JSON object a line on stdout: ``{"stage": "...", "step": 1, "steps": 5}``. The directory appears under its final
name only when complete, so that a kill at any moment leaves either nothing or everything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from engine.recipe import FOLDED

STEPS = ("dequantise weights", "convert tokenizer", "write safetensors", "fold weights", "flush to disk")


def convert(source: Path, dest: Path, dtype: str) -> None:
    """Write ``dest/`` (config, safetensors, tokenizer) from one GGUF file.

    Args:
        source: the ``.gguf`` file.
        dest: directory to create; its parent must exist.
        dtype: torch dtype name of the written weights, e.g. ``float32``.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    partial = dest.with_name(f"{dest.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        _say(0)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=getattr(torch, dtype))
        # save_pretrained refuses a model that still claims to be quantised
        for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
            if hasattr(owner, name):
                delattr(owner, name)
        setattr(model, "is_quantized", False)  # noqa: B010 — a module's attributes are typed as tensors
        _say(1)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        _say(2)
        model.save_pretrained(partial, max_shard_size="64GB")
        tokenizer.save_pretrained(partial)
        _say(3)
        fold(partial)
        _say(4)
        for path in partial.iterdir():
            _flush(path)
        partial.rename(dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fold(model: Path) -> None:
    """Write what ``model/`` (safetensors) can be folded to into a file beside it, whole or not at all."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from engine.quantised import grid

    folded: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 — no mapping
                if len(file.get_slice(name).get_shape()) == 2:
                    found = grid.fold(file.get_tensor(name).float())
                    folded |= {} if found is None else {name: found}
    fresh = model / f"{FOLDED}.partial-{os.getpid()}"
    try:
        save_file(folded, fresh)
        _flush(fresh)
        fresh.rename(model / FOLDED)
    finally:
        fresh.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _say(step: int) -> None:
    print(json.dumps({"stage": STEPS[step], "step": step, "steps": len(STEPS)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a GGUF file into a safetensors directory.")
    parser.add_argument("source", type=Path, help="the .gguf file; or a converted directory, whose weights to fold")
    parser.add_argument("dest", type=Path, nargs="?")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    if args.source.is_dir():
        _say(STEPS.index("fold weights"))
        fold(args.source)
        return
    if args.dest is None:
        parser.error("where to? DEST is missing")
    if args.dest.exists():
        sys.exit(f"{args.dest} exists already")
    convert(args.source, args.dest, args.dtype)


if __name__ == "__main__":
    main()
