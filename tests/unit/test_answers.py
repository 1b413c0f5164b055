"""An answer's token ids: kept beside its text, and in the next prompt where the template writes that text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from engine.detokenizer import TextStream
from orchestrator import answers
from orchestrator.answers import Conversation, keep, recall
from orchestrator.asks import Ask, History, Place
from orchestrator.config import ModelConfig, TenantConfig
from orchestrator.prompting import Prompter
from orchestrator.tokens import ChatTokenizer, Encoder, load_tokenizer
from policies.errors import BadRequest, ContextLengthExceeded
from session_store.items import Item, message
from tests.engine_helpers import TEXT, byte_fallback_tokenizer, byte_level_tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}<assistant>"
HIGH = 256
unicode_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


class TwoWays:
    """Two tokens for every byte: text becomes the lower ones, and the upper ones show what was said."""

    longest_token = 1
    identity = "two ways"
    special: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_after = encode

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(id % HIGH for id in ids).decode(errors="replace")

    def id_to_token(self, id: int, /) -> str | None:
        return None


def say(text: str) -> list[int]:
    return [HIGH + byte for byte in text.encode()]


def spoken(ids: Sequence[int]) -> list[str]:
    """The texts in a prompt that are there as ids said."""
    runs = re.findall(r"1+", "".join(str(int(id >= HIGH)) for id in ids))
    high = bytes(id - HIGH for id in ids if id >= HIGH)
    found = []
    for run in runs:
        found.append(high[: len(run)].decode())
        high = high[len(run) :]
    return found


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def prompt(template: str, messages: list[dict[str, str]]) -> list[int]:
    """With the ids of every answer; its text is always the template's."""
    tokenizer, encoder = ChatTokenizer(TwoWays(), template, {}), TwoWays()
    kept = {}
    for index, said in enumerate(messages):
        if said["role"] == "assistant":
            form = keep(encoder, [], say(said["content"]), said["content"])
            assert (form is None) is (not said["content"])
            if form is not None:
                kept[index] = form
    conversation = Conversation(tokenizer, messages, kept)
    everything = tuple(range(len(messages)))
    ids = conversation.encode(everything)
    assert encoder.decode(ids) == tokenizer.render(messages)
    assert Conversation(tokenizer, messages, kept).count(everything, 10**9) == len(ids)
    return ids


# -- into a prompt --------------------------------------------------------------------------------


def test_each_answer_is_in_the_prompt_as_it_was_said() -> None:
    ids = prompt(PLAIN, talk("one", " two ", "three", "fo\nur", "five"))
    assert spoken(ids) == [" two ", "fo\nur"]


def test_without_ids_the_prompt_is_the_texts() -> None:
    tokenizer, messages = ChatTokenizer(TwoWays(), PLAIN, {}), talk("one", "two", "three")
    assert Conversation(tokenizer, messages, {}).encode((0, 1, 2)) == tokenizer.encode(messages)


