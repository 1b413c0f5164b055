"""Owns products with folded weights on the CPU, by code of our own (``native.cpp``), compiled once and kept on disk."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from engine import native_code
from engine.native_code import NotNative
from engine.quantised import grid

SOURCE = Path(__file__).with_name("native.cpp")
PLACE = "products"  # in the directory for compiled code
TOLERANCE = 1e-5
CHECKED_ROWS = (1, 2, 4, 8, 12, 16, 40)  # each has code of its own


class _Call(ctypes.Structure):
    """``Call`` of native.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "tiles", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("count", "stride", "inputs", "outputs", "bits", "group", "threads")),
    )


class _Kernel:
    """The library, once for the whole process: products are called for by the weight alone."""

    def __init__(self, library: Path) -> None:
        """OSError when it cannot be loaded."""
        loaded = ctypes.CDLL(str(library))
        self.multiply = loaded.multiply_rows
        self.multiply.argtypes, self.multiply.restype = (ctypes.c_void_p,), None


_kernel: _Kernel | None = None


def load(directory: Path) -> None:
    """Have it compiled in ``directory`` (two seconds, once) and checked; NotNative when it cannot be."""
    global _kernel
    if _kernel is not None:
        return
    try:
        found = _Kernel(native_code.library(directory / PLACE, SOURCE, {"TILE": grid.TILE}))
    except OSError as error:
        raise NotNative(f"{type(error).__name__}: {error}") from error
    _check(found)
    _kernel = found


def multiply(rows: torch.Tensor, folded: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows`` (``[..., inputs]``, float32) with a folded weight (``[outputs, bytes]``): ``[..., outputs]``."""
    assert _kernel is not None
    return _multiply(_kernel, rows, folded, bias)


def _multiply(kernel: _Kernel, rows: torch.Tensor, folded: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    inputs, outputs = rows.shape[-1], folded.shape[0]
    flat = rows.reshape(-1, inputs)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = rows.new_empty(*rows.shape[:-1], outputs)
    bits, group = grid.layout(folded, inputs)
    call = _Call(
        flat.data_ptr(),
        folded.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        flat.shape[0],
        flat.stride(0),
        inputs,
        outputs,
        bits,
        group,
        torch.get_num_threads(),
    )
    kernel.multiply(ctypes.byref(call))
    return out


def _check(kernel: _Kernel) -> None:
    """It must say what the definition says, before anybody relies on it."""
    made = torch.Generator().manual_seed(0)
    outputs, inputs = 2 * grid.TILE, 96
    numbers = torch.randint(0, 256, (outputs, inputs), generator=made).float()
    weights = [grid.fold(numbers.remainder(16)), grid.fold(numbers), grid.fold_bfloat16(numbers.bfloat16())]
    for folded in weights:
        assert folded is not None
        weight = grid.unfold(folded, inputs).double()
        for count in CHECKED_ROWS:
            rows = torch.randn(count, inputs, generator=made)
            said, right = _multiply(kernel, rows, folded, None), rows.double() @ weight.T
            off = float((said - right).abs().max() / right.abs().max())
            if not off < TOLERANCE:
                raise NotNative(f"products are wrong by {off:.2g} on this machine")
