"""Owns the plain definition of attention that every faster implementation is tested against."""

from __future__ import annotations

import torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ``T`` new tokens at positions ``start..start+T-1`` over ``L = start + T`` tokens.

    Args:
        query: ``[Hq, T, D]``.
        key: ``[Hkv, L, D]``; ``Hq`` is a multiple of ``Hkv`` (grouped queries).
        value: ``[Hkv, L, Dv]``.
        window: a token sees itself and ``window - 1`` tokens before it; None: all before it.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
        sinks: ``[Hq]`` extra scores that take part in the softmax and carry no value (gpt-oss).

    Returns:
        ``[Hq, T, Dv]``.
    """
    heads, new, _ = query.shape
    group = heads // key.shape[0]
    key = key.repeat_interleave(group, 0)
    value = value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(start, new, key.shape[1], window, query.device), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(heads, new, 1)], -1)
    weights = torch.softmax(scores.float(), -1).to(value.dtype)
    return weights[..., : key.shape[1]] @ value


def visible(start: int, new: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean ``[T, L]``: may the token at ``start + row`` see the token at ``column``?

    The columns are the last ``length`` positions up to and including the newest token.
    """
    rows = torch.arange(start, start + new, device=device)[:, None]
    first = start + new - length
    columns = torch.arange(first, start + new, device=device)[None, :]
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    return mask
