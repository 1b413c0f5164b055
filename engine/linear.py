"""Owns the form of matrix products on the CPU: plain, or with the weight in oneDNN's own layout.

A reordered weight multiplies up to 2.5 times as fast for 2 to 1,000 rows (float32); on some processors, as fast. It
takes the plain weight's place: there is no second copy, and waking reorders straight from the mapped file, at about the
cost of a memcpy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.device import fastest_of

MEASURED_ROWS = (1, 8, 32)  # one stream, a batch of decodes, a piece of a prompt
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

    def pack(self, weight: torch.Tensor) -> None:
        """Take a copy of ``weight`` (``[out_features, in_features]``, any float dtype) in oneDNN's layout."""
        self._packed = _reordered(weight.to(self.weight.dtype))

    def unpack(self) -> None:
        self._packed = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of the reordered weight, when there is one."""
        return self.weight.numel() * self.weight.element_size()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return out


def packable(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The plain float32 ``Linear`` modules on the CPU whose shape multiplies as fast reordered or faster, by name."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return {}
    worth: dict[torch.Size, bool] = {}
    found = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and module.weight.dtype == torch.float32 and module.weight.is_cpu:
            shape = module.weight.shape
            if shape not in worth:
                worth[shape] = _is_as_fast(module.weight)
            if worth[shape]:
                found[name] = module
    return found


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def _is_as_fast(weight: torch.Tensor) -> bool:
    """Measured here and now: which form is faster depends on the processor and on what torch was built with."""
    packed = _reordered(weight)
    ratio = 1.0
    with torch.inference_mode():
        for count in MEASURED_ROWS:
            rows = torch.ones(count, weight.shape[1])
            plain = fastest_of(lambda rows=rows: F.linear(rows, weight))  # type: ignore[misc]
            reordered = fastest_of(
                lambda rows=rows: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")  # type: ignore[misc]
            )
            ratio *= reordered / plain
    return ratio < CLEARLY_SLOWER