@pytest.mark.parametrize(
    ("template", "texts", "expected"),
    [
        # trims; what is not changed by it stays
        (PLAIN.replace("m.content", "m.content | trim"), ["a", "b ", "c", "d", "e", "\n\n", "g", "h"], ["d", "h"]),
        # cuts thoughts out of all answers
        (
            PLAIN.replace("m.content", "m.content.split('</think>')[-1]"),
            ["a", "<think>x</think>b", "c", "d", "e", "<think>;<user>e;</think>f", "g", "h"],
            ["d", "h"],
        ),
        # cuts them out of all but the last, as Qwen3's does
        (
            "{% for m in messages %}<{{ m.role }}>"
            "{% if loop.index < 5 %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %};"
            "{% endfor %}<assistant>",
            ["a", "<think>x</think>b", "c", "d", "e", "<think>y</think>f", "g"],
            ["d", "<think>y</think>f"],
        ),
        # writes everything twice, or in front of who said it, or not at all, or backwards
        (PLAIN.replace("m.content", "m.content ~ '/' ~ m.content"), ["a", "b", "c", "d"], []),
        ("{% for m in messages %}{{ m.content }}<{{ m.role }}>{% endfor %}", ["a", "b", "c", "d"], ["b", "d"]),
        ("{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}", ["a", "b", "c"], []),
        ("{% for m in messages | reverse %}<{{ m.content }}>{% endfor %}", ["a", "b", "c", "d"], ["d", "b"]),
        # without anything between
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["a", "b", "c", "d"], ["b", "d"]),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", ["a", "b ", "c", "d"], ["d"]),
        ("{% for m in messages if m.role != 'user' %}{{ m.content | trim }}{% endfor %}", ["a", "b ", "c", "d"], []),
        # changes every letter, of the marks too; or escapes
        (PLAIN.replace("m.content", "m.content | upper"), ["a", "b", "c", "7", "e"], []),
        (PLAIN.replace("m.content", "m.content | tojson"), ["a", 'b"', "c", "d", "e"], ["d"]),
        # writes other words around an answer of another length, or for one that is empty
        (PLAIN.replace("{{ m.content", "{{ m.content | length }}:{{ m.content"), ["a", "b", "c"], []),
        (PLAIN.replace("{{ m.content }}", "{{ m.content or 'nothing' }}"), ["a", "", "c", "d", "e"], ["d"]),
        # takes the answers, and no marks
        (
            "{% for m in messages %}{% if m.content | length > 3 %}{{ raise_exception('long') }}{% endif %}"
            "<{{ m.content }}>{% endfor %}",
            ["a", "b", "c"],
            [],
        ),
    ],
)  # fmt: skip
def test_what_a_template_changes_is_text_and_the_rest_is_as_said(
    template: str, texts: list[str], expected: list[str]
) -> None:
    assert spoken(prompt(template, talk(*texts))) == expected


def test_an_answer_alone_that_is_empty() -> None:
    assert spoken(prompt(PLAIN, talk("a", "", "c"))) == []


def test_texts_that_look_like_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can know the next mark; if somebody did, the prompt's text would still be the template's."""
    monkeypatch.setattr(answers.secrets, "token_hex", lambda _: "00")
    for mark in ("m00x1m", "m00x3m", "m00x99m", "<assistant>m00x1m;", "m00x"):
        for place in range(5):
            texts = ["one", "two", "three", "four", "five"]
            texts[place] += mark
            prompt(PLAIN, talk(*texts))
            prompt(PLAIN.replace("m.content", "m.content | trim"), talk(*texts))


@given(
    st.lists(unicode_text | st.sampled_from(["", ";", "<user>", ";<assistant>", " ", "<think>a</think>b"]), max_size=8),
    st.sampled_from(["m.content", "m.content | trim", "m.content.split('>')[-1]", "m.content * 2", "m.content[1:]"]),
)
def test_the_prompts_text_is_always_the_templates(texts: list[str], content: str) -> None:
    ids = prompt(PLAIN.replace("m.content", content), talk(*texts))
    if content == "m.content":
        assert spoken(ids) == [text for text in texts[1::2] if text]


def test_a_template_that_refuses_still_does() -> None:
    tokenizer = ChatTokenizer(TwoWays(), "{{ raise_exception('never') }}", {})
    with pytest.raises(BadRequest, match="never"):
        Conversation(tokenizer, talk("a", "b"), {1: "x"}).encode((0, 1))


# -- beside the text ------------------------------------------------------------------------------


def prefixing_tokenizer() -> Tokenizer:
    """As Llama 2's: a space before what comes first, which decoding strips again."""
    tokenizer = byte_fallback_tokenizer()
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def spacing_tokenizer() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level_tokenizer,
    "characters": byte_fallback_tokenizer,
    "prefixing": prefixing_tokenizer,
    "spacing": spacing_tokenizer,
}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoder]:
    found = {}
    for name, make in KINDS.items():
        path = tmp_path_factory.mktemp(name)
        make().save(str(path / "tokenizer.json"))
        found[name] = load_tokenizer(path).encoder
    return found


