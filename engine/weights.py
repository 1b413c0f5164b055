"""Owns the weights' memory: given back when the model sleeps, filled again when it wakes.

The host copy is the memory-mapped safetensors file: sleeping copies nothing. What a model reads every step lies in an
arena that follows the file's own order, so that adjoining tensors are one copy, or packed (``linear``): in oneDNN's
layout, or in few bits, which a file of their own beside the others has (``quantised.grid``) or bfloat16 gives at once.
Embedding tables on the CPU stay in the map: a step reads a few rows of them. Parameters the file holds in another
floating dtype are converted while they are copied. Those it does not hold at all (a renamed or computed tensor) keep a
private copy in memory, and are counted.

So the files must stay what they were when the fingerprint was taken: all KV is found by it. ``wake`` refuses files that
were written over or replaced. Nobody looks while the model is awake: what lies in arenas and in oneDNN's layout is a
copy and stays as it was, but an embedding table in the map changes at once when its file is written over in place (a
private mapping shows the file's pages until they are written). New weights go beside the old ones and are renamed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.linear import Foldable, PackedLinear, choose, reordered
from engine.quantised import grid
from engine.recipe import FOLDED, Form
from policies.errors import EngineError, LoadFailed

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by safetensors' names


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the data section
    end: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """By what a file is known to be another one, or written to."""

    nbytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class WeightFile:
    """One memory-mapped safetensors file (format: 8-byte header length, JSON header, data section without holes)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > 100_000_000:
                raise LoadFailed(f"{path.name}: header of {header_bytes} bytes; not a safetensors file")
            header = file.read(header_bytes)
            # private and never written: torch warns about read-only buffers, and unwritten pages stay file pages
            self.stamp = Stamp.of(os.fstat(file.fileno()))
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.data_start = 8 + header_bytes
        entries = json.loads(header)
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

    def check(self) -> None:
        """EngineError when the file under this name is not the one that was mapped, or was written to since."""
        try:
            found = Stamp.of(self.path.stat())
        except OSError as error:
            raise EngineError(f"{self.path}, which this model was loaded from, cannot be read: {error}") from error
        if found != self.stamp:
            raise EngineError(
                f"{self.path} is not what this model was loaded from (then {self.stamp}, now {found}): it must be "
                "loaded again"
            )

    def digest(self) -> bytes:
        """sha256 over the whole file, header included."""
        return hashlib.sha256(self._map).digest()


def fingerprint(path: Path) -> str:
    """sha256 over all weights in a model's directory: the identity that KV on disk outlives its process by.

    About half a second a gigabyte, on a thread of its own: hashing releases the interpreter.
    """
    digest = hashlib.sha256()
    for file in _open(path):
        digest.update(file.digest())
    return digest.hexdigest()


def _open(path: Path) -> list[WeightFile]:
    files = [WeightFile(p) for p in sorted(path.glob("*.safetensors"))]
    if not files:
        raise LoadFailed(f"{path} holds no .safetensors file; other formats are not loaded")
    return files


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor's bytes come from, at the load and at every wake."""

    flat: torch.Tensor  # a view of a mapped file, or a private copy
    begin: int = -1  # place in the file's data section when the model uses the file's own bytes; else -1
    file: WeightFile | None = None

    @property
    def mapped(self) -> bool:
        """Does the file hold exactly the model's bytes?"""
        return self.begin >= 0


class Store(Protocol):
    """A piece of the weights' memory."""

    @property
    def nbytes(self) -> int: ...

    def give_back(self) -> None: ...

    def take_again(self) -> None:
        """Allocate and fill; RuntimeError or MemoryError when memory is short."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous piece of an arena and where its bytes come from."""

    offset: int  # bytes into the arena
    source: torch.Tensor  # flat
    dtype: torch.dtype  # in the arena


