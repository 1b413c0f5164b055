"""Owns attention on the CPU by code of its own (``native.cpp``), compiled once for each geometry and kept on disk.

A call takes one layer of a step, whatever is in it: decodes and pieces of prompts, with windows, softcaps and sinks,
over blocks where they lie. Only float32; where there is no compiler, and for other types, ``torch_blocks`` does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from engine import native_code
from engine.attention import reference
from engine.attention.kv import KVMemory, LayerShape
from engine.attention.step import Score, Span
from engine.native_code import NotNative

SOURCE = Path(__file__).with_name("native.cpp")
PLACE = "attention"  # in the directory for compiled code
LEAST_OF_A_PART = 256  # tokens of a history, when threads share it
ITEMS_PER_THREAD = 2  # from which on nothing is shared: whoever is ready takes the next
TOLERANCE = 1e-4


class _Call(ctypes.Structure):
    """``Call`` of native.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "keys", "values", "out", "partial")),
        *((name, ctypes.c_void_p) for name in ("sinks", "slots", "blocks", "spans", "items")),
        *((f"{name}_{stride}", ctypes.c_int64) for name in ("query", "key", "value") for stride in ("head", "row")),
        *((name, ctypes.c_int64) for name in ("rows", "items_count", "group", "threads", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What the code is compiled for."""

    kv_heads: int
    key_width: int
    value_width: int
    block: int


class Kernel:
    """The code for one geometry."""

    def __init__(self, library: Path) -> None:
        """OSError when it cannot be loaded."""
        loaded = ctypes.CDLL(str(library))
        self.attend = loaded.attend_layer
        self.attend.argtypes, self.attend.restype = (ctypes.c_void_p,), None
        self.panel_rows = ctypes.c_int64.in_dll(loaded, "PANEL_ROWS").value
        self.partial_floats = ctypes.c_int64.in_dll(loaded, "PARTIAL_FLOATS").value


class NativeAttention:
    """The kernels of one model's layers."""

    def __init__(self, directory: Path, layers: dict[int, LayerShape], block_size: int, dtype: torch.dtype) -> None:
        """Compiles what is not in ``directory`` yet: half a second for a geometry. NotNative when that cannot be."""
        if dtype is not torch.float32:
            raise NotNative(f"only float32 has a kernel, not {str(dtype).removeprefix('torch.')}")
        found = {index: _Geometry(s.kv_heads, s.head_dim, s.value_dim, block_size) for index, s in layers.items()}
        kernels = {geometry: _kernel(directory, geometry) for geometry in set(found.values())}
        self.kernels = {index: kernels[geometry] for index, geometry in found.items()}

    def step(self, kv: KVMemory, spans: list[Span]) -> NativeStep:
        return NativeStep(self.kernels, kv, spans)


class NativeStep:
    """A step whose attention is computed by them; see ``step.Step``."""

    def __init__(self, kernels: dict[int, Kernel], kv: KVMemory, spans: list[Span]) -> None:
        self._kernels, self._kv, self._spans = kernels, kv, spans
        self._threads = torch.get_num_threads()
        self._slots = _integers([slot for span in spans for slot in span.written()])
        self._blocks = _integers([block for span in spans for block in span.blocks])
        fields, table = [], 0
        for span in spans:
            fields.append((span.first, span.start, span.hidden, table))
            table += len(span.blocks)
        self._fields = _integers(fields)
        self._plans: dict[tuple[int, int, int], _Plan] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        kernel, keys, values = self._kernels[layer], self._kv.keys[layer], self._kv.values[layer]
        heads, rows, _ = query.shape
        plan = self._plan(kernel, heads, keys.shape[1])
        query, key, value = (_readable(each) for each in (query, key, value))
        sinks = None if score.sinks is None else score.sinks.float().contiguous()
        out = query.new_empty(rows, heads, values.shape[2])  # new in each layer: compiled code may write into it
        call = plan.call
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.keys, call.values, call.out = keys.data_ptr(), values.data_ptr(), out.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.query_head, call.query_row, _ = query.stride()
        call.key_head, call.key_row, _ = key.stride()
        call.value_head, call.value_row, _ = value.stride()
        call.window, call.scale, call.softcap = score.window or 0, score.scale, score.softcap or 0.0
        kernel.attend(ctypes.byref(call))
        return out

    def _plan(self, kernel: Kernel, heads: int, kv_heads: int) -> _Plan:
        """The same for all layers of a shape."""
        shape = heads, kv_heads, kernel.partial_floats
        if shape not in self._plans:
            items, parts = _items(self._spans, heads // kv_heads, kv_heads, kernel.panel_rows, self._threads)
            self._plans[shape] = plan = _Plan(_integers(items), torch.empty(parts * kernel.partial_floats))
            call = plan.call
            call.slots, call.blocks, call.spans = (t.data_ptr() for t in (self._slots, self._blocks, self._fields))
            call.items, call.items_count = plan.items.data_ptr(), len(items)
            call.partial = plan.partial.data_ptr() if parts else None
            call.rows, call.group, call.threads = len(self._slots), heads // kv_heads, self._threads
        return self._plans[shape]


class _Plan:
    """How the rows of a step are shared out among threads, and the call that says so."""

    def __init__(self, items: torch.Tensor, partial: torch.Tensor) -> None:
        self.items, self.partial = items, partial
        self.call = _Call()


class _Item(NamedTuple):
    """``Item`` of native.cpp."""

    span: int
    row: int
    rows: int
    begin: int
    end: int
    part: int
    parts: int
    place: int


def _items(spans: Sequence[Span], group: int, kv_heads: int, panel_rows: int, threads: int) -> tuple[list[_Item], int]:
    """The longest first; and how many of them are parts of one that is shared."""
    panels = [
        (number, row, min(panel_rows, span.count * group - row))
        for number, span in enumerate(spans)
        for row in range(0, span.count * group, panel_rows)
    ]
    parts = 1 if threads == 1 else -(-ITEMS_PER_THREAD * threads // (len(panels) * kv_heads))
    items: list[_Item] = []
    place = 0
    for number, row, rows in panels:
        span = spans[number]
        end = span.start + (row + rows - 1) // group + 1
        seen = end - span.hidden
        mine = max(1, min(parts, seen // LEAST_OF_A_PART))
        length = -(-seen // mine // span.block_size) * span.block_size
        for part in range(mine):
            begin = span.hidden + part * length
            items.append(_Item(number, row, rows, begin, min(begin + length, end), part, mine, place))
        place += mine if mine > 1 else 0
    items.sort(key=lambda item: item.begin - item.end)
    return items, place


def _kernel(directory: Path, geometry: _Geometry) -> Kernel:
    sizes = {"KV_HEADS": geometry.kv_heads, "BLOCK": geometry.block}
    sizes |= {"KEY_WIDTH": geometry.key_width, "VALUE_WIDTH": geometry.value_width}
    library = native_code.library(directory / PLACE, SOURCE, sizes)
    try:
        kernel = Kernel(library)
    except OSError as error:
        raise NotNative(f"{type(error).__name__}: {error}") from error
    _check(kernel, geometry)
    return kernel


def _check(kernel: Kernel, geometry: _Geometry) -> None:
    """It must say what the definition says, before anybody relies on it."""
    shape = LayerShape(geometry.kv_heads, geometry.key_width, geometry.value_width)
    kv = KVMemory({0: shape}, 3 * geometry.block, torch.float32, "cpu")
    spans = [Span(0, 2 * geometry.block, 0, (2, 1), geometry.block, 0)]
    made = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(heads, 2 * geometry.block, width, generator=made)
        for heads, width in (
            (2 * shape.kv_heads, shape.head_dim),
            (shape.kv_heads, shape.head_dim),
            (shape.kv_heads, shape.value_dim),
        )
    )
    score = Score(shape.head_dim**-0.5)
    said = NativeStep({0: kernel}, kv, spans).attend(0, query, key, value, score)
    right = reference.attend(query, key, value, start=0, scale=score.scale).transpose(0, 1)
    if not torch.allclose(said, right, rtol=TOLERANCE, atol=TOLERANCE):
        raise NotNative(f"the kernel is wrong by {float((said - right).abs().max()):.2g} on this machine")


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of float32 whose elements adjoin."""
    tensor = tensor.float()
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _integers(rows: Sequence[int] | Sequence[tuple[int, ...]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)
