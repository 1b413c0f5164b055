"""Owns what the first load of a model finds out on this machine, kept in a file for the loads that follow. Torch-free.

A load that has to find out nothing takes a third of the time, and can end asleep: without any device memory. A recipe
is of exactly these weight files (by size, time and inode), limits, versions and processor. Its canary is asked at every
load that uses it; a recipe whose canary answers wrong is thrown away, and the model is loaded as if for the first time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt, TypeAdapter, ValidationError

from engine.protocol import EngineLimits

VERSION = 2
FOLDED = "weights.folded"  # a file in a model's directory; see ``quantised.grid``
Form = Literal["reordered", "folded"]  # of a weight; see ``linear``
PACKAGES = ("torch", "transformers", "safetensors")
# limits that what is measured depends on
SHAPING = ("max_model_len", "block_size", "step_tokens", "prompt_step_tokens", "max_running")


@dataclass(frozen=True, slots=True)
class KnownLayer:
    """KV geometry of one layer; see ``attention.kv.LayerShape``."""

    index: int
    kv_heads: PositiveInt
    head_dim: PositiveInt
    value_dim: PositiveInt
    window: PositiveInt | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """The findings. Bytes, and wall-clock seconds."""

    fingerprint: str  # of the weights
    layers: tuple[KnownLayer, ...]
    packed: dict[str, Form]  # the layers whose weights lie in a form of their own
    threads: PositiveInt  # for decoding
    peak_bytes: int  # activations of the largest step
    process_bytes: int  # what the process kept besides weights and KV
    prefill_seconds: float  # per token
    copy_seconds: float  # per block, device to host memory
    canary: tuple[int, ...]  # the answer
    native: bool = False  # the peak is that of native attention, which needs no masks
    compiled: str = ""  # seal of the compiled layers that were proven to say the same; see ``compiled.words``
    # tokens in one step, as traffic had them most often; warmed up before the next traffic
    rows: tuple[PositiveInt, ...] = ()


_ADAPTER = TypeAdapter(Recipe)


def recipe_file(directory: Path, model: Path, limits: EngineLimits, dtype: str, device: str) -> Path:
    """Where the recipe of such a load is kept; it need not exist."""
    files = [*sorted(model.glob("*.safetensors")), model / FOLDED, model / "config.json"]
    stamps = [(f.name, s.st_size, s.st_mtime_ns, s.st_ino) for f in files if f.exists() for s in (f.stat(),)]
    limiting = {name: value for name, value in asdict(limits).items() if name in SHAPING}
    said = json.dumps([VERSION, str(model), stamps, limiting, dtype, device, machine()], sort_keys=True)
    return directory / f"{model.name}-{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"


def read(file: Path) -> Recipe | None:
    """None when there is none, or none that can be read."""
    try:
        return _ADAPTER.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def write(file: Path, recipe: Recipe) -> None:
    """Whole or not at all; where it cannot be written, the next load finds out again."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(_ADAPTER.dump_json(recipe, indent=1))
        temporary.replace(file)


@functools.cache
def machine() -> list[str]:
    """What measurements depend on, besides the model."""
    versions = [f"{package} {importlib.metadata.version(package)}" for package in PACKAGES]
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = _values(lines, "model name")
    can = hashlib.sha256("".join(_values(lines, "flags", "Features")[:1]).encode()).hexdigest()[:16]  # instructions
    return [*versions, names[0] if names else platform.machine(), can, f"{len(os.sched_getaffinity(0))} cores"]


def _values(cpuinfo: list[str], *names: str) -> list[str]:
    pairs = [line.partition(":") for line in cpuinfo]
    return [value.strip() for name, _, value in pairs if name.strip() in names]
