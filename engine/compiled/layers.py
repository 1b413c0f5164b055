"""Owns the layers of a model that runs compiled: whose code is called instead of theirs, and that it says the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.attention.step import Score
from engine.compiled.ops import running
from engine.compiled.words import Description, LayerCode, LayerScore
from engine.linear import PackedLinear


class CompiledLayers:
    """Installed from the start; ``remove`` makes the model plain again."""

    def __init__(self, model: torch.nn.Module, place: Path, description: Description) -> None:
        """RuntimeError when a library cannot be loaded; Attribute-, Type- or ValueError for a model of another kind."""
        container = model.get_submodule(description.container)
        forwards: list[tuple[torch.nn.Module, Callable[..., Any]]] = []
        said = sorted(score.layer for code in description.codes for score in code.layers)
        if said != list(range(len(container))):  # type: ignore[arg-type]
            raise ValueError(f"compiled are layers {said} of {len(container)}")  # type: ignore[arg-type]
        for code in description.codes:
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(place / code.library), 1)
            for score in code.layers:
                layer: torch.nn.Module = container[score.layer]  # type: ignore[index]
                forwards.append((layer, _forward(layer, score, code, runner)))
        self._layers = [layer for layer, _ in forwards]
        for layer, forward in forwards:  # all of them or none
            layer.forward = forward

    def remove(self) -> None:
        for layer in self._layers:
            layer.__dict__.pop("forward", None)


def _forward(layer: torch.nn.Module, score: LayerScore, code: LayerCode, runner: Any) -> Callable[..., Any]:
    packed = [layer.get_submodule(name) for name in code.packed]
    assert all(isinstance(module, PackedLinear) for module in packed)
    owned = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    tensors = [owned[name] for name in code.tensors]
    me = score.layer, Score(score.scale, score.window, score.softcap)
    places = [(int(path[0]) if path[0].isdigit() else path[0], *map(int, path[1:])) for path in code.inputs]

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = []
        for first, *rest in places:
            found = args[first] if isinstance(first, int) else kwargs[first]
            for index in rest:
                found = found[index]
            inputs.append(found)
        inputs += [module._packed for module in packed]
        inputs += tensors
        running.set(me)
        (out,) = runner.run(inputs)
        return (out,) if code.in_tuple else out

    return forward
