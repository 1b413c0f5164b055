"""Owns what an engine's process has before it has a model, and that it has no more than that after one."""

from __future__ import annotations

import gc
from collections import Counter

import torch
from transformers.modeling_utils import AttentionInterface

from engine.attention import paged
from engine.attention.kv import KVMemory
from engine.context import Context
from engine.core import EngineCore
from engine.detokenizer import TextStream
from engine.memory import held_bytes, trim
from engine.runner import Runner
from engine.weights import Weights
from policies.errors import EngineError

OF_A_MODEL = (EngineCore, Weights, Runner, KVMemory, Context, TextStream)


def prepare() -> int:
    """What every load needs first: this module's imports, threads, oneDNN. Bytes the process holds now."""
    with torch.inference_mode():
        torch.nn.functional.linear(torch.ones(8, 64), torch.ones(64, 64))
    trim()
    return held_bytes()


def assert_clean() -> None:
    """EngineError that names what an earlier model has left in this process: its next model would answer with it."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())  # not isinstance: objects may do anything when asked that
    left = Counter(kind.__name__ for kind in kinds if issubclass(kind, OF_A_MODEL))
    found = [f"{count} {name}" for name, count in sorted(left.items())]
    if paged.current_step.get(None) is not None:
        found.append("the masks and blocks of a step")
    if AttentionInterface._global_mapping.get(paged.NAME) is not paged.paged_attention:
        found.append("another attention under our name")
    if torch.get_default_dtype() is not torch.float32:
        found.append(f"default dtype {torch.get_default_dtype()}")
    if found:
        raise EngineError(f"this process is not clean: it holds {', '.join(found)}")
    trim()
