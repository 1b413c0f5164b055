"""Owns what a step chose for one generation, and how the scores of its tokens are shown. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.detokenizer import REPLACEMENT, Decoder
from engine.protocol import TokenLogprob

LEAST = -9999.0  # said instead of minus infinity, as OpenAI does: JSON has none
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in a SentencePiece vocabulary


@dataclass(frozen=True, slots=True)
class Choice:
    """The new token of one generation and, where asked, the model's own log probabilities (natural)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability), best first


def describe(decoder: Decoder, choice: Choice) -> tuple[TokenLogprob, ...]:
    """The choice with the text of its tokens; nothing when its scores were not asked for."""
    if choice.logprob is None:
        return ()
    top = tuple(_shown(decoder, token, logprob) for token, logprob in choice.top)
    return (_shown(decoder, choice.token, choice.logprob, top),)


def _shown(decoder: Decoder, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    text = _text(decoder, token)
    return TokenLogprob(token, max(logprob, LEAST), text, _bytes(decoder, token, text), top)


def _text(decoder: Decoder, token: int) -> str:
    """Of a token inside a text: alone, or first, some tokenizers strip its leading space."""
    alone = decoder.decode([token], skip_special_tokens=False)
    if REPLACEMENT in alone:  # a second one might complete its character
        return alone
    return decoder.decode([token, token], skip_special_tokens=False)[len(alone) :] or alone


def _bytes(decoder: Decoder, token: int, text: str) -> bytes | None:
    if REPLACEMENT not in text:
        return text.encode()
    piece = decoder.id_to_token(token)
    if piece is None:
        return None
    if byte := BYTE_PIECE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return text.encode() if REPLACEMENT in piece else None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, which byte-level vocabularies are written in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
