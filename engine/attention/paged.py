"""Owns the one attention function registered with transformers.

The model code calls it for every layer with rotated, unrepeated heads; the step that runs does the rest. The step
travels in a ContextVar: some families drop custom keyword arguments, and a global would break two engines in one
process.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from engine.attention import reference
from engine.attention.kv import LayerShape
from engine.attention.step import Score, Step

NAME = "orchestrator_paged"

current_step: ContextVar[Step | None] = ContextVar("current_step")


@dataclass(slots=True)
class Probe:
    """Stands in for a step while the model is probed: plain causal attention, and a record of who called."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    dispatches: dict[int, int] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score: Score
    ) -> torch.Tensor:
        self.layers[layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2], score.window)
        self.scores[layer] = score
        self.dispatches[layer] = self.dispatches.get(layer, 0) + 1
        out = reference.attend(
            query,
            key,
            value,
            start=0,
            scale=score.scale,
            window=score.window,
            softcap=score.softcap,
            sinks=score.sinks,
        )
        return out.transpose(0, 1).contiguous()


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The hook (shapes: query ``[1, Hq, T, D]``, key and value ``[1, Hkv, T, D]`` → ``[1, T, Hq, Dv]``)."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    score = Score(scaling or query.shape[-1] ** -0.5, sliding_window, softcap, s_aux)
    step = current_step.get()
    assert step is not None
    return step.attend(layer, query[0], key[0], value[0], score)[None], None


AttentionInterface.register(NAME, paged_attention)
