"""Owns GET /v1/models: OpenAI's list, with residency and window as extra fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_pool.states import NEAREST_FIRST
from orchestrator.config import Config
from orchestrator.pool_words import PoolPicture
from orchestrator.tokens import ChatTokenizer
from policies.types import ModelState


def model_list(config: Config, tokenizers: Mapping[str, ChatTokenizer], pool: PoolPicture | None) -> dict[str, Any]:
    """The list. ``state`` is null while the controller does not answer."""
    states = _states(pool) if pool is not None else {}
    data = []
    for model in config.models:
        tokenizer = tokenizers.get(model.name)
        data.append(
            {
                "id": model.name,
                "object": "model",
                "created": 0,
                "owned_by": "context-orchestrator",
                "state": states.get(model.name),
                "context_length": model.max_model_len,
                "source": model.source,
                "aliases": list(model.aliases),
                "chat_template": None if tokenizer is None else "fallback" if tokenizer.fallback else "own",
            }
        )
    return {"object": "list", "data": data}


def _states(pool: PoolPicture) -> dict[str, str]:
    """A model's state: that of its host which is nearest to serving."""
    found: dict[str, list[ModelState]] = {}
    for entry in pool.models:
        found.setdefault(entry.status.model, []).append(entry.status.state)
    return {model: str(min(states, key=NEAREST_FIRST.index)) for model, states in found.items()}
