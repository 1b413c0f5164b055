"""Owns what a compiled layer is on disk: a directory of libraries and one description. Torch-free.

The directory's name says of what: the model's configuration, its packed layers, the element type, versions, processor.
It is written whole or not at all, and native code is only taken from a directory that nobody else can write to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from engine import code_files
from engine.recipe import machine

VERSION = 1
FILE = "layers.json"
LONGEST_WORD = 300  # of a reason


@dataclass(frozen=True, slots=True)
class LayerScore:
    """How one layer's attention forms its scores; see ``attention.step.Score``."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class LayerCode:
    """One compiled layer, and those it can run."""

    layers: tuple[LayerScore, ...]
    library: str  # file
    sha256: str
    inputs: tuple[tuple[str, ...], ...]  # where the call has its tensors: ("0",), ("position_embeddings", "1")
    packed: tuple[str, ...]  # linear layers whose packed weights follow
    tensors: tuple[str, ...]  # parameters and buffers, which follow then
    in_tuple: bool  # the layer returns (hidden states,)


@dataclass(frozen=True, slots=True)
class Description:
    """All of a model's layers; or why they stay plain."""

    container: str = ""  # name of the module that holds the layers
    codes: tuple[LayerCode, ...] = ()
    problem: str = ""


_ADAPTER = TypeAdapter(Description)


def directory(root: Path, model: Path, dtype: str, packed: Sequence[str]) -> Path:
    """Where the layers of such a model are kept; it need not exist."""
    said = json.dumps([VERSION, (model / "config.json").read_text(), dtype, sorted(packed), machine()])
    return root / hashlib.sha256(said.encode()).hexdigest()[:24]


def read(place: Path) -> Description | None:
    """None when nothing is there, or nothing that may be trusted."""
    try:
        if not code_files.only_ours(place):
            return None
        found = _ADAPTER.validate_json((place / FILE).read_bytes())
        whole = all(digest(place / code.library) == code.sha256 for code in found.codes)
    except (OSError, ValidationError):
        return None
    return found if whole else None


def seal(place: Path) -> str:
    """Of exactly what lies there, by name and content; OSError when nothing does."""
    return f"{place.name}:{hashlib.sha256((place / FILE).read_bytes()).hexdigest()[:24]}"


def write(place: Path, description: Description) -> None:
    (place / FILE).write_bytes(_ADAPTER.dump_json(description, indent=1))


def digest(library: Path) -> str:
    """Of a library, and of what lies beside it: which operators it calls back."""
    return hashlib.sha256(library.read_bytes() + library.with_suffix(".json").read_bytes()).hexdigest()
