"""Owns the weights' memory: one arena per dtype, parameters being views, given back and copied in again.

The host copy is the memory-mapped safetensors file: sleeping copies nothing, waking is one copy per file. The arena
follows the file's own order, so that a whole file is one contiguous copy. Parameters the file holds in another
floating dtype are converted while they are copied. Those it does not hold at all (a renamed or computed tensor) keep a
private copy in memory, and are counted.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from policies.errors import LoadFailed

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by safetensors' names


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the data section
    end: int


class WeightFile:
    """One memory-mapped safetensors file (format: 8-byte header length, JSON header, data section without holes)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > 100_000_000:
                raise LoadFailed(f"{path.name}: header of {header_bytes} bytes; not a safetensors file")
            self._header = file.read(header_bytes)
            # private and never written: torch warns about read-only buffers, and unwritten pages stay file pages
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.data_start = 8 + header_bytes
        entries = json.loads(self._header)
        entries.pop("__metadata__", None)
        self.tensors = sorted(
            (StoredTensor(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in entries.items()),
            key=lambda t: t.begin,
        )
        self.nbytes = len(self._map) - self.data_start
        if self.tensors and self.tensors[-1].end > self.nbytes:
            raise LoadFailed(
                f"{path.name}: truncated, {self.nbytes} bytes of data where the header names {self.tensors[-1].end}"
            )

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Bytes ``begin..end`` of the data section as a ``uint8`` view of the map; never written."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=end - begin, offset=self.data_start + begin)

    def fingerprint(self) -> bytes:
        """sha256 over the header and 64 samples of the data: cheap, and different for different weights."""
        digest = hashlib.sha256(self._header)
        step = max(1, self.nbytes // 64)
        for begin in range(0, self.nbytes, step):
            digest.update(bytes(memoryview(self._map)[self.data_start + begin :][:4096]))
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous piece of the arena and where its bytes come from."""

    offset: int  # bytes into the arena
    source: torch.Tensor  # flat: a view of a mapped file, or a private copy
    dtype: torch.dtype  # in the arena


class Arena:
    """Parameters and persistent buffers in one storage."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.copies: list[Copy] = []

    def add(self, copy: Copy) -> None:
        """Fill one piece now, and again at every wake."""
        self.copies.append(copy)
        self._copy(copy)

    def fill(self) -> None:
        for copy in self.copies:
            self._copy(copy)

    def _copy(self, copy: Copy) -> None:
        end = copy.offset + copy.source.numel() * copy.dtype.itemsize
        self.bytes[copy.offset : end].view(copy.dtype).copy_(copy.source)

    def give_back(self) -> None:
        self.bytes.untyped_storage().resize_(0)

    def take_again(self) -> None:
        """Allocate and fill; on failure the arena is given back again."""
        try:
            self.bytes.untyped_storage().resize_(self.nbytes)
            self.fill()
        except (RuntimeError, MemoryError):
            self.give_back()
            raise


class Weights:
    """The weights of one model: awake (arenas filled) or asleep (arenas empty)."""

    def __init__(self, model: torch.nn.Module, path: Path, device: str) -> None:
        self._files = [WeightFile(p) for p in sorted(path.glob("*.safetensors"))]
        if not self._files:
            raise LoadFailed(f"{path} holds no .safetensors file; other formats are not loaded")
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(file.fingerprint())
        self.fingerprint = digest.hexdigest()
        self._arenas: list[Arena] = []
        self.private_bytes = 0
        self._gather(model, device)

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self._arenas)

    def sleep(self) -> None:
        for arena in self._arenas:
            arena.give_back()

    def wake(self) -> None:
        """Allocate and copy everything back; RuntimeError or MemoryError leaves it asleep."""
        try:
            for arena in self._arenas:
                arena.take_again()
        except (RuntimeError, MemoryError):
            self.sleep()
            raise

    def _gather(self, model: torch.nn.Module, device: str) -> None:
        """Move every tensor of the model into the arenas, in file order; the rest keeps private copies."""
        left = _owned_tensors(model)
        for file in self._files:
            known = [stored for stored in file.tensors if stored.name in left]
            taken = [stored for stored in known if _same(left[stored.name], stored, file)]
            if taken:
                self._place_file(file, taken, {t.name: left.pop(t.name) for t in taken}, device)
            sources = {t.name: _converted(left[t.name], t, file) for t in known if t.name in left}
            self._place([(left.pop(name), source) for name, source in sources.items() if source is not None], device)
        private = [(tensor, tensor.detach().cpu().contiguous().view(-1)) for tensor in left.values()]
        self.private_bytes = sum(source.nbytes for _, source in private)
        self._place(private, device)

    def _place_file(
        self, file: WeightFile, stored: list[StoredTensor], tensors: dict[str, torch.Tensor], device: str
    ) -> None:
        begin, end = stored[0].begin, stored[-1].end
        arena = Arena(end - begin, device)
        arena.add(Copy(0, file.read(begin, end), torch.uint8))
        for item in stored:
            _point(tensors[item.name], arena, item.begin - begin)
        self._arenas.append(arena)

    def _place(self, pieces: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> None:
        """Tensors and their sources, one by one: each old copy is freed before the next is made."""
        if not pieces:
            return
        arena = Arena(sum(_padded(tensor) for tensor, _ in pieces), device)
        offset = 0
        for tensor, source in pieces:
            arena.add(Copy(offset, source, tensor.dtype))
            size = _padded(tensor)
            _point(tensor, arena, offset)
            offset += size
        self._arenas.append(arena)


def _owned_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, tied ones once, under every name's first occurrence."""
    state = model.state_dict(keep_vars=True)
    seen: dict[int, str] = {}
    owned = {}
    for name, tensor in state.items():
        if id(tensor) not in seen and tensor.numel():
            seen[id(tensor)] = name
            owned[name] = tensor
    return owned


def _same(tensor: torch.Tensor, stored: StoredTensor, file: WeightFile) -> bool:
    """Is the file's tensor bit for bit what the model uses? Loading may rename, transpose or recompute."""
    nbytes = tensor.numel() * tensor.element_size()
    if tuple(tensor.shape) != stored.shape or nbytes != stored.end - stored.begin:
        return False
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return torch.equal(flat, file.read(stored.begin, stored.end))


def _converted(tensor: torch.Tensor, stored: StoredTensor, file: WeightFile) -> torch.Tensor | None:
    """The file's tensor (flat) if the model's is exactly that in another floating dtype."""
    dtype = FLOATS.get(stored.dtype)
    if dtype is None or tensor.dtype not in FLOATS.values() or tuple(tensor.shape) != stored.shape:
        return None
    source = file.read(stored.begin, stored.end).view(dtype)
    flat = tensor.detach().cpu().contiguous().view(-1)
    return source if torch.equal(source.to(flat.dtype), flat) else None


def _point(tensor: torch.Tensor, arena: Arena, offset: int) -> None:
    nbytes = tensor.numel() * tensor.element_size()
    view = arena.bytes[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape)
    tensor.data = view
    tensor.requires_grad_(False)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 64) * 64