@given(st.lists(st.integers(0, 2**31)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    packed = answers._pack(ids)
    assert answers._unpack(packed) == ids
    assert len(packed) <= 4 + 4 * sum(max(1, -(-id.bit_length() // 7)) for id in ids) / 3


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_changes_make_the_one_of_the_other(usual: list[int], ids: list[int]) -> None:
    assert answers._changed(usual, answers._changes(usual, ids)) == ids
    assert answers._changes(ids, ids) == []


def test_changes_are_small_where_they_are_few() -> None:
    usual = list(range(1000))
    ids = [*usual[:100], 7000, 7001, *usual[101:500], *usual[502:900], 7002, *usual[900:], 7003]
    assert len(answers._changes(usual, ids)) == 4 * 3 + 4


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_a_model_says_is_kept_whatever_it_is(encoders: dict[str, Encoder], kind: str, data: st.DataObject) -> None:
    """Half characters at either end, garbage, first spaces: the text is what the engine makes of these ids."""
    encoder = encoders[kind]
    token = st.integers(2, 275)  # 0 and 1 are control tokens
    before = data.draw(st.lists(token, max_size=8))
    ids = data.draw(st.lists(token, max_size=30) | unicode_text.map(encoder.encode).map(lambda ids: [*ids]))
    stream = TextStream(encoder, before, ())
    text = stream.feed(ids) + stream.finish()
    kept = keep(encoder, before, [*ids, *data.draw(st.sampled_from([[], [1]]))], text)
    if not text or encoder.special.intersection(ids):
        assert kept is None
        return
    assert kept is not None
    assert recall(encoder, kept, text) == ids


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_of_what_a_stop_string_cut_the_ids_before_it_are_kept(
    encoders: dict[str, Encoder], kind: str, data: st.DataObject
) -> None:
    encoder = encoders[kind]
    stop = data.draw(st.sampled_from([" f", "x", "\nUser:", "é", "the"]))
    ids = data.draw(st.lists(st.sampled_from(encoder.encode(TEXT + "\nUser: ")), max_size=40))
    stream = TextStream(encoder, [5], (stop,))
    text, said = "", []
    while ids and not stream.stopped:
        said.append(ids.pop(0))
        text += stream.feed(said[-1:])
    if not stream.stopped:
        text += stream.finish()
    kept = keep(encoder, [5], said, text)
    if kept is None:
        assert stream.stopped or not text  # a token that holds the stop string's first letter says more than the text
        return
    recalled = recall(encoder, kept, text)
    assert recalled is not None and recalled == said[: len(recalled)]
    whole = TextStream(encoder, [5], ())
    assert text in (whole.feed(recalled) + whole.finish(), encoder.decode(recalled))


def test_ids_that_a_text_is_tokenized_to_take_twelve_letters(encoders: dict[str, Encoder]) -> None:
    encoder = encoders["bytes"]
    ids = encoder.encode(TEXT)
    kept = keep(encoder, [], ids, TEXT)
    assert kept is not None and len(kept) == answers.SEAL_DIGITS
    assert recall(encoder, kept, TEXT) == ids
    odd = [*ids[:20], *encoder.encode(encoder.decode(ids[20:22])[:1]), *encoder.encode(encoder.decode(ids[20:])[1:])]
    assert encoder.decode(odd) == TEXT and odd != ids
    kept = keep(encoder, [], odd, TEXT)
    assert kept is not None and len(kept) < answers.SEAL_DIGITS + 30
    assert recall(encoder, kept, TEXT) == odd


def test_ids_are_recalled_for_their_own_tokenizer_and_text_only(encoders: dict[str, Encoder], tmp_path: Path) -> None:
    encoder = encoders["bytes"]
    for ids in (encoder.encode("hello"), [*encoder.encode("hel"), *encoder.encode("l"), *encoder.encode("o")]):
        kept = keep(encoder, [], ids, "hello")
        assert kept is not None and recall(encoder, kept, "hello") == ids
        assert recall(encoder, kept, "hullo") is None
        assert recall(encoders["spacing"], kept, "hello") is None
        byte_level_tokenizer(321).save(str(tmp_path / "tokenizer.json"))
        assert recall(load_tokenizer(tmp_path).encoder, kept, "hello") is None


def test_ids_that_say_something_else_are_not_kept(encoders: dict[str, Encoder]) -> None:
    encoder = encoders["bytes"]
    ids = encoder.encode("hello")
    assert keep(encoder, [], ids, "hello there") is None
    assert keep(encoder, [], ids, "help") is None
    assert keep(encoder, [], ids, "") is None
    assert keep(encoder, [], [], "hello") is None
    assert keep(encoder, [], [*ids, 0, *ids], "hellohello") is None  # a control token between: nobody reads it
    half = encoder.encode("é")[:1]
    assert keep(encoder, [], [*ids, *half, *encoder.encode("\nUser:")], "hello") == keep(encoder, [], ids, "hello")
    assert keep(encoder, [], [*ids, 1], "hello") == keep(encoder, [], ids, "hello") is not None


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_an_answer_is_tokenized_as_within_a_text(encoders: dict[str, Encoder], kind: str) -> None:
    encoder = encoders[kind]
    for text in ("\nuser", "b c", " b", "漢", "</s>\nuser"):
        assert encoder.encode("ax" + text) == encoder.encode("ax") + encoder.encode_after(text)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_said_as_they_are_written_leave_the_prompt_as_it_was(encoders: dict[str, Encoder], kind: str) -> None:
    encoder = encoders[kind]
    tokenizer, messages = ChatTokenizer(encoder, PLAIN, {}), talk("a b", " fox", "c", "dog", "e")
    kept = {}
    for index in (1, 3):
        text = messages[index]["content"]
        form = keep(encoder, encoder.encode("x"), encoder.encode_after(text), text)
        assert form is not None
        kept[index] = form
    assert Conversation(tokenizer, messages, kept).encode((0, 1, 2, 3, 4)) == tokenizer.encode(messages)


# -- one turn -------------------------------------------------------------------------------------

WINDOW = 128


def turn_prompt(items: Sequence[Item], tokenizer: ChatTokenizer, model: str = "m") -> tuple[tuple[int, ...], int]:
    """The prompt of the next turn, and how many tokens it was counted to have."""
    config = ModelConfig(name=model, source="fake", memory=1, max_model_len=WINDOW, default_max_tokens=16)
    ask = Ask(
        tenant=TenantConfig(name="t"), model=config, items=(), temperature=1.0, top_p=1.0, seed=None, stop=(),
        max_tokens=None, place=Place("s"),
    )  # fmt: skip
    new = [Item("?", "?", 1.0, message("user", "?"))]
    made = Prompter({model: tokenizer}).prompt(ask, History(tuple(items), 0, frozenset()), new)
    assert made.truncation is not None
    return made.token_ids, made.truncation.prompt_tokens


def turn(number: int, question: str, answer: str, model: str, ids: str | None) -> list[Item]:
    name = str(number)
    return [
        Item(f"{name}-0", name, 1.0, message("user", question)),
        Item(f"{name}-a", name, 1.0, message("assistant", answer), model, ids=ids),
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_prompt_has_as_many_tokens_as_it_was_counted_to_have(
    encoders: dict[str, Encoder], kind: str, data: st.DataObject
) -> None:
    encoder = encoders[kind]
    template = data.draw(st.sampled_from([None, PLAIN, PLAIN.replace("m.content", "m.content | trim")]))
    tokenizer = ChatTokenizer(encoder, template, {"bos_token": "<s>"})
    items: list[Item] = []
    for number in range(data.draw(st.integers(0, 12))):
        ids = data.draw(st.lists(st.integers(2, 275), max_size=24))
        stream = TextStream(encoder, [], ())
        answer = stream.feed(ids) + stream.finish()
        kept = keep(encoder, [], ids, answer) if data.draw(st.booleans()) else None
        items += turn(number, data.draw(unicode_text), answer, data.draw(st.sampled_from("mn")), kept)
    try:
        ids_of_prompt, counted = turn_prompt(items, tokenizer)
    except ContextLengthExceeded:
        return
    assert len(ids_of_prompt) == counted <= WINDOW


def test_each_of_two_models_gets_its_own_answers_as_it_said_them() -> None:
    tokenizer = ChatTokenizer(TwoWays(), PLAIN, {})
    items = []
    for number, model in enumerate(("m", "n", "m")):
        items += turn(
            number, "q", f"answer {number}", model, keep(TwoWays(), [], say(f"answer {number}"), f"answer {number}")
        )
    assert spoken(turn_prompt(items, tokenizer)[0]) == ["answer 0", "answer 2"]
    assert spoken(turn_prompt(items, tokenizer, "n")[0]) == ["answer 1"]


def test_an_item_without_ids_or_with_another_text_is_text() -> None:
    tokenizer = ChatTokenizer(TwoWays(), PLAIN, {})
    kept = keep(TwoWays(), [], say("as said"), "as said")
    items = turn(0, "q", "as said", "m", kept) + turn(1, "q", "as said", "m", None)
    items.append(replace(turn(2, "q", "as said", "m", kept)[1], body=message("assistant", "edited")))
    assert spoken(turn_prompt(items, tokenizer)[0]) == ["as said"]
