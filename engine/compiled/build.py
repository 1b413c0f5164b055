"""Owns the compiling of a model's layers, in a process of its own: ``python -m engine.compiled.build``.

It reads one JSON object from standard input and ends when that is closed: its engine is gone. The model is a skeleton;
no weight is read. Each layer is exported with its weights as inputs; layers with the same graph share one library.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from engine import guards
from engine.attention.paged import current_step
from engine.attention.step import Score
from engine.compiled import ops, words
from engine.compiled.words import LONGEST_WORD, Description, LayerCode, LayerScore
from engine.linear import PackedLinear
from engine.loader import skeleton
from engine.runner import Runner

ROWS = (13, 17)  # of two calls: what differs between them is the number of rows
MOST_ROWS = 1 << 20
MOST_KINDS = 4  # of layers in one model: each takes its time to compile
LOWEST_PRIORITY = 19
OPTIONS = {
    "cpp.dynamic_threads": True,  # as many as the engine has at the moment
    # they lie where others could have left theirs, take 280 MB for each user, and openssl must be installed
    "aot_inductor.precompile_headers": False,
}


class _Stays(Exception):
    """Why these layers stay plain."""


@dataclass(slots=True)
class _Call:
    """What the model code gives one layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Tracing:
    """Stands in for a step while a layer is exported: its attention becomes one call back."""

    def __init__(self) -> None:
        self.scores: list[Score] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        self.scores.append(score)
        out: torch.Tensor = ops.attend(query, key, value)
        return out


