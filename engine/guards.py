"""Owns what is refused at a load because paged attention would make it silently wrong, each with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from engine.attention.kv import LayerShape
from engine.protocol import EngineLimits
from policies.errors import LoadFailed

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
SAME_SCORES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}  # of the largest: above rounding


def read_config(path: Path) -> PretrainedConfig:
    """The model's configuration, if nothing in it says that we cannot run it."""
    if not (path / "config.json").is_file():
        raise LoadFailed(f"{path} has no config.json; it is not a model directory")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path)
    except (ValueError, OSError, KeyError) as error:
        raise LoadFailed(f"{path}: config.json is not usable: {error}") from error
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise LoadFailed(f"{path.name}: cross attention is not supported; only models of text to text, decoder alone")
    if _alibi(config):
        raise LoadFailed(f"{path.name}: its ALiBi biases come in a mask, which paged attention does not take; refused")
    kinds = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if kinds:  # these live in the mask, or keep a state of their own: our attention would be silently wrong
        raise LoadFailed(f"{path.name}: layers of type {', '.join(sorted(kinds))} are not supported")
    return config


def fit_window(name: str, config: PretrainedConfig, limits: EngineLimits) -> EngineLimits:
    """Limits within the model's trained window. LoadFailed when positions there depend on who else is in the batch."""
    trained = getattr(config, "max_position_embeddings", None)
    fitted = dataclasses.replace(limits, max_model_len=min(limits.max_model_len, trained or limits.max_model_len))
    if getattr(config, "attn_temperature_tuning", False) and fitted.max_model_len > config.floor_scale:
        raise LoadFailed(
            f"{name}: beyond {config.floor_scale} tokens its attention is scaled by a position it counts by itself; "
            f"refused with max_model_len {fitted.max_model_len}, set it to {config.floor_scale} at most"
        )
    for rope in _ropes(config):
        if "mrope_section" in rope:
            raise LoadFailed(f"{name}: m-rope gives a token three positions, and we know one; refused")
        kind = rope.get("rope_type")
        if kind == "longrope":
            frozen = rope.get("original_max_position_embeddings")
        elif kind == "dynamic":
            frozen = trained
        else:
            continue
        if frozen is None or fitted.max_model_len > frozen:
            raise LoadFailed(
                f"{name}: {kind} rotary embedding makes one request depend on its neighbours' length beyond {frozen} "
                f"tokens; refused with max_model_len {fitted.max_model_len}, set it to {frozen} at most"
            )
    return fitted


def not_dispatched(config: PretrainedConfig, layers: list[int], cause: str) -> LoadFailed:
    return LoadFailed(
        f"{config.model_type}: layers {layers} of {config.num_hidden_layers} do not dispatch to paged attention "
        f"exactly once{cause}; this model family is not supported"
    )


def check_windows(config: PretrainedConfig, layers: Mapping[int, LayerShape], limits: EngineLimits) -> None:
    """LoadFailed for layers that should not see everything and do: their window lives in a mask we do not take."""
    window = getattr(config, "sliding_window", None)
    if not window or limits.max_model_len <= window:
        return
    if hasattr(type(config), "use_sliding_window") and not config.use_sliding_window:  # else a word nobody reads
        return
    kinds = getattr(config, "layer_types", None)
    if kinds is None and any(shape.window is not None for shape in layers.values()):
        return  # it does tell, and which layers have one is its own affair
    blind = [
        i for i, shape in layers.items() if shape.window is None and (not kinds or kinds[i] == "sliding_attention")
    ]
    if blind:
        raise LoadFailed(
            f"{config.model_type}: layers {blind} do not tell paged attention their window of {window} tokens; "
            f"refused with max_model_len {limits.max_model_len}, set it to {window} at most"
        )


def check_scores(config: PretrainedConfig, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    """LoadFailed when the model answers otherwise than by transformers' own attention."""
    if not same_scores(ours, theirs, dtype):
        raise LoadFailed(
            f"{config.model_type}: scores through paged attention {_differ(ours, theirs)} from those of its own; this "
            "model family is not supported"
        )


def check_pieces(config: PretrainedConfig, pieces: torch.Tensor, whole: torch.Tensor, dtype: torch.dtype) -> None:
    """LoadFailed when a prompt answers otherwise in two steps than in one."""
    if not same_scores(pieces, whole, dtype):
        raise LoadFailed(
            f"{config.model_type}: scores of a prompt in two pieces {_differ(pieces, whole)}: it counts positions by "
            "itself and not as told; this model family is not supported"
        )


def same_scores(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    """But for rounding; what holds a NaN is not the same, nor are scores of other tokens."""
    if ours.shape != theirs.shape:
        return False
    return float((ours - theirs).abs().max()) <= SAME_SCORES[dtype] * float(theirs.abs().max())


def _differ(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"differ in shape, {tuple(ours.shape)} and {tuple(theirs.shape)},"
    return f"differ by {float((ours - theirs).abs().max()):.2g} (of {float(theirs.abs().max()):.2g})"


def _alibi(config: PretrainedConfig) -> bool:
    attention = getattr(config, "attn_config", None)
    return bool(
        getattr(config, "alibi", False)
        or getattr(attention, "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
        or config.model_type == "bloom"
    )


def _ropes(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Its rotary embeddings: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    yield rope
    yield from (each for each in rope.values() if isinstance(each, dict))
