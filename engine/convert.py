"""Owns GGUF → safetensors. Run as a subprocess (``python -m engine.convert SRC.gguf DEST``), once per model.

The conversion needs gigabytes and minutes; in a process of its own it gives both back when it ends. Progress leaves as
one JSON object a line on stdout: ``{"stage": "...", "step": 1, "steps": 4}``. The directory appears under its final
name only when complete, so that a kill at any moment leaves either nothing or everything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

STEPS = ("dequantise weights", "convert tokenizer", "write safetensors", "flush to disk")


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
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _say(step: int) -> None:
    print(json.dumps({"stage": STEPS[step], "step": step, "steps": len(STEPS)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a GGUF file into a safetensors directory.")
    parser.add_argument("source", type=Path)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    if args.dest.exists():
        sys.exit(f"{args.dest} exists already")
    convert(args.source, args.dest, args.dtype)


if __name__ == "__main__":
    main()
