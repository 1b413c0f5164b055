"""Owns what an engine refuses at its door, whatever it holds at the moment."""

from __future__ import annotations

from engine.protocol import GenerationRequest, SamplingParams
from policies.errors import BadRequest


def validate(request: GenerationRequest, vocabulary: int) -> None:
    """BadRequest unless a model with so many tokens can answer it."""
    tokens = request.prompt_token_ids
    if not tokens:
        raise BadRequest("the prompt has no tokens", param="messages")
    known = tokens + request.delivered_token_ids
    for token in (min(known), max(known)):
        if not 0 <= token < vocabulary:
            raise BadRequest(f"token id {token} is outside the vocabulary of {vocabulary}", param="messages")
    _validate_sampling(request.sampling, len(request.delivered_token_ids), vocabulary)


def _validate_sampling(sampling: SamplingParams, delivered: int, vocabulary: int) -> None:
    if sampling.max_tokens <= delivered:
        raise BadRequest(
            f"max_tokens {sampling.max_tokens} leaves nothing to generate after {delivered} delivered tokens",
            param="max_tokens",
        )
    if sampling.min_tokens > sampling.max_tokens:
        raise BadRequest(
            f"min_tokens {sampling.min_tokens} is above the {sampling.max_tokens} tokens the answer may have",
            param="min_tokens",
        )
    for token, _ in sampling.logit_bias:
        if not 0 <= token < vocabulary:
            raise BadRequest(
                f"logit_bias names token id {token}, outside the vocabulary of {vocabulary}", param="logit_bias"
            )
