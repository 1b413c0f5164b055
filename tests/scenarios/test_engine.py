"""Engine entries of the scenario bank.

``BREAKS`` names, per test, one line whose breaking that test must notice: file, the line's text, what to put there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.context import Context
from engine.core import EngineCore
from engine.fake import reply_to
from engine.prefix import KVIdentity
from engine.protocol import EngineLimits, GenerationRequest, Output, SamplingParams
from engine.scheduler import Scheduler, StepPlan
from engine.torch_engine import TorchEngine
from orchestrator.choices import choice_requests, merged
from orchestrator.progress import Progress
from policies.errors import RequestTooLarge
from policies.types import ContextState
from tests.engine_helpers import (
    CJK,
    EMOJI,
    THAI,
    Said,
    byte_level_tokenizer,
    collect,
    drain,
    fake_engine,
    request,
    run,
    run_preempting,
    scheduler_of,
    tiny_llama,
    torch_engine,
)

S = ContextState
SIZE = 4
LIMITS = EngineLimits(max_model_len=64, block_size=SIZE, step_tokens=32, max_running=4)
PROMPT = list(b"tell me a story")
WHOLE = reply_to(tuple(PROMPT), 8).decode()

BREAKS = {
    "test_E10": ("engine/prefix.py", 'digest.update(len(raw).to_bytes(8, "little"))', "pass"),
    "test_E11": (
        "engine/kv_cache.py",
        "full = context.num_computed // self.block_size",
        "full = len(context.block_table)",
    ),
    "test_E14": ("engine/blocks.py", "self._refs[block] += 1", "self._refs[block] = 1"),
    "test_E16": (
        "engine/scheduler.py",
        "limit = min(self.limits.max_model_len, self.capacity_tokens)",
        "limit = 10**9",
    ),
    "test_E22": ("engine/sampler.py", "key=[seed & mask, position & mask]", "key=None"),
    "test_E25": (
        "engine/kv_cache.py",
        "if not self._in_flight:\n            self.pool.complete(self._step)",
        "if True:\n            self.pool.complete(self._step)",
    ),
    "test_E26": (
        "engine/core.py",
        "self._contexts.get((request_id, generation))",
        "self._contexts.get((request_id, 1))",
    ),
    "test_E28": (
        "engine/core.py",
        "self._scheduler.end(context, ContextState.CANCELLED",
        "0 and (context, ContextState",
    ),
    "test_E46": ("engine/sampler.py", "key=[seed & mask, position & mask]", "key=[0, position & mask]"),
    "test_E47": ("engine/sampler.py", "if param.temperature > 0:", "if max(p.temperature for p in params) > 0:"),
    "test_E52": ("engine/core.py", "or context.remaining_tokens == 0", "or context.remaining_tokens == -1"),
    "test_E53": ("engine/detokenizer.py", "self._held = text[len(text) - keep :]", "keep = 0"),
    "test_E55": ("engine/detokenizer.py", "if not text.endswith(REPLACEMENT):", "if True:"),
}


def context_of(name: str, prompt: list[int], max_tokens: int = 4, tenant: str = "acme") -> Context:
    namespace = KVIdentity(tenant, "weights", "float32", SIZE).namespace()
    return Context(request(name, prompt, max_tokens, tenant=tenant), namespace, 0.0)


def launch(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0, 0.0)
    scheduler.kv.launched()
    return plan


def land(scheduler: Scheduler, plan: StepPlan, token: int = 7) -> None:
    samples = [c.context for c in plan.chunks if c.samples and not c.context.terminal]
    scheduler.computed(plan)
    for context in samples:
        context.token_ids.append(token)
        if not context.remaining_tokens:
            scheduler.end(context, S.FINISHED, 0.0, "length")
    scheduler.check()


# -- prefix cache ----------------------------------------------------------------------------


def test_E10_tenants_whose_names_run_together_share_nothing() -> None:
    scheduler = scheduler_of(LIMITS, 16)
    prompt = list(range(1, 13))
    for tenant, fingerprint in (("org_1", "2345"), ("org_12345", "")):
        identity = KVIdentity(tenant, fingerprint, "float32", SIZE)
        context = Context(request(tenant, prompt, 1, tenant=tenant), identity.namespace(), 0.0)
        scheduler.add(context)
        land(scheduler, launch(scheduler))
        assert context.cached_tokens == 0


def test_E11_of_two_equal_prompts_in_one_step_neither_reads_what_the_other_has_not_written() -> None:
    scheduler = scheduler_of(EngineLimits(max_model_len=64, block_size=SIZE, step_tokens=22), 20)
    prompt = list(range(1, 17))
    one, two, three = (context_of(name, prompt, 4) for name in "123")
    scheduler.add(one)
    scheduler.add(two)
    plan = launch(scheduler)
    assert [(c.context, c.start, c.count) for c in plan.chunks] == [(one, 0, 16), (two, 0, 6)]
    assert not set(one.block_table) & set(two.block_table)
    scheduler.end(one, S.CANCELLED, 0.0, "the client went away")  # so that only the half of `two` is there to be found
    land(scheduler, plan)
    scheduler.add(three)
    land(scheduler, launch(scheduler))
    assert three.cached_tokens == 4  # one whole block; the second was written half
    assert three.block_table[0] == two.block_table[0]
    assert not set(three.block_table[1:]) & set(two.block_table)


def test_E14_a_shared_block_lives_until_its_last_user_ends() -> None:
    scheduler = scheduler_of(LIMITS, 9)
    prompt = list(range(1, 10))
    one = context_of("1", prompt, 8)
    scheduler.add(one)
    land(scheduler, launch(scheduler))
    two = context_of("2", prompt, 8)
    scheduler.add(two)
    land(scheduler, launch(scheduler))
    shared = two.block_table[:2]
    assert shared == one.block_table[:2]
    scheduler.end(one, S.CANCELLED, 0.0, "the client went away")
    scheduler.check()
    everything_free = scheduler.kv.pool.allocate(scheduler.kv.pool.num_free)
    assert not set(shared) & set(everything_free)
    scheduler.kv.pool.release(everything_free, 0)
    scheduler.kv.pool.complete(0)
    scheduler.end(two, S.CANCELLED, 0.0, "the client went away")
    assert scheduler.kv.pool.num_free == 9


# -- memory ------------------------------------------------------------------------------------


def test_E16_a_sole_request_that_fills_the_pool_ends_by_length_and_one_more_token_is_refused() -> None:
    engine = fake_engine(EngineLimits(max_model_len=4096), kv_capacity_tokens=64, reply_words=100)
    said = run(engine, request("all", PROMPT, 64 - len(PROMPT)))["all"]
    assert said.last.finish_reason == "length"
    assert len(said.tokens) == 64 - len(PROMPT)
    assert engine.stats().preemptions == 0
    with pytest.raises(RequestTooLarge, match="at most 64"):
        engine.add(request("more", PROMPT, 65 - len(PROMPT)))
    assert not engine.has_work()


def test_E25_blocks_of_a_generation_aborted_while_its_step_is_in_flight_wait_for_the_step() -> None:
    scheduler = scheduler_of(LIMITS, 6)
    context = context_of("1", list(range(1, 10)), 4)
    scheduler.add(context)
    plan = launch(scheduler)
    written = set(context.block_table)
    scheduler.end(context, S.CANCELLED, 0.0, "the client went away")
    assert context.block_table == [] and len(written) == 3
    scheduler.check()
    assert scheduler.kv.pool.books().fenced == 3
    others = scheduler.kv.pool.allocate(scheduler.kv.pool.num_free)
    assert not written & set(others)
    scheduler.computed(plan)
    assert set(scheduler.kv.pool.allocate(scheduler.kv.pool.num_free)) == written


def test_E26_a_late_word_about_an_aborted_attempt_does_not_touch_the_next() -> None:
    engine = fake_engine()
    engine.add(request("r", PROMPT, 6))
    engine.step()
    engine.cancel("r", 0, "the client went away")
    engine.add(request("r", PROMPT, 6, generation=1))
    assert engine.cancel("r", 0, "again") is False
    said = drain(engine)["r"]
    assert {output.generation for output in said.outputs} == {1} and len(said.tokens) == 6


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_E28_a_cancelled_generation_is_over_within_two_steps_and_holds_nothing(steps: int) -> None:
    engine = fake_engine(EngineLimits(max_model_len=512, step_tokens=32))
    engine.add(request("r", list(range(1, 101)), 300))
    for _ in range(steps):
        engine.step()
    before = engine.stats().generated_tokens
    assert engine.cancel("r", 0, "the client went away")
    for _ in range(2):
        assert engine.step() == []
    assert not engine.has_work()
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().generated_tokens == before
    engine.check()


# -- text ------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 7, len(WHOLE), len(WHOLE) + 1, 100])
def test_E52_exactly_max_tokens_or_up_to_the_end_token(max_tokens: int) -> None:
    said = run(fake_engine(), request("r", PROMPT, max_tokens))["r"]
    whole = len(WHOLE) + 1  # the end token is the last of them
    assert len(said.tokens) == min(max_tokens, whole)
    assert said.last.finish_reason == ("stop" if max_tokens >= whole else "length")
    assert said.text == WHOLE[:max_tokens]
    assert said.last.usage is not None and said.last.usage.completion_tokens == len(said.tokens)


@pytest.mark.parametrize("begin", [0, 3, 17])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_E53_no_character_of_a_stop_string_over_several_tokens_is_sent(begin: int, size: int) -> None:
    stop = WHOLE[begin : begin + size]
    found = WHOLE.index(stop)
    engine = fake_engine()
    engine.add(request("r", PROMPT, 200, stop=(stop, "never said")))
    said: dict[str, Said] = {}
    while engine.has_work():
        collect(said, engine.step())
        assert WHOLE[:found].startswith(said["r"].text)
    assert said["r"].text == WHOLE[:found]
    assert said["r"].last.finish_reason == "stop"
    assert len(said["r"].tokens) == found + size  # one byte a token: it stops at once


def test_E53_what_was_held_back_and_does_not_match_is_sent() -> None:
    for stop in (WHOLE[-3:] + "x", WHOLE[2:5] + "#"):
        said = run(fake_engine(), request("r", PROMPT, 200, stop=(stop,)))["r"]
        assert said.text == WHOLE and said.last.finish_reason == "stop"
        assert [o.text for o in said.outputs].count("") >= 3  # something was held


def test_E55_characters_split_over_tokens_arrive_whole() -> None:
    text = f"so {EMOJI} and {THAI} and {CJK} end"
    tokenizer = byte_level_tokenizer(vocabulary=262)  # hardly any merges: most of these take several tokens
    ids = tokenizer.encode(text).ids
    assert len(ids) > len(text) + 20
    engine = fake_engine(EngineLimits(max_model_len=512))
    engine._decoder, engine._vocabulary = tokenizer, 262
    script = iter([*ids, 1])
    engine._eos = frozenset({1})
    engine._next = lambda _chunk: next(script)  # type: ignore[method-assign]
    said = run(engine, request("r", tokenizer.encode("hello").ids, 300))["r"]
    assert said.text == text
    assert not any("\ufffd" in output.text for output in said.outputs)
    assert sum(bool(output.text) for output in said.outputs) > len(text) // 2  # it is not all held to the end


# -- sampling, with a real (tiny, random) model -------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    import torch

    path: Path = tiny_llama(tmp_path_factory.mktemp("tiny"))
    before = torch.get_num_threads()
    yield torch_engine(path, EngineLimits(max_model_len=128, block_size=4, step_tokens=64, max_running=8))
    torch.set_num_threads(before)


TINY_PROMPT = [5, 9, 200, 31, 77, 12, 45]


def sampled(engine: EngineCore, name: str, **more: object) -> Said:
    return run(engine, request(name, TINY_PROMPT, 16, ignore_eos=True, **more))[name]  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_E22_preempted_every_few_steps_the_tokens_are_the_same(
    tiny: TorchEngine, every: int, temperature: float
) -> None:
    def requests() -> list[object]:
        return [
            request(f"r{i}", [*TINY_PROMPT, i + 2], 12, seed=i, temperature=temperature, ignore_eos=True)
            for i in range(3)
        ]

    tiny._kv_cache.pool.clear_cache()
    expected = run(tiny, *requests())  # type: ignore[arg-type]
    tiny._kv_cache.pool.clear_cache()
    for one in requests():
        tiny.add(one)  # type: ignore[arg-type]
    said = run_preempting(tiny, every, forget=True)
    for name, one in expected.items():
        assert said[name].tokens == one.tokens
        assert said[name].text == one.text
    usages = [one.last.usage for one in said.values()]
    assert sum(usage.recomputed_tokens for usage in usages if usage is not None) > 0
    assert all(usage.cached_tokens == 0 for usage in usages if usage is not None)


def test_E46_the_same_seed_says_the_same_in_one_batch_and_another_seed_does_not(tiny: TorchEngine) -> None:
    alone = sampled(tiny, "alone", temperature=1.0, seed=11).tokens
    seeds = {"a": 11, "b": 11, "c": 12, "d": 13}
    batch = [
        request(name, TINY_PROMPT, 16, temperature=1.0, seed=seed, ignore_eos=True) for name, seed in seeds.items()
    ]
    said = run(tiny, *batch)
    assert said["a"].tokens == said["b"].tokens == alone
    assert len({said[name].tokens for name in "acd"}) == 3


def test_E47_greedy_in_a_mixed_batch_is_greedy_and_a_tiny_top_p_is_too(tiny: TorchEngine) -> None:
    greedy = sampled(tiny, "alone").tokens
    hot: Callable[..., object] = lambda name, **more: request(  # noqa: E731
        name, TINY_PROMPT, 16, ignore_eos=True, **more
    )
    said = run(tiny, hot("hot", temperature=2.0, seed=1), hot("cold"), hot("narrow", temperature=1.0, top_p=1e-6))  # type: ignore[arg-type]
    assert said["cold"].tokens == said["narrow"].tokens == greedy
    assert said["hot"].tokens != greedy


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_E22_a_generation_taken_over_by_another_host_goes_on_with_the_same_tokens(
    tiny: TorchEngine, cut: int, temperature: float
) -> None:
    whole = sampled(tiny, "whole", temperature=temperature, seed=3)
    stop = (whole.text[4:9],)
    undisturbed = sampled(tiny, "stopped", temperature=temperature, seed=3, stop=stop)
    cut = min(cut, len(undisturbed.tokens) - 1)
    tiny._kv_cache.pool.clear_cache()
    rest = sampled(tiny, "rest", temperature=temperature, seed=3, stop=stop, delivered=undisturbed.tokens[:cut])
    assert rest.tokens == undisturbed.tokens[cut:]
    assert "".join(o.text for o in undisturbed.outputs[:cut]) + rest.text == undisturbed.text
    assert rest.last.finish_reason == undisturbed.last.finish_reason == "stop"


# -- penalties and their like -------------------------------------------------------------------

BREAKS |= {
    "test_E23_E22": ("engine/penalties.py", "context.generated_ids)", "context.token_ids[context.num_computed :])"),
    "test_E23_prefix": (
        "engine/context.py",
        "return self.token_ids[len(self.request.prompt_token_ids) :]",
        "return self.token_ids[self.cached_tokens or 0 :]",
    ),
    "test_E23_taken_over": (
        "engine/context.py",
        "return self.token_ids[len(self.request.prompt_token_ids) :]",
        "return self.token_ids[len(self.request.prompt_token_ids + self.request.delivered_token_ids) :]",
    ),
    "test_E47_E46": ("engine/penalties.py", " + row * scores.shape[1]", ""),
    "test_min_tokens": ("engine/penalties.py", "if early:", "if False:"),
    "test_E11_the_prompt_of_n_answers": (
        "orchestrator/choices.py",
        "waiting = list(enumerate(requests))[1:]",
        "running |= {_begin(queue, generator, i, requests[i], model, progress) for i in (1, 2, 3)}; waiting = []",
    ),
    "test_the_log_probabilities": ("engine/torch_engine.py", "with_logprobs(logits,", "with_logprobs(scores,"),
}
PENALISED: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.9,
    "logit_bias": ((7, 4.0), (9, -100.0), (31, 2.5)),
    "min_p": 0.01,
    "top_k": 60,
    "min_tokens": 6,
    "logprobs": 2,
}


def penalised(name: str, max_tokens: int = 20, more: Sequence[int] = (), **wishes: Any) -> GenerationRequest:
    """A request that asks for all of it; ``wishes`` change that, and what ``request`` itself takes."""
    ours = {key: wishes.pop(key) for key in list(wishes) if key in PENALISED}
    plain = request(name, [*TINY_PROMPT, *more], max_tokens, **wishes)
    return replace(plain, sampling=replace(plain.sampling, **PENALISED | ours))


def words(said: Said) -> list[tuple[int, float]]:
    """Tokens and, to a rounding, their log probabilities."""
    return [(one.token_id, round(one.logprob, 3)) for output in said.outputs for one in output.logprobs]


def same(ours: Said, theirs: Said) -> None:
    assert (ours.tokens, ours.text, ours.last.finish_reason) == (theirs.tokens, theirs.text, theirs.last.finish_reason)
    assert words(ours) == [(token, pytest.approx(score, abs=2e-3)) for token, score in words(theirs)]


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_E23_E22_penalties_count_the_same_after_every_preemption(
    tiny: TorchEngine, every: int, temperature: float
) -> None:
    requests = [penalised(f"r{i}", more=[i + 2], seed=i, temperature=temperature) for i in range(3)]
    tiny._kv_cache.pool.clear_cache()
    expected = run(tiny, *requests)
    tiny._kv_cache.pool.clear_cache()
    for one in requests:
        tiny.add(one)
    said = run_preempting(tiny, every, forget=True)
    for name, one in expected.items():
        same(said[name], one)
    assert sum(one.last.usage.recomputed_tokens for one in said.values() if one.last.usage is not None) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_E23_prefix_hits_count_as_the_prompt_they_are(tiny: TorchEngine, temperature: float) -> None:
    tiny._kv_cache.pool.clear_cache()
    cold, warm = (run(tiny, penalised("r", temperature=temperature, seed=5))["r"] for _ in range(2))
    assert warm.last.usage is not None and warm.last.usage.cached_tokens > 0
    same(warm, cold)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [1, 4, 6, 13])
def test_E23_taken_over_by_another_host_penalties_count_the_delivered_tokens_as_answer(
    tiny: TorchEngine, cut: int, temperature: float
) -> None:
    tiny._kv_cache.pool.clear_cache()
    whole = run(tiny, penalised("whole", temperature=temperature, seed=3, ignore_eos=True))["whole"]
    tiny._kv_cache.pool.clear_cache()
    rest = penalised("rest", temperature=temperature, seed=3, ignore_eos=True, delivered=whole.tokens[:cut])
    said = run(tiny, rest)["rest"]
    assert said.tokens == whole.tokens[cut:]
    assert words(said) == [(token, pytest.approx(score, abs=2e-3)) for token, score in words(whole)[cut:]]


def test_E47_E46_what_one_row_asks_for_touches_no_other(tiny: TorchEngine) -> None:
    wishes: list[dict[str, Any]] = [
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": ((8, 50.0),)},
        {"min_tokens": 12},
        {"top_k": 1, "temperature": 1.5, "seed": 4},
        {"min_p": 1.0, "temperature": 1.5, "seed": 5},
        {"temperature": 1.0, "seed": 6},
        {},
    ]
    off = {key: SamplingParams.__dataclass_fields__[key].default for key in PENALISED}
    requests = [penalised(str(i), 12, **off | {"ignore_eos": True} | wish) for i, wish in enumerate(wishes)]
    alone = [run(tiny, one)[one.request_id] for one in requests]
    together = run(tiny, *requests)
    for one, said in zip(requests, alone, strict=True):
        assert together[one.request_id].tokens == said.tokens
    greedy = together["7"].tokens
    assert together["4"].tokens == together["5"].tokens == greedy  # top_k 1; only what is as likely as the likeliest
    assert set(together["2"].tokens) == {8}
    assert len(set(together["1"].tokens)) > len(set(greedy))  # greedy repeats itself, penalised it may not
    assert len({together[name].tokens for name in "1267"}) == 4 and together["0"].tokens != greedy


@pytest.mark.parametrize("least", [0, 1, 9])
def test_min_tokens_keeps_the_end_token_away_exactly_so_long(tiny: TorchEngine, least: int) -> None:
    off = {key: SamplingParams.__dataclass_fields__[key].default for key in PENALISED}
    said = run(tiny, penalised("r", 20, **off | {"logit_bias": ((1, 100.0),), "min_tokens": least}))["r"]
    assert len(said.tokens) == least + 1 and said.tokens[-1] == 1
    assert said.last.finish_reason == "stop"


def test_the_log_probabilities_are_the_models_own_whatever_is_asked(tiny: TorchEngine) -> None:
    plain = run(tiny, replace(request("r", TINY_PROMPT, 1), sampling=SamplingParams(1, 0, 0.0, logprobs=20)))["r"]
    said = run(tiny, penalised("r", 1, temperature=2.0, logprobs=20, logit_bias=((7, 100.0),), min_tokens=1))["r"]
    (one,), (other,) = plain.last.logprobs, said.last.logprobs
    assert one.top[0].token_id == one.token_id != other.token_id == 7
    assert [t.token_id for t in one.top] == [t.token_id for t in other.top]
    assert [t.logprob for t in one.top] == pytest.approx([t.logprob for t in other.top], abs=1e-3)
    assert other.logprob < -1


class EngineGenerator:
    """A gateway's generator on an engine in this process: whoever waits steps it, everybody gets his outputs."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.said: dict[str, Said] = {}

    async def outputs(self, request: GenerationRequest, _model: str, _progress: Progress) -> AsyncIterator[Output]:
        self.engine.add(request)
        read = 0
        while True:
            await asyncio.sleep(0)  # all that begin now share the next step
            for output in self.said.get(request.request_id, Said()).outputs[read:]:
                read += 1
                yield output
                if output.final:
                    return
            collect(self.said, self.engine.step())


@pytest.mark.parametrize("n", [4, 8])
async def test_E11_the_prompt_of_n_answers_is_computed_once(tiny: TorchEngine, n: int) -> None:
    tiny._kv_cache.pool.clear_cache()
    first = penalised("r", 10, more=range(20, 40), temperature=1.0, seed=2, ignore_eos=True)
    generator: Any = EngineGenerator(tiny)
    last = {i: out async for i, out in merged(generator, choice_requests(first, n), "m", Progress(0.0)) if out.final}
    assert sorted(last) == list(range(n))
    cached = [last[i].usage.cached_tokens for i in range(n)]  # type: ignore[union-attr]
    assert cached == [0] + [(len(first.prompt_token_ids) - 1) // 4 * 4] * (n - 1)
    said = {name: one.tokens for name, one in generator.said.items()}
    assert len(set(said.values())) == n
    assert said["r"] == run(tiny, first)["r"].tokens  # as with n = 1
