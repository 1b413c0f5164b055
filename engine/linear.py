"""Owns the form of matrix products on the CPU: plain, with the weight in oneDNN's own layout, or folded into few bits.

A reordered weight multiplies up to 2.5 times as fast for 2 to 1,000 rows (float32); on some processors, as fast. One
that was folded (``quantised``) is a fifth to a half of it, and a few rows wait for memory alone: it multiplies one to
16 rows two to five times as fast again, 32 at 1.5 times the speed, and hundreds a tenth slower. Either takes the plain
weight's place: there is no second copy, and waking fills it straight from a mapped file, at about the cost of a memcpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.device import seconds_of
from engine.quantised import grid, native
from engine.recipe import Form

Product = Callable[[torch.Tensor], object]  # of rows, with one weight
MEASURED_ROWS = (1, 8, 32)  # one stream, a batch of decodes, a piece of a prompt
SAMPLES = 5
SMALL, OTHERS = 1 << 18, 1 << 24  # bytes of a weight; and of what a step reads before it comes to it again
CLEARLY_SLOWER = 1.25  # over all of them: below, measurements would say now this, now that, and nothing compiled fit


class PackedLinear(torch.nn.Module):
    """Stands in for a ``Linear``; ``pack`` gives it a weight, ``unpack`` takes it away."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # right shape, dtype and device for model code that asks; code that multiplies with it is found out by NaN
        nan = torch.full((1, 1), float("nan"), dtype=linear.weight.dtype).expand(linear.weight.shape)
        self.weight = torch.nn.Parameter(nan, requires_grad=False)
        self._packed: torch.Tensor | None = None

    def pack(self, packed: torch.Tensor) -> None:
        """Take a weight over: ``reordered``, or folded."""
        self._packed = packed

    def unpack(self) -> None:
        self._packed = None

    def dense(self) -> torch.Tensor:
        """A plain copy of the weight."""
        assert self._packed is not None
        return self._packed.to_dense() if self._packed.is_mkldnn else grid.unfold(self._packed, self.in_features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._packed is not None
        return product(rows, self._packed, self.bias)


def product(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows`` (``[..., inputs]``) with a packed weight: ``[..., outputs]``."""
    if packed.is_mkldnn:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        return out
    return native.multiply(rows, packed, bias)


def reordered(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight (``[outputs, inputs]``) in oneDNN's layout."""
    with torch.inference_mode():
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


@dataclass(frozen=True, slots=True)
class Foldable:
    """What a folded weight is made of: itself, or its numbers in bfloat16."""

    flat: torch.Tensor  # a view of a mapped file
    outputs: int

    @property
    def width(self) -> int:
        """Bytes of an output, folded."""
        return self.flat.nbytes // self.outputs

    def make(self) -> torch.Tensor:
        """The folded weight, in memory of its own."""
        rows = self.flat.view(self.outputs, -1)
        return rows.clone() if rows.dtype == torch.uint8 else grid.fold_bfloat16(rows)


def choose(model: torch.nn.Module, foldable: Mapping[str, Foldable]) -> dict[str, Form]:
    """The form that each plain float32 ``Linear`` on the CPU multiplies best in, by name; without those to leave plain.

    Args:
        foldable: by the names of the modules.
    """
    fastest: dict[tuple[torch.Size, int], Form | None] = {}  # by shape, and width when folded
    found: dict[str, Form] = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and module.weight.dtype == torch.float32 and module.weight.is_cpu:
            other = foldable.get(name)
            kind = module.weight.shape, other.width if other else 0
            if kind not in fastest:
                fastest[kind] = _fastest(module.weight, other)
            form = fastest[kind]
            if form is not None:
                found[name] = form
    return found


def _fastest(weight: torch.Tensor, foldable: Foldable | None) -> Form | None:
    """Measured here and now: it depends on the processor and on what torch was built with.

    None is the plain one. A later form is taken unless it is clearly slower.
    """
    forms: dict[Form | None, Product] = {None: lambda rows: F.linear(rows, weight)}
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        in_its_layout = reordered(weight)
        forms["reordered"] = lambda rows: product(rows, in_its_layout, None)
    if foldable is not None:
        folded = foldable.make()
        forms["folded"] = lambda rows: product(rows, folded, None)
    best, chosen = math.inf, None
    for form, seconds in _seconds(weight, forms).items():
        if seconds < CLEARLY_SLOWER * best:
            best, chosen = min(best, seconds), form
    return chosen


def _seconds(weight: torch.Tensor, forms: Mapping[Form | None, Product]) -> dict[Form | None, float]:
    """Multiplied over all row counts, so that each has the same say.

    Forms take turns, as a neighbour may be busy for a while, and a large weight comes from memory, as in a step.
    """
    others = torch.zeros(OTHERS if weight.nbytes > SMALL else 0, dtype=torch.uint8)
    total = dict.fromkeys(forms, 1.0)
    with torch.inference_mode():
        for count in MEASURED_ROWS:
            rows = torch.ones(count, weight.shape[1])
            fastest = dict.fromkeys(forms, math.inf)
            for _ in range(SAMPLES):
                for form, work in forms.items():
                    others += 1
                    fastest[form] = min(fastest[form], seconds_of(lambda work=work, rows=rows: work(rows)))  # type: ignore[misc]
            for form in forms:
                total[form] *= fastest[form]
    return total