class Arena:
    """Parameters and persistent buffers as views of one storage."""

    def __init__(self, nbytes: int, device: str, *, filled: bool) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.copies: list[Copy] = []
        self._filled = filled

    def add(self, copy: Copy) -> None:
        """Fill one piece at every wake, and now if the arena is made ``filled``."""
        self.copies.append(copy)
        if self._filled:
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
        self.bytes.untyped_storage().resize_(self.nbytes)
        self.fill()


class Packed:
    """The weight of one ``Linear``: reordered from its numbers (``[outputs, inputs]``), or folded."""

    def __init__(self, linear: PackedLinear, source: torch.Tensor | Foldable, *, filled: bool) -> None:
        self._linear = linear
        self._source = source
        self.nbytes = source.flat.nbytes if isinstance(source, Foldable) else linear.weight.nbytes
        if filled:
            self.take_again()

    def give_back(self) -> None:
        self._linear.unpack()

    def take_again(self) -> None:
        source, dtype = self._source, self._linear.weight.dtype
        self._linear.pack(source.make() if isinstance(source, Foldable) else reordered(source.to(dtype)))


class Weights:
    """The weights of one model: awake (every store filled) or asleep (every store empty)."""

    def __init__(
        self,
        model: torch.nn.Module,
        path: Path,
        device: str,
        *,
        pack: bool = True,
        fold: bool = False,
        known: Mapping[str, Form] | None = None,
    ) -> None:
        """Takes the tensors of ``model`` over.

        Args:
            pack: replace linear layers by packed ones where that is measured to be faster.
            fold: folded ones too, where weights have few bits.
            known: the layers to pack, found out by an earlier load of the same files. ``model`` is then a
                skeleton: the files' tensors are taken for its own, by name, unread; and the weights are asleep.
                KeyError when a layer cannot be folded any more.
        """
        self._files = _open(path)
        self._folded = _open_folded(path) if fold else None
        self._stores: list[Store] = []
        self._filled = known is None
        self.private_bytes = 0
        self.packed_layers: dict[str, Form] = {}
        tensors = _owned_tensors(model)
        sources = self._sources(tensors)
        foldable = self._foldable(model, tensors, sources) if fold else {}
        if known is not None:
            self._pack(model, tensors, sources, foldable, known)
        elif pack:
            self._pack(model, tensors, sources, foldable, choose(model, foldable))
        if device == "cpu":
            _leave_embeddings_mapped(model, tensors, sources)
        self._place(tensors, sources, device)
        if not self._filled:
            self.sleep()  # nothing was written, so no page of it was ever taken

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    @property
    def said(self) -> str:
        """In which forms the linear layers' matrices are, for people."""
        forms = Counter(self.packed_layers.values())
        words = {"folded": "in the few bits they came in", "reordered": "in oneDNN's layout"}
        return ", ".join(f"{forms[form]} matrices {words[form]}" for form in sorted(forms)) or "plain"

    @property
    def packed(self) -> bool:
        """Is any weight in a form of its own?"""
        return any(isinstance(store, Packed) for store in self._stores)

    def sleep(self) -> None:
        for store in self._stores:
            store.give_back()

    def wake(self) -> None:
        """Allocate and fill everything again; RuntimeError or MemoryError leaves it asleep.

        EngineError, before anything is filled, when a weight file has changed.
        """
        for file in [*self._files, *([self._folded] if self._folded else [])]:
            file.check()
        try:
            for store in self._stores:
                store.take_again()
        except (RuntimeError, MemoryError):
            self.sleep()
            raise

    def _sources(self, tensors: dict[str, torch.Tensor]) -> dict[str, Source]:
        """The source of every tensor, those of files first and in their order."""
        sources: dict[str, Source] = {}
        for file in self._files:
            for stored in file.tensors:
                if stored.name in tensors:
                    find = _source if self._filled else _named_source
                    source = find(tensors[stored.name], stored, file)
                    if source is not None:
                        sources[stored.name] = source
        missing = tensors.keys() - sources.keys()
        if missing and not self._filled:
            raise LoadFailed(f"the files hold nothing for {', '.join(sorted(missing))}: not what was loaded before")
        for name in missing:
            private = tensors[name].detach().cpu().contiguous().view(-1)
            self.private_bytes += private.nbytes
            sources[name] = Source(private)
        return sources

    def _foldable(
        self, model: torch.nn.Module, tensors: dict[str, torch.Tensor], sources: dict[str, Source]
    ) -> dict[str, Foldable]:
        """The linear layers whose weights can be had folded, by name."""
        names = {id(tensor): name for name, tensor in tensors.items()}
        folded = {stored.name: stored for stored in self._folded.tensors} if self._folded else {}
        found = {}
        for path, module in model.named_modules():
            weight = module.weight if type(module) is torch.nn.Linear else None
            if weight is None or weight.dtype != torch.float32 or not grid.foldable(weight.shape):
                continue
            name = names[id(weight)]
            flat, stored = sources[name].flat, folded.get(name)
            if flat.dtype == torch.bfloat16:
                found[path] = Foldable(flat, weight.shape[0])
            elif self._folded is not None and stored is not None and _may_be_of(stored, weight):
                made = Foldable(self._folded.read(stored.begin, stored.end), weight.shape[0])
                if not self._filled or _is_of(made, weight):
                    found[path] = made
        return found

    def _pack(
        self,
        model: torch.nn.Module,
        tensors: dict[str, torch.Tensor],
        sources: dict[str, Source],
        foldable: Mapping[str, Foldable],
        forms: Mapping[str, Form],
    ) -> None:
        """Replace these linear layers one by one: each plain weight is freed before the next is packed."""
        self.packed_layers = dict(forms)
        names = {id(tensor): name for name, tensor in tensors.items()}
        layers = {path: _linear(model, path) for path in forms}
        users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        while layers:
            path, linear = layers.popitem()
            name = names[id(linear.weight)]
            users[id(linear.weight)] -= 1
            parent, _, child = path.rpartition(".")
            packed = PackedLinear(linear)
            setattr(model.get_submodule(parent), child, packed)
            if not users[id(linear.weight)]:  # else it is an embedding table tied to the head
                del tensors[name]
            del linear
            source = foldable[path] if forms[path] == "folded" else sources[name].flat.view(packed.weight.shape)
            self._stores.append(Packed(packed, source, filled=self._filled))

    def _place(self, tensors: dict[str, torch.Tensor], sources: dict[str, Source], device: str) -> None:
        """Move the tensors that are left into arenas, file by file; each old copy is freed before the next is made."""
        for file in [*self._files, None]:
            names = [name for name, source in sources.items() if name in tensors and source.file is file]
            runs = list(_runs(names, sources))
            if runs:
                sizes = [sum(_nbytes(tensors[name]) for name in run) for run in runs]
                arena = Arena(sum(map(_padded, sizes)), device, filled=self._filled)
                offset = 0
                for run, size in zip(runs, sizes, strict=True):
                    arena.add(_copy(offset, size, sources[run[0]], tensors[run[0]].dtype))
                    _point([tensors.pop(name) for name in run], arena, offset)
                    offset += _padded(size)
                self._stores.append(arena)


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


