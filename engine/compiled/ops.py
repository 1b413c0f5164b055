"""Owns the two things that compiled code calls back for: attention, and products with packed weights.

A compiled layer is the same for all layers of its kind, so it does not know which one it is: ``running`` says so.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

from engine.attention.paged import current_step
from engine.attention.step import Score
from engine.linear import product

running: ContextVar[tuple[int, Score]] = ContextVar("running")  # the layer, and how it forms its scores

_LIBRARY: Any = torch.library.Library("orchestrator", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("attend(Tensor query, Tensor key, Tensor value) -> Tensor")
_LIBRARY.define("linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    step = current_step.get()
    assert step is not None
    layer, score = running.get()
    return step.attend(layer, query, key, value, score)


def _attend_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


def _linear_shape(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


_LIBRARY.impl("attend", _attend, "CPU")
_LIBRARY.impl("linear", product, "CPU")
_LIBRARY.impl("linear", product, "MkldnnCPU")  # as which a reordered weight is dispatched
for name, shape in (("attend", _attend_shape), ("linear", _linear_shape)):  # what an export knows of them
    torch.library.register_fake(f"orchestrator::{name}", shape, lib=_LIBRARY)

attend = torch.ops.orchestrator.attend.default
linear = torch.ops.orchestrator.linear.default
