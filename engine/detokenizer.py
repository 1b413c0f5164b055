"""Owns the way from token ids to text that may be sent: no half characters, nothing of a stop string. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

REPLACEMENT = "\ufffd"  # what a tokenizer prints for bytes that are not (yet) a character
LONGEST_CHARACTER = 4  # bytes of UTF-8, so tokens of a byte-level vocabulary
LONGEST_GARBAGE = 64  # tokens without a whole character at their end after which we start afresh
PROMPT_TAIL = 6  # prompt tokens kept as context: some tokenizers strip the first token's leading space


class Decoder(Protocol):
    """The part of ``tokenizers.Tokenizer`` used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int, /) -> str | None: ...


class IncrementalDecoder:
    """Feeds on token ids, yields text as soon as its characters are whole.

    Technique: two offsets into the ids; text is the difference of decoding with and without the new ids (as in
    text-generation-inference and vLLM).
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decoder = decoder
        tail = list(prompt_token_ids[-PROMPT_TAIL:])
        if self._text(tail).endswith(REPLACEMENT):
            tail = []  # the prompt ends inside a character: it must not appear in our first piece
        self._ids = tail
        self._prefix = 0  # start of the context
        self._read = len(tail)  # where the next context begins
        self._sent = len(self._text(tail))  # characters of the text from _prefix on that were sent
        self._unfinished = 0  # tokens in a row after which the text ended inside a character

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed_one, token_ids))

    def flush(self) -> str:
        """The rest, whole or not."""
        rest = self._text(self._ids[self._prefix :])[self._sent :]
        self._begin_context(len(self._ids))
        return rest

    def _feed_one(self, token: int) -> str:
        self._ids.append(token)
        text = self._text(self._ids[self._prefix :])
        if not text.endswith(REPLACEMENT):
            self._unfinished = 0
            piece = text[self._sent :]
            if piece:
                self._begin_context(self._read)
            return piece
        self._unfinished += 1
        if self._unfinished < LONGEST_CHARACTER:
            return ""
        if self._unfinished >= LONGEST_GARBAGE:  # else the context would grow without end
            return self.flush()
        # Not UTF-8, at least not all of it. Only the last replacement may still become a character.
        piece = text[self._sent : -1]
        self._sent = max(self._sent, len(text) - 1)
        return piece

    def _begin_context(self, at: int) -> None:
        """All text so far is sent; the ids from ``at`` on stay as context for what follows."""
        self._prefix, self._read = at, len(self._ids)
        self._sent = len(self._text(self._ids[at:]))
        self._unfinished = 0

    def _text(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True) if ids else ""


@dataclass(slots=True)
class StopStrings:
    """Holds back text that may be the beginning of a stop string."""

    stops: tuple[str, ...]
    _held: str = field(default="", init=False)
    hit: bool = field(default=False, init=False)

    def feed(self, text: str, armed: bool = True) -> str:
        """Text that is safe to send. After a hit: what came before the stop string, then nothing ever.

        Not ``armed``, a whole stop string is text like any other; one that only begins is held back all the same.
        """
        if self.hit:
            return ""
        text = self._held + text
        # the one that ends first: so that the cut does not depend on how the text was split into pieces
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found and armed:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and turned out not to match; nothing after a hit."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ends ``text``."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class TextStream:
    """One generation's way out: decoder, then stop strings, which end nothing before ``min_tokens`` tokens."""

    def __init__(
        self, decoder: Decoder, prompt_token_ids: Sequence[int], stops: tuple[str, ...], min_tokens: int = 0
    ) -> None:
        self._decoder = IncrementalDecoder(decoder, prompt_token_ids)
        self._stops = StopStrings(stops)
        self._unarmed = min_tokens  # tokens to come before a stop string may end the generation

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed_one, token_ids))

    def _feed_one(self, token: int) -> str:
        self._unarmed = max(0, self._unarmed - 1)
        return self._stops.feed(self._decoder.feed([token]), armed=not self._unarmed)

    @property
    def stopped(self) -> bool:
        return self._stops.hit

    def finish(self) -> str:
        """The last piece of a generation that ended without a stop string."""
        return self._stops.feed(self._decoder.flush()) + self._stops.flush()
