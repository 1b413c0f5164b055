"""Several answers to one request, and every wish on its way to the engine; fakes as in ``test_turn``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.protocol import GenerationRequest, Output, SamplingParams, TokenLogprob, Usage
from orchestrator.asks import Ask, Done, Piece, Started
from orchestrator.choices import choice_requests
from orchestrator.generation import _sticky_key
from orchestrator.progress import Progress
from policies.errors import EngineError
from tests.unit.test_turn import MODEL, FakeGenerator, FakeStore, ask, runner

REQUEST = GenerationRequest("r", 0, (1, 2), SamplingParams(4, 7), tenant="t")


class ManyGenerator:
    """Says ``words`` for each request in turn; ``fail``: the request with this id ends in an error after one word."""

    def __init__(self, words: list[str], fail: str = "") -> None:
        self.words, self.fail = words, fail
        self.requests: list[GenerationRequest] = []
        self.log: list[str] = []
        self.open = 0

    async def outputs(self, request: GenerationRequest, model: str, progress: Progress) -> AsyncIterator[Output]:
        self.requests.append(request)
        name = request.request_id.partition(".")[2] or "0"
        self.log.append(f"begin {name}")
        self.open += 1
        try:
            for index, word in enumerate(self.words):
                await asyncio.sleep(0)
                if name == self.fail and index == 1:
                    raise EngineError("nan")
                self.log.append(f"say {name}")
                usage = Usage(2, index + 1, 0, 0, 0.0, 0.0, 0.0)
                last = index == len(self.words) - 1
                yield Output(request.request_id, 0, (index,), word, "length" if last else None, usage=usage)
        finally:
            self.open -= 1


def test_the_first_of_n_is_the_request_itself_and_the_others_have_seeds_of_their_own() -> None:
    one, many = choice_requests(REQUEST, 1), choice_requests(REQUEST, 8)
    assert one == [REQUEST]
    assert [r.request_id for r in many] == ["r", *(f"r.{i}" for i in range(1, 8))]
    assert many[0].sampling == REQUEST.sampling
    seeds = [r.sampling.seed for r in many]
    assert len(set(seeds)) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert [r.sampling.seed for r in choice_requests(REQUEST, 3)] == seeds[:3]  # the same on any gateway
    assert {_sticky_key(r) for r in many} == {_sticky_key(REQUEST)}  # one host: they share the prompt's KV


async def test_n_answers_begin_once_the_first_has_spoken_and_are_settled_as_one() -> None:
    store, generator = FakeStore(), ManyGenerator(["a", "b"])
    many: Any = generator
    events = [event async for event in runner(store, many).run(ask(None, n=3), Progress(0.0))]
    assert isinstance(events[0], Started) and [type(e) for e in events].count(Started) == 1
    assert generator.log[:2] == ["begin 0", "say 0"] and generator.log.count("begin 1") == 1
    texts = {i: "".join(e.text for e in events if isinstance(e, Piece) and e.index == i) for i in range(3)}
    assert texts == {0: "ab", 1: "ab", 2: "ab"}
    done = events[-1]
    assert isinstance(done, Done)
    assert done.finish_reasons == ("length",) * 3
    assert (done.prompt_tokens, done.completion_tokens) == (2, 6)
    assert store.calls == ["reserve", "settle"]


async def test_the_reservation_is_for_all_of_them_and_what_was_used_is_booked() -> None:
    class Store(FakeStore):
        reserved = settled = 0

        async def reserve(self, *args: Any, reserve_tokens: int, **limits: Any) -> None:
            self.reserved = reserve_tokens

        async def settle(self, tenant: str, turn: str, used: int) -> None:
            self.settled = used

    store, generator = Store(), ManyGenerator(["a", "b"])
    many: Any = generator
    _ = [event async for event in runner(store, many).run(ask(None, n=3), Progress(0.0))]
    assert store.reserved == 3 * MODEL.max_model_len
    assert store.settled == 2 + 6


async def test_one_failure_ends_them_all() -> None:
    store, generator = FakeStore(), ManyGenerator(["a"] * 50, fail="2")
    many: Any = generator
    with pytest.raises(EngineError):
        async for _ in runner(store, many).run(ask(None, n=4), Progress(0.0)):
            pass
    assert generator.open == 0
    assert store.calls == ["reserve", "settle"]


async def test_a_client_that_goes_ends_them_all() -> None:
    store, generator = FakeStore(), ManyGenerator(["a"] * 50)
    many: Any = generator
    events: Any = runner(store, many).run(ask(None, n=4), Progress(0.0))
    for _ in range(12):
        await anext(events)
    assert generator.open == 4
    await events.aclose()
    assert generator.open == 0
    assert store.calls == ["reserve", "settle"]


async def test_every_wish_reaches_the_engine() -> None:
    wishes: dict[str, Any] = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4,
        "logit_bias": ((3, 1.0),), "min_tokens": 2, "logprobs": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1,
    }  # fmt: skip
    generator = FakeGenerator(["a"])
    _ = [event async for event in runner(FakeStore(), generator).run(ask(None, **wishes), Progress(0.0))]
    assert generator.request is not None
    for name, value in wishes.items():
        assert getattr(generator.request.sampling, name) == value
    shared = set(SamplingParams.__dataclass_fields__) & set(Ask.__dataclass_fields__)
    assert shared == set(wishes) | {"stop", "max_tokens"}  # a new one must be tried here, too


async def test_a_token_without_text_of_its_own_still_brings_its_score() -> None:
    score = TokenLogprob(1, -0.5, "\ufffd", b"\xf0")

    class Scoring(FakeGenerator):
        async def outputs(self, request: GenerationRequest, model: str, progress: Progress) -> AsyncIterator[Output]:
            usage = Usage(1, 1, 0, 0, 0.0, 0.0, 0.0)
            yield Output("r", 0, (1,), "", None, usage=usage, logprobs=(score,))
            yield Output("r", 0, (2,), "x", "stop", usage=usage, logprobs=(score,))

    events = [e async for e in runner(FakeStore(), Scoring([])).run(ask(None, logprobs=0), Progress(0.0))]
    assert [e.logprobs for e in events if isinstance(e, Piece)] == [(score,), (score,)]
