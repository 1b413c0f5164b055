"""Owns what a model has said, as token ids: how they lie beside the text in the store, how they come into a prompt.

An answer goes back to its model as the ids it said, not as what its text tokenizes to: the two differ (a line end said
twice, a byte that is no character, another way to cut a word), and from there on its KV would not be found.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from engine.detokenizer import IncrementalDecoder
from orchestrator.tokens import ChatTokenizer, Encoder, Message
from policies.errors import BadRequest

REACH = 24  # tokens; two ways to say one text part and meet again within a word or two
SEAL_DIGITS = 12  # hexadecimal, of the hash that binds stored ids to their tokenizer and to their text


class Conversation:
    """Messages on their way into one prompt: cut down to what fits, counted as they are encoded.

    The prompt's text is always the template's. The ids of an answer are in it where that text has the answer as it is,
    once; what the template changes (trims it, cuts its thoughts out) is tokenized like all other text.
    """

    def __init__(self, tokenizer: ChatTokenizer, messages: Sequence[Message], kept: Mapping[int, str]) -> None:
        """``kept``: index of an answer of this tokenizer's model → what ``keep`` made of its ids."""
        self._tokenizer = tokenizer
        self._messages = messages
        self._kept = kept
        self._recalled: dict[int, list[int]] = {}
        # A prompt is counted several times while it is cut down; most of its texts are in all of these.
        self._known: dict[str, list[int]] = {}
        self._encoded: dict[tuple[int, ...], list[int]] = {}

    def count(self, indices: tuple[int, ...], enough: int) -> int:
        """Tokens of the prompt of these messages; a lower bound where ``ChatTokenizer.count`` gives one."""
        text = self._render(indices)
        least = self._tokenizer.least(text)
        return least if least > enough else len(self._encode(indices, text))

    def encode(self, indices: tuple[int, ...]) -> list[int]:
        """The prompt of these messages."""
        return self._encoded.get(indices) or self._encode(indices, self._render(indices))

    def _render(self, indices: tuple[int, ...], instead: Mapping[int, str] | None = None) -> str:
        """The template's text, with other contents for some of the messages."""
        messages = [self._messages[index] for index in indices]
        if instead:
            changed = zip(indices, messages, strict=True)
            messages = [{**m, "content": instead[i]} if i in instead else m for i, m in changed]
        return self._tokenizer.render(messages)

    def _encode(self, indices: tuple[int, ...], text: str) -> list[int]:
        ids: list[int] = []
        place = 0
        for begin, end, index in self._answers(indices, text):
            ids += self._text(text[place:begin], after=place > 0)
            ids += self._recalled[index]
            place = end
        ids += self._text(text[place:], after=place > 0)
        self._encoded[indices] = ids
        return ids

    def _text(self, text: str, *, after: bool) -> list[int]:
        if not text:
            return []
        if not after:
            return self._tokenizer.encoder.encode(text)
        if text not in self._known:
            self._known[text] = self._tokenizer.encoder.encode_after(text)
        return self._known[text]

    def _answers(self, indices: tuple[int, ...], text: str) -> Iterator[tuple[int, int, int]]:
        """(begin, end, index) of each recalled answer that stands in ``text``, the template's, as it is.

        Found by rendering again with a mark in place of each: the texts between the marks tell where each has its
        place. An answer that is not there unchanged is passed over, up to the text that follows it.
        """
        mark = f"m{secrets.token_hex(8)}x"
        marked = {index: f"{mark}{index}m" for index in indices if self._recall(index)}
        if not marked:
            return
        try:
            first, *rest = re.split(f"{mark}([0-9]+)m", self._render(indices, marked))
        except BadRequest:  # the template takes the answers, and not the marks
            return
        answers, place = [int(index) for index in rest[::2]], len(first)
        times = Counter(answers)
        if not text.startswith(first) or not times.keys() <= marked.keys():
            return
        for index, following in zip(answers, rest[1::2], strict=True):
            content = self._messages[index]["content"]
            end = place + len(content)
            if text.startswith(content, place) and text.startswith(following, end):
                if times[index] == 1:
                    yield place, end, index
            else:
                end = text.find(following, place) if following else -1
                if end < 0:
                    return
            place = end + len(following)

    def _recall(self, index: int) -> list[int]:
        """Empty: there are none to use."""
        if index not in self._kept:
            return []
        if index not in self._recalled:
            ids = recall(self._tokenizer.encoder, self._kept[index], self._messages[index]["content"])
            self._recalled[index] = ids or []
        return self._recalled[index]