def build(path: Path, dtype: torch.dtype, packed: Sequence[str], place: Path) -> None:
    """Compile the layers of the model at ``path`` into the directory ``place``, if it is not there yet."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with _alone(place.parent), tempfile.TemporaryDirectory(prefix=".new-", dir=place.parent) as made:
        for left in set(place.parent.glob(".new-*")) - {Path(made)}:  # by one that was killed
            shutil.rmtree(left, ignore_errors=True)
        if words.read(place) is not None:
            return
        result = Path(made) / "layers"
        result.mkdir(mode=0o700)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(made) / "inductor")
        words.write(result, _compiled(path, dtype, packed, result))
        if place.exists():
            shutil.rmtree(place)
        result.rename(place)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One at a time in this directory: it takes a core, and most of a gigabyte."""
    with (directory / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compiled(path: Path, dtype: torch.dtype, packed: Sequence[str], result: Path) -> Description:
    """What cannot be exported today cannot tomorrow, which is kept; what fails later, on a full disk say, may pass."""
    try:
        container, kinds = _exports(path, dtype, packed)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 — boundary: model code, under torch's export
        return Description(problem=_said(error))
    codes = []
    for number, (export, scores) in enumerate(kinds):
        library = export.compile(result, f"layer{number}")
        codes.append(
            LayerCode(
                tuple(scores),
                library.name,
                words.digest(library),
                export.places,
                tuple(export.packed),
                tuple(export.tensors),
                export.in_tuple,
            )
        )
    return Description(container, tuple(codes))


def _exports(
    path: Path, dtype: torch.dtype, packed: Sequence[str]
) -> tuple[str, list[tuple[_Export, list[LayerScore]]]]:
    """Name of the module that holds the layers; and their graphs, each with those that have it."""
    config = guards.read_config(path)
    model = skeleton(config, dtype)
    for name in packed:
        parent, _, child = name.rpartition(".")
        module = PackedLinear(model.get_submodule(name))  # type: ignore[arg-type]
        module.forward = _called_back(module)  # type: ignore[method-assign]
        setattr(model.get_submodule(parent), child, module)
    container, layers = _find(model, config.num_hidden_layers)
    calls = [_calls(model, layers, rows) for rows in ROWS]
    kinds: dict[str, tuple[_Export, list[LayerScore]]] = {}
    for index, layer in enumerate(layers):
        export = _Export(layer, calls[0][index], calls[1][index])
        kinds.setdefault(export.identity, (export, []))[1].append(export.score(index))
        if len(kinds) > MOST_KINDS:
            raise _Stays(f"more than {MOST_KINDS} kinds of layers")
    return container, list(kinds.values())


def _said(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return line if isinstance(error, _Stays) else f"{type(error).__name__}: {line}"[:LONGEST_WORD]


def _called_back(module: PackedLinear) -> Any:
    return lambda rows: ops.linear(rows, module._packed, module.bias)


def _find(model: torch.nn.Module, count: int) -> tuple[str, torch.nn.ModuleList]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, module
    raise _Stays(f"no list of {count} layers in it")


def _calls(model: torch.nn.Module, layers: torch.nn.ModuleList, rows: int) -> list[_Call]:
    """How each layer is called in a forward of so many rows; nothing is computed."""
    calls: list[_Call] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(args, kwargs))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    try:
        for module in packed:
            module._packed = module.weight.detach()
        with FakeTensorMode(allow_non_fake_inputs=True):
            Runner(model, "cpu", 1).probe(range(1, rows + 1))
    finally:
        for handle in handles:
            handle.remove()
        for module in packed:
            module.unpack()
    if len(calls) != len(layers):
        raise _Stays(f"{len(calls)} calls of {len(layers)} layers in one forward")
    return calls


class _Export:
    """One layer's graph, with everything it reads as an input."""

    def __init__(self, layer: torch.nn.Module, call: _Call, other: _Call) -> None:
        modules = dict(layer.named_modules())
        packed = {name: module for name, module in modules.items() if isinstance(module, PackedLinear)}
        self.packed = list(packed)
        owned = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        hidden = {f"{name}.weight" for name in packed}
        self.tensors = [name for name in owned if name not in hidden]
        leaves, shape = _pytree.tree_flatten_with_path((call.args, call.kwargs))
        others = _pytree.tree_leaves((other.args, other.kwargs))
        inputs = [i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.places = tuple(tuple(str(_key(key)) for key in leaves[i][0][1:]) for i in inputs)
        tracing = _Tracing()
        self.in_tuple = False

        def forward(given: list[torch.Tensor], weights: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
            values = [leaf for _, leaf in leaves]
            for i, tensor in zip(inputs, given, strict=True):
                values[i] = tensor
            args, kwargs = _pytree.tree_unflatten(values, shape)
            for module, weight in zip(packed.values(), weights, strict=True):
                module._packed = weight
            out = torch.func.functional_call(layer, dict(zip(self.tensors, tensors, strict=True)), args, kwargs)
            self.in_tuple = isinstance(out, tuple)
            if self.in_tuple:
                (out,) = out
            return out

        examples = [torch.zeros(leaves[i][1].shape, dtype=leaves[i][1].dtype) for i in inputs]
        rows = torch.export.Dim("rows", min=2, max=MOST_ROWS)
        moving = [_moving(leaves[i][1], others[i], rows) for i in inputs]
        weights = [_stand_in(module.weight) for module in packed.values()]
        tensors = [_stand_in(owned[name]) for name in self.tensors]
        token = current_step.set(tracing)
        try:
            with torch.no_grad():
                self._program = torch.export.export(
                    _Callable(forward),
                    (examples, weights, tensors),
                    dynamic_shapes=(moving, [None] * len(weights), [None] * len(tensors)),
                    strict=False,
                )
        finally:
            current_step.reset(token)
            for module in packed.values():
                module.unpack()
        if len(tracing.scores) != 1:
            raise _Stays(f"a layer attends {len(tracing.scores)} times")
        self._score = tracing.scores[0]
        if self._score.sinks is not None:  # a tensor of each layer's own, which no call back hands on
            raise _Stays("attention sinks")
        if self._program.constants:
            raise _Stays("a layer makes tensors of its own")
        shapes = [(tuple(t.shape), str(t.dtype)) for t in (*examples, *weights, *tensors)]
        said = f"{self._program.graph_module.code} {shapes} {self.places} {self.packed} {self.tensors} {self.in_tuple}"
        self.identity = hashlib.sha256(said.encode()).hexdigest()

    def score(self, layer: int) -> LayerScore:
        return LayerScore(layer, self._score.scale, self._score.window, self._score.softcap)

    def compile(self, directory: Path, name: str) -> Path:
        """The library; what it wants to know of the calls back lies beside it."""
        package = torch._inductor.aoti_compile_and_package(
            self._program, package_path=str(directory / f"{name}.pt2"), inductor_configs=OPTIONS
        )
        with zipfile.ZipFile(package) as archive:
            for member in archive.namelist():
                kind = ".so" if member.endswith(".wrapper.so") else ".json" if member.endswith(".wrapper.json") else ""
                if kind:
                    (directory / f"{name}{kind}").write_bytes(archive.read(member))
        os.unlink(package)
        return directory / f"{name}.so"


class _Callable(torch.nn.Module):
    """What ``export`` takes; it owns nothing: the layer's tensors are inputs."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self._call = forward

    def forward(self, given: list[torch.Tensor], weights: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        return self._call(given, weights, tensors)


def _key(key: Any) -> Any:
    """Of a path in a tree: a dict's key, or a sequence's index."""
    return key.key if isinstance(key, _pytree.MappingKey) else key.idx


def _moving(tensor: torch.Tensor, other: torch.Tensor, rows: Any) -> dict[int, Any] | None:
    """The dimensions that are as many as there are rows."""
    if tensor.dim() != other.dim():
        raise _Stays("an input has other dimensions for other rows")
    found = [d for d in range(tensor.dim()) if tensor.shape[d] != other.shape[d]]
    if any((tensor.shape[d], other.shape[d]) != ROWS for d in found):
        raise _Stays(f"an input of shape {tuple(tensor.shape)} for {ROWS[0]} rows")
    return dict.fromkeys(found, rows) or None


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """One of this shape that is never touched, so that it takes no memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def main() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    torch.set_num_threads(1)
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_engine, daemon=True).start()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            build(Path(order["path"]), getattr(torch, order["dtype"]), order["packed"], Path(order["place"]))
    except Exception as error:  # noqa: BLE001 — boundary: two compilers; the layers stay plain until the next load
        print(_said(error))
        sys.exit(1)


def _end_with_engine() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
