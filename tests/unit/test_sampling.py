"""What scores go through before a token is chosen, held against transformers' processors and a plain reference."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import penalties, sampler
from engine.context import Context
from engine.logprobs import LEAST, Choice, describe
from engine.protocol import EngineLimits, GenerationRequest, SamplingParams
from policies.errors import BadRequest
from tests.engine_helpers import byte_fallback_tokenizer, byte_level_tokenizer, fake_engine, request, run

VOCABULARY = 23
EOS = frozenset({1, 5})
PROMPT = list(b"tell me a story")


def asked(
    name: str, prompt: list[int], max_tokens: int = 8, delivered: list[int] | None = None, **sampling: Any
) -> GenerationRequest:
    plain = request(name, prompt, max_tokens, delivered=delivered or [])
    return dataclasses.replace(plain, sampling=dataclasses.replace(plain.sampling, **sampling))


def context(prompt: list[int], generated: list[int], **sampling: Any) -> Context:
    """One that generated them here."""
    made = Context(asked("r", prompt, 100, **sampling), b"", 0.0)
    made.token_ids += generated
    return made


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
penalty = st.floats(-2, 2)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.1, 3),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=5).map(
            lambda d: tuple(d.items())
        ),
        "min_tokens": st.integers(0, 30),
    },
)
rows = st.lists(st.tuples(tokens.filter(bool), tokens, wishes), min_size=1, max_size=4)


def plainly(logits: list[float], prompt: list[int], generated: list[int], sampling: SamplingParams) -> list[float]:
    """The formulas of OpenAI and vLLM, one token at a time in float64."""
    scores = list(logits)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in range(VOCABULARY):
        if token in prompt + generated:
            scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
        times = generated.count(token)
        scores[token] -= times * sampling.frequency_penalty + (times > 0) * sampling.presence_penalty
        if token in EOS and len(generated) < sampling.min_tokens:
            scores[token] = -math.inf
    return scores


@given(rows, st.integers(0, 2**31))
@settings(deadline=None)
def test_penalties_are_the_plain_formulas_whatever_else_is_in_the_batch(rows: Any, seed: int) -> None:
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5
    untouched = logits.clone()
    contexts = [context(prompt, generated, **wish) for prompt, generated, wish in rows]
    scores = penalties.adjust(logits, contexts, EOS)
    assert torch.equal(logits, untouched)  # log probabilities are read from it afterwards
    for row, (prompt, generated, _) in enumerate(rows):
        expected = plainly(logits[row].double().tolist(), prompt, generated, contexts[row].request.sampling)
        reference = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(scores[row].double(), reference, rtol=1e-5, atol=1e-4)


@given(rows, st.integers(0, 30), st.integers(0, 2**31))
@settings(deadline=None)
def test_E23_where_the_answer_was_generated_does_not_matter(rows: Any, cut: int, seed: int) -> None:
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5
    here = [context(prompt, generated, **wish) for prompt, generated, wish in rows]
    elsewhere = []
    for prompt, generated, wish in rows:
        made = Context(asked("r", prompt, 100, delivered=generated[:cut], **wish), b"", 0.0)
        made.token_ids += generated[cut:]
        elsewhere.append(made)
    assert torch.equal(penalties.adjust(logits, here, EOS), penalties.adjust(logits, elsewhere, EOS))


def test_a_batch_that_asks_for_nothing_is_not_even_copied() -> None:
    logits = torch.randn(2, VOCABULARY)
    assert penalties.adjust(logits, [context([1], [2]), context([3], [], min_tokens=0)], EOS) is logits


@given(tokens.filter(bool), tokens, st.floats(0.1, 3), st.integers(0, 2**31))
@settings(deadline=None)
def test_repetition_penalty_is_transformers(prompt: list[int], generated: list[int], by: float, seed: int) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5
    theirs = RepetitionPenaltyLogitsProcessor(by)(torch.tensor([prompt + generated]), logits.clone())
    ours = penalties.adjust(logits, [context(prompt, generated, repetition_penalty=by)], EOS)
    torch.testing.assert_close(ours, theirs)


@given(tokens.filter(bool), tokens, st.integers(1, 30))
@settings(deadline=None)
def test_min_tokens_is_transformers(prompt: list[int], generated: list[int], least: int) -> None:
    logits = torch.randn(1, VOCABULARY)
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), least, sorted(EOS), device="cpu")
    theirs = processor(torch.tensor([prompt + generated]), logits.clone())
    assert torch.equal(penalties.adjust(logits, [context(prompt, generated, min_tokens=least)], EOS), theirs)


@given(
    st.integers(0, VOCABULARY + 2),
    st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=200)
def test_the_candidates_are_transformers(top_k: int, top_p: float, min_p: float, heat: float, seed: int) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    theirs = TemperatureLogitsWarper(heat)(None, logits)
    for warper in (TopKLogitsWarper(top_k or VOCABULARY), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        theirs = warper(None, theirs)
    params = SamplingParams(1, seed, heat, top_p, top_k=top_k, min_p=min_p)
    ids, scores = sampler._candidates(logits[0] / heat, params)
    kept = torch.full((VOCABULARY,), -torch.inf)
    kept[torch.arange(VOCABULARY) if ids is None else ids] = scores
    torch.testing.assert_close(kept, theirs[0])
    (drawn,) = sampler.sample(logits, [params], [7])
    assert theirs[0, drawn] > -torch.inf


def test_the_nucleus_beyond_the_first_look_and_inside_top_k() -> None:
    logits = torch.zeros(5000)  # flat: the nucleus is most of it
    ids, _ = sampler._candidates(logits, SamplingParams(1, 0, top_p=0.5))
    assert ids is not None and len(ids) == pytest.approx(2500, abs=2)
    ids, _ = sampler._candidates(logits, SamplingParams(1, 0, top_p=0.5, top_k=3000))
    assert ids is not None and len(ids) == pytest.approx(1500, abs=2)


def test_E47_of_equal_scores_top_k_1_takes_what_greedy_takes() -> None:
    logits = torch.zeros(1, 50)
    (greedy,) = sampler.sample(logits, [SamplingParams(1, 0, 0.0)], [0])
    assert sampler.sample(logits, [SamplingParams(1, 9, 2.0, top_k=1)], [0]) == [greedy]


# -- log probabilities -----------------------------------------------------------------------


@given(st.lists(st.sampled_from([None, 0, 1, 5, 20]), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(deadline=None)
def test_log_probabilities_are_a_log_softmax_of_the_raw_scores(tops: list[int | None], seed: int) -> None:
    logits = torch.randn(len(tops), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    params = [SamplingParams(1, 0, logprobs=top) for top in tops]
    chosen = [seed % VOCABULARY] * len(tops)
    for row, choice in enumerate(sampler.with_logprobs(logits, params, chosen)):
        if tops[row] is None:
            assert choice == Choice(chosen[row])
            continue
        table = torch.log_softmax(logits[row].double(), -1)
        assert choice.logprob == pytest.approx(float(table[chosen[row]]), abs=1e-5)
        best = table.argsort(descending=True)[: tops[row]].tolist()
        assert [token for token, _ in choice.top] == best
        assert [score for _, score in choice.top] == pytest.approx(table[best].tolist(), abs=1e-5)


def test_the_bytes_of_a_token_are_shown_and_its_leading_space_is_kept() -> None:
    for tokenizer in (byte_level_tokenizer(), byte_fallback_tokenizer()):
        text = "and the 漢 🧑‍🚀 fox"
        ids = tokenizer.encode(text).ids
        shown = [describe(tokenizer, Choice(token, -1.0, ((token, -1.0),)))[0] for token in ids]
        assert b"".join(one.raw or b"?" for one in shown) == text.encode()
        assert any("\ufffd" in one.text for one in shown)  # a part of the emoji
        assert all(one.top[0].raw == one.raw for one in shown)
    (special,) = describe(byte_level_tokenizer(), Choice(1, -math.inf))
    assert (special.text, special.logprob) == ("</s>", LEAST)  # minus infinity is no JSON


def test_each_output_carries_the_scores_of_its_tokens_only_when_asked() -> None:
    requests = [asked(name, PROMPT, 9, logprobs=top) for name, top in (("with", 2), ("zero", 0), ("no", None))]
    said = run(fake_engine(), *requests)
    for output in said["with"].outputs:
        (one,) = output.logprobs
        assert (one.token_id,) == output.token_ids and one.text == output.text
        assert len(one.top) == 2 and one.top[0].token_id == one.token_id
    assert all(len(output.logprobs) == 1 and not output.logprobs[0].top for output in said["zero"].outputs)
    assert not any(output.logprobs for output in said["no"].outputs)


# -- at the door -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "param", "words"),
    [
        ({"logit_bias": ((3, 1.0), (256, 1.0))}, "logit_bias", "256"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias", "-1"),
        ({"min_tokens": 9}, "min_tokens", "min_tokens 9 is above the 8"),
    ],
)
def test_what_the_vocabulary_or_the_limit_forbids_is_refused(wish: Any, param: str, words: str) -> None:
    engine = fake_engine()
    with pytest.raises(BadRequest, match=words) as raised:
        engine.add(asked("r", PROMPT, 8, **wish))
    assert raised.value.param == param and not engine.has_work()


@pytest.mark.parametrize("cut", [0, 1, 3, 11, 12, 13, 20])
@pytest.mark.parametrize("least", [0, 1, 5, 12, 13, 14, 30])
def test_a_stop_string_ends_nothing_before_min_tokens(least: int, cut: int) -> None:
    whole = run(fake_engine(EngineLimits(max_model_len=128)), asked("r", PROMPT, 40))["r"].text
    stop = whole[10:13]
    ends = [at + 3 for at in range(len(whole)) if whole.startswith(stop, at) and at + 3 >= least]
    expected = min(ends, default=40)  # one byte a token
    said = run(fake_engine(), asked("r", PROMPT, 40, min_tokens=least, stop=(stop,)))["r"]
    assert len(said.tokens) == expected
    assert said.text == whole[: expected - 3] if ends else whole
    if cut < expected:  # taken over by another host
        rest = run(fake_engine(), asked("r", PROMPT, 40, list(said.tokens[:cut]), min_tokens=least, stop=(stop,)))["r"]
        assert rest.tokens == said.tokens[cut:]
        assert "".join(output.text for output in said.outputs[:cut]) + rest.text == said.text


def test_the_fake_engine_goes_on_until_min_tokens() -> None:
    said = run(fake_engine(reply_words=1), asked("r", PROMPT, 40, min_tokens=17))["r"]
    assert len(said.tokens) == 18 and 0 not in said.tokens[:17]