def _leave_embeddings_mapped(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], sources: dict[str, Source]
) -> None:
    """Let embedding tables be read from the mapped file where nothing else uses them."""
    users: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    for name, tensor in list(tensors.items()):
        alone = users.get(id(tensor), [])
        if sources[name].mapped and len(alone) == 1 and isinstance(alone[0], torch.nn.Embedding):
            del tensors[name]
            tensor.data = sources[name].flat.view(tensor.shape)
            tensor.requires_grad_(False)


def _source(tensor: torch.Tensor, stored: StoredTensor, file: WeightFile) -> Source | None:
    """The file's tensor as a source, if the model uses its bytes or their conversion; None if it does not.

    Loading may rename, transpose or recompute.
    """
    raw = file.read(stored.begin, stored.end)
    flat = tensor.detach().cpu().contiguous().view(-1)
    if tuple(tensor.shape) != stored.shape:
        return None
    if flat.nbytes == raw.nbytes and torch.equal(flat.view(torch.uint8), raw):
        return Source(raw.view(tensor.dtype), stored.begin, file)
    dtype = FLOATS.get(stored.dtype)
    if dtype is None or tensor.dtype not in FLOATS.values():
        return None
    converted = raw.view(dtype)
    return Source(converted, file=file) if torch.equal(converted.to(flat.dtype), flat) else None


