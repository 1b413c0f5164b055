"""Owns the file form of one generation: what it was asked, what it has said, the KV of its whole blocks. Torch-free.

A checkpoint is a safetensors file: tensor ``kv`` (uint8, ``[blocks, block_bytes]``) and one metadata entry, a JSON
record with everything else. The sampler needs no state (its noise is keyed on seed and position), the text and stop
strings are fed again from the tokens. A file is refused whole, before anything is used of it, unless it is exactly what
was written, by the same weights, for the same tenant. The caller then goes on from its own tokens: it costs time only.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from engine.disk_files import write_temporary
from engine.prefix import KVIdentity
from engine.protocol import GenerationRequest, SamplingParams
from policies.errors import CheckpointRefused
from policies.types import Tier

VERSION = 2  # 2: kv_first_block
RECORD = "generation"
PARTS = {"version", "identity", "request", "kv_crc32"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One generation between two steps. ``request.delivered_token_ids`` is all it has said, sent or not."""

    identity: KVIdentity
    request: GenerationRequest
    kv: np.ndarray  # uint8 [blocks, block_bytes]
    first_block: int = 0  # that ``kv`` begins with; those before lie outside every layer's window


def write(path: Path, checkpoint: Checkpoint) -> None:
    """All or nothing: a temporary file, synced, renamed. Readable by its owner only. OSError when it cannot be."""
    record = {
        "version": VERSION,
        "identity": asdict(checkpoint.identity),
        "request": asdict(checkpoint.request),
        "kv_crc32": zlib.crc32(checkpoint.kv.data),
        "kv_first_block": checkpoint.first_block,
    }
    text = json.dumps(record)
    content = save({"kv": checkpoint.kv}, {RECORD: text, "crc32": str(zlib.crc32(text.encode()))})
    with write_temporary(path, (content,)) as temporary:
        temporary.replace(path)


def read(path: Path, identity: KVIdentity, block_bytes: int) -> Checkpoint:
    """What was written, checked whole; CheckpointRefused says what is wrong with it.

    Args:
        identity: whose KV may be used here; another tenant, model, dtype, block size or layout is refused.
        block_bytes: of one KV block here.
    """
    record, kv = _content(path)
    _check_record(path, record, identity)
    if kv.dtype != np.uint8 or kv.ndim != 2 or (len(kv) and kv.shape[1] != block_bytes):
        raise CheckpointRefused(f"{path.name}: KV of shape {kv.shape} {kv.dtype}, not blocks of {block_bytes} bytes")
    if zlib.crc32(kv.data) != record["kv_crc32"]:
        raise CheckpointRefused(f"{path.name}: its KV is damaged (checksum)")
    request = _request(path, record["request"])
    if request.tenant != identity.tenant:  # else its holder would speak, and reuse KV, as somebody else
        raise CheckpointRefused(f"{path.name}: its request is another tenant's")
    first = record.get("kv_first_block", 0)  # version 1 had none
    if not isinstance(first, int) or first < 0:
        raise CheckpointRefused(f"{path.name}: its KV begins at block {first!r}")
    if (first + len(kv)) * identity.block_size > len(request.prompt_token_ids) + len(request.delivered_token_ids):
        raise CheckpointRefused(f"{path.name}: {first + len(kv)} blocks of KV are more than its tokens can have")
    return Checkpoint(identity, request, kv, first)


def _content(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            text = metadata[RECORD]
            if str(zlib.crc32(text.encode())) != metadata["crc32"]:
                raise CheckpointRefused(f"{path.name}: its record is damaged (checksum)")
            record = json.loads(text)
            if missing := PARTS - record.keys():
                raise CheckpointRefused(f"{path.name}: its record has no {', '.join(sorted(missing))}")
            return record, file.get_tensor("kv")
    except OSError as error:
        raise CheckpointRefused(f"cannot read {path.name}: {error}") from error
    except (SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointRefused(f"{path.name} is no whole checkpoint: {type(error).__name__}: {error}") from error


def _check_record(path: Path, record: dict[str, Any], identity: KVIdentity) -> None:
    version = record["version"]
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise CheckpointRefused(f"{path.name}: version {version}; this engine reads versions 1 to {VERSION}")
    found = record["identity"]
    if not isinstance(found, dict):
        raise CheckpointRefused(f"{path.name}: its identity cannot be read")
    for name, expected in asdict(identity).items():
        if found.get(name) != expected:
            shown = "another" if name == "tenant" else f"{found.get(name)!r}, not {expected!r}"
            raise CheckpointRefused(f"{path.name}: {name} is {shown}")


def _request(path: Path, record: dict[str, Any]) -> GenerationRequest:
    """Lists become tuples again; a field that an older version did not have takes its default."""
    try:
        sampling = {name: _frozen(value) for name, value in record.pop("sampling").items()}
        plain = {name: _frozen(value) for name, value in record.items()}
        plain["tier"] = Tier(plain["tier"])
        known = {field.name for field in fields(GenerationRequest)}
        if unknown := plain.keys() - known:
            raise CheckpointRefused(f"{path.name}: unknown fields {', '.join(sorted(unknown))}")
        return GenerationRequest(sampling=SamplingParams(**sampling), **plain)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointRefused(f"{path.name}: its request cannot be read: {error}") from error


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
