"""Streaming text against a full decode, with real tokenizers; stop strings against a plain search."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.detokenizer import REPLACEMENT, IncrementalDecoder, StopStrings, TextStream
from tests.engine_helpers import CJK, EMOJI, THAI, byte_fallback_tokenizer, byte_level_tokenizer

characters = st.text(
    st.one_of(st.sampled_from(f"the quick {EMOJI}{THAI}{CJK}é \n"), st.characters(codec="utf-8")), max_size=12
).filter(lambda text: REPLACEMENT not in text)


@cache
def tokenizer(kind: str) -> Tokenizer:
    return {"byte level": byte_level_tokenizer, "byte fallback": byte_fallback_tokenizer}[kind]()


def ids_of(kind: str, text: str) -> list[int]:
    ids: list[int] = tokenizer(kind).encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@given(prompt=characters, text=characters)
def test_E55_the_pieces_are_the_full_decode_and_no_piece_has_half_a_character(
    kind: str, prompt: str, text: str
) -> None:
    before, after = ids_of(kind, prompt), ids_of(kind, text)
    decoder = IncrementalDecoder(tokenizer(kind), before)
    pieces = [decoder.feed([token]) for token in after]
    rest = decoder.flush()
    whole = tokenizer(kind).decode(before + after)
    assert "".join(pieces) + rest == whole[len(tokenizer(kind).decode(before)) :]
    if kind == "byte level":  # the other one has no piece for some of these characters
        assert whole == prompt + text
    assert not any(REPLACEMENT in piece for piece in [*pieces, rest])


@given(st.lists(st.integers(2, 319), max_size=40))
def test_E56_any_ids_at_all_stream_to_their_full_decode(ids: list[int]) -> None:
    decoder = IncrementalDecoder(tokenizer("byte level"))
    pieces = [decoder.feed([token]) for token in ids]
    assert "".join(pieces) + decoder.flush() == tokenizer("byte level").decode(ids)


def test_E56_an_invalid_byte_does_not_swallow_the_character_after_it() -> None:
    def byte(value: int) -> int:
        index = tokenizer("byte fallback").token_to_id(f"<0x{value:02X}>")
        assert index is not None
        return int(index)

    plain = {value: ids_of("byte level", chr(value))[0] for value in b"a "}
    rocket = [raw_id(value) for value in "😀".encode()]
    decoder = IncrementalDecoder(tokenizer("byte level"))
    said = decoder.feed([raw_id(0xFF), *rocket, plain[ord("a")]])
    assert said == f"{REPLACEMENT}😀a"
    decoder = IncrementalDecoder(tokenizer("byte fallback"))
    said = decoder.feed([byte(0xFF), *ids_of("byte fallback", "a"), *map(byte, "😀".encode())])
    assert said == f"{REPLACEMENT}a😀"


def raw_id(value: int) -> int:
    """The byte-level token of one byte."""
    for index in range(2, 258):
        piece = tokenizer("byte level").id_to_token(index)
        if piece is not None and len(piece) == 1 and _byte_of(piece) == value:
            return index
    raise AssertionError(value)


def _byte_of(piece: str) -> int:
    """GPT-2's table: printable bytes stand for themselves, the others for 256 onwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return ord(piece) if ord(piece) in printable else others[ord(piece) - 256]


def test_E56_garbage_without_end_keeps_the_context_small() -> None:
    decoder = IncrementalDecoder(tokenizer("byte level"))
    said = decoder.feed([raw_id(0xFF)] * 1000) + decoder.flush()
    assert said == REPLACEMENT * 1000
    longest = max(len(decoder._ids) - decoder._prefix, 0)
    assert longest <= 64


def test_E56_a_prompt_that_ends_inside_a_character_is_not_repeated() -> None:
    rocket = [raw_id(value) for value in "😀".encode()]
    prompt = [*ids_of("byte level", "secret"), *rocket[:2]]
    decoder = IncrementalDecoder(tokenizer("byte level"), prompt)
    said = decoder.feed([*rocket[2:], *ids_of("byte level", " then")]) + decoder.flush()
    assert "secret" not in said and said.endswith(" then")


def test_special_tokens_say_nothing_and_do_not_eat_the_space_after_them() -> None:
    for kind in ("byte level", "byte fallback"):
        decoder = IncrementalDecoder(tokenizer(kind), ids_of(kind, "we"))
        pieces = [decoder.feed([token]) for token in (1, 1, *ids_of(kind, " the"), 1, 1, 1, 1, *ids_of(kind, "😀"))]
        assert "".join(pieces) == " the😀"
        assert not any(REPLACEMENT in piece for piece in pieces)


# -- stop strings -------------------------------------------------------------------------

letters = st.text(st.sampled_from("ab"), max_size=20)
stops = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=3)


def cut_at_first(text: str, stop_strings: list[str]) -> tuple[str, bool]:
    """Plain definition: read character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(text=letters, stop_strings=stops, data=st.data())
def test_E53_what_is_sent_is_the_text_before_the_first_stop_string(
    text: str, stop_strings: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    filtered = StopStrings(tuple(stop_strings))
    sent = []
    fed = ""
    for piece in pieces:
        sent.append(filtered.feed(piece))
        fed += piece
        expected, hit = cut_at_first(fed, stop_strings)
        assert filtered.hit == hit
        so_far = "".join(sent)
        assert expected.startswith(so_far)
        held = expected[len(so_far) :]
        assert hit is False or held == ""
        assert len(held) < max(map(len, stop_strings))  # no more is held back than could still match
        assert held == "" or any(stop.startswith(held) for stop in stop_strings)
    assert "".join(sent) + filtered.flush() == cut_at_first(text, stop_strings)[0]


def test_nothing_comes_after_a_hit() -> None:
    stop = StopStrings(("##",))
    assert stop.feed("a#") == "a"
    assert stop.feed("#b") == ""
    assert (stop.feed("more"), stop.flush(), stop.hit) == ("", "", True)


def test_a_character_finished_by_flush_can_still_complete_a_stop_string() -> None:
    stream = TextStream(tokenizer("byte level"), (), (f"x{REPLACEMENT}",))
    assert stream.feed([*ids_of("byte level", "ax"), raw_id(0xF0)]) == "a"
    assert (stream.finish(), stream.stopped) == ("", True)


@given(text=characters, cut=st.integers(0, 40), stop=st.sampled_from([(), ("quick",), ("😀",), ("the", "e ")]))
def test_a_stream_fed_with_delivered_tokens_goes_on_as_an_undisturbed_one(
    text: str, cut: int, stop: tuple[str, ...]
) -> None:
    ids = ids_of("byte level", text)
    undisturbed = TextStream(tokenizer("byte level"), (), stop)
    pieces = []
    for token in ids:
        if not undisturbed.stopped:
            pieces.append(undisturbed.feed([token]))
    cut = min(cut, len(pieces))
    if cut < len(pieces):  # the first host died before the last piece
        resumed = TextStream(tokenizer("byte level"), (), stop)
        resumed.feed(ids[:cut])
        assert [resumed.feed([token]) for token in ids[cut : len(pieces)]] == pieces[cut:]
        assert resumed.finish() == undisturbed.finish()