def _named_source(tensor: torch.Tensor, stored: StoredTensor, file: WeightFile) -> Source | None:
    """The same, of a file that was compared before: by name, shape and dtype."""
    if tuple(tensor.shape) != stored.shape or stored.dtype not in FLOATS:
        return None
    flat = file.read(stored.begin, stored.end).view(FLOATS[stored.dtype])
    return Source(flat, stored.begin, file) if flat.dtype == tensor.dtype else Source(flat, file=file)


def _open_folded(path: Path) -> WeightFile | None:
    """What was folded when the model was converted; None: nothing, or nothing that can be read."""
    file = path / FOLDED
    try:
        found = WeightFile(file) if file.is_file() else None
        inside = found is not None and all(0 <= t.begin <= t.end <= found.nbytes for t in found.tensors)
    except (OSError, LoadFailed, ValueError, LookupError, TypeError, AttributeError, struct.error):
        return None
    return found if inside else None


def _may_be_of(stored: StoredTensor, weight: torch.Tensor) -> bool:
    """Has it the dtype and size of this weight, folded?"""
    outputs, inputs = weight.shape
    fits = stored.dtype == "U8" and grid.is_folded(stored.shape, outputs, inputs)
    return fits and stored.end - stored.begin == stored.shape[0] * stored.shape[1]


def _is_of(foldable: Foldable, weight: torch.Tensor) -> bool:
    """Is this the same weight? Its first, middle and last outputs say so: both files were written together."""
    outputs, inputs = weight.shape
    rows = foldable.flat.view(outputs, -1)
    for tile in {0, outputs // grid.TILE // 2, outputs // grid.TILE - 1}:
        some = slice(tile * grid.TILE, (tile + 1) * grid.TILE)
        off = (grid.unfold(rows[some].clone(), inputs) - weight[some]).abs().amax(1)
        if not bool((off <= 4 * grid.TOLERANCE * weight[some].abs().amax(1)).all()):
            return False
    return True


def _linear(model: torch.nn.Module, name: str) -> torch.nn.Linear:
    module = model.get_submodule(name)
    if type(module) is not torch.nn.Linear:
        raise LoadFailed(f"{name} is a {type(module).__name__} now, and was a Linear when the model was loaded before")
    return module


def _runs(names: list[str], sources: dict[str, Source]) -> Iterator[list[str]]:
    """Names of tensors that adjoin in their file, together."""
    run: list[str] = []
    follows = (-1, torch.uint8)
    for name in names:
        source = sources[name]
        if run and not (source.mapped and (source.begin, source.flat.dtype) == follows):
            yield run
            run = []
        run.append(name)
        follows = (source.begin + source.flat.nbytes if source.mapped else -2, source.flat.dtype)
    if run:
        yield run


def _copy(offset: int, nbytes: int, first: Source, dtype: torch.dtype) -> Copy:
    """The copy of a run that begins with ``first``."""
    if first.mapped and first.file is not None:
        return Copy(offset, first.file.read(first.begin, first.begin + nbytes), torch.uint8)
    return Copy(offset, first.flat, dtype)


def _point(tensors: list[torch.Tensor], arena: Arena, offset: int) -> None:
    """Let adjoining tensors be views of the arena from ``offset`` on."""
    for tensor in tensors:
        end = offset + _nbytes(tensor)
        tensor.data = arena.bytes[offset:end].view(tensor.dtype).view(tensor.shape)
        tensor.requires_grad_(False)
        offset = end


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