def keep(encoder: Encoder, prompt: Sequence[int], said: Sequence[int], text: str) -> str | None:
    """An answer's token ids in the form that is stored beside its text; None when they do not say just this text.

    Mostly they are what the text tokenizes to, and only that is noted; else where they differ from it.

    Args:
        prompt: the ids that the answer followed.
        said: its ids. An end token, and what a stop string cut off, is left out.
    """
    ids = _saying(encoder, prompt, said, text)
    if not ids:
        return None
    usual = encoder.encode_after(text)
    if ids == usual:
        return _seal(encoder, text)
    return f"{_seal(encoder, text)}:{_pack(_changes(usual, ids))}"


def recall(encoder: Encoder, kept: str, text: str) -> list[int] | None:
    """The ids that ``keep`` kept; None when they were another tokenizer's, or another text's."""
    seal, _, changes = kept.partition(":")
    if seal != _seal(encoder, text):
        return None
    usual = encoder.encode_after(text)
    return _changed(usual, _unpack(changes)) if changes else usual


def _seal(encoder: Encoder, text: str) -> str:
    return hashlib.sha256(f"{encoder.identity}\n{text}".encode()).hexdigest()[:SEAL_DIGITS]


def _saying(encoder: Encoder, prompt: Sequence[int], said: Sequence[int], text: str) -> list[int]:
    """The first ids of ``said`` that say exactly ``text``, all of them where they can; else none."""
    ids = list(said)
    if ids and ids[-1] in encoder.special:  # the end token is the template's business
        ids.pop()
    if encoder.decode(ids) != text:  # a stop string, half a character, a first space that decoding strips; or others
        ids = ids[: _said_by(IncrementalDecoder(encoder, prompt), ids, text)]
    # A control token has no text: who reads the history would not know that the model sees it.
    return [] if encoder.special.intersection(ids) or not text else ids


def _said_by(decoder: IncrementalDecoder, ids: Sequence[int], text: str) -> int:
    """How many of these ids say exactly ``text``, decoded as it was when it was sent; 0: none do."""
    place, cut = 0, 0
    for number, token in enumerate(ids, 1):
        piece = decoder.feed([token])
        if not text.startswith(piece, place):
            return cut
        place += len(piece)
        if place == len(text):
            cut = cut or number
    return len(ids) if text[place:] == decoder.flush() else cut


def _changes(usual: Sequence[int], ids: Sequence[int]) -> list[int]:
    """What makes ``ids`` of ``usual``, place by place: how many stay, how many go, how many come, and these."""
    changes: list[int] = []
    at, place, kept = 0, 0, 0
    while at < len(usual) or place < len(ids):
        if at < len(usual) and place < len(ids) and usual[at] == ids[place]:
            at, place, kept = at + 1, place + 1, kept + 1
            continue
        go, come = _meet(usual[at : at + REACH], ids[place : place + REACH]) or (len(usual) - at, len(ids) - place)
        changes += [kept, go, come, *ids[place : place + come]]
        at, place, kept = at + go, place + come, 0
    return changes


def _meet(some: Sequence[int], others: Sequence[int]) -> tuple[int, int] | None:
    """How far on in each they are the same again for two tokens, the nearest such place."""
    for distance in range(1, len(some) + len(others) - 3):
        for one in range(max(0, distance - len(others) + 2), min(distance, len(some) - 2) + 1):
            other = distance - one
            if some[one] == others[other] and some[one + 1] == others[other + 1]:
                return one, other
    return None


def _changed(usual: Sequence[int], changes: Sequence[int]) -> list[int]:
    ids: list[int] = []
    at, place = 0, 0
    while place < len(changes):
        kept, go, come = changes[place : place + 3]
        ids += usual[at : at + kept]
        ids += changes[place + 3 : place + 3 + come]
        at, place = at + kept + go, place + 3 + come
    return ids + list(usual[at:])


def _pack(ids: Iterable[int]) -> str:
    """Seven bits a byte, the lowest first, in base64: 2.7 characters for an id below 16,384, 4 below two million."""
    packed = bytearray()
    for token in ids:
        rest = token
        while rest > 0x7F:
            packed.append(rest & 0x7F | 0x80)
            rest >>= 7
        packed.append(rest)
    return base64.b64encode(packed).decode()


def _unpack(packed: str) -> list[int]:
    ids, token, shift = [], 0, 0
    for byte in base64.b64decode(packed):
        token |= (byte & 0x7F) << shift
        shift += 7
        if byte <= 0x7F:
            ids.append(token)
            token, shift = 0, 0
    return ids
