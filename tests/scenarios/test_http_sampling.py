"""The scenario bank's entries about sampling through HTTP, on a whole service with fake models."""

from __future__ import annotations

import math
import uuid
from typing import Any

import pytest
from openai import OpenAI

from tests.scenarios.calls import ask, events, idle, session, stream
from tests.service import RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]

BREAKS = {
    "test_logprobs_are_openais": ("orchestrator/turn.py", "if text or output.logprobs:", "if False:"),
    "test_n_answers": ("orchestrator/choices.py", "queue.put_nowait((index, output))", "queue.put_nowait((0, output))"),
    "test_a_token_outside": ("engine/requests.py", "for token, _ in sampling.logit_bias:", "for token, _ in ():"),
    "test_min_tokens_beyond": ("engine/requests.py", "if sampling.min_tokens > sampling.max_tokens:", "if False:"),
}


def openai(service: RunningService) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key="sk-demo-acme", max_retries=0)


HELLO: Any = [{"role": "user", "content": "hello, how are you today, and what is new in the grove?"}]


def test_logprobs_are_openais_streamed_and_whole(fake_service: RunningService) -> None:
    create = openai(fake_service).chat.completions.create
    asked: dict[str, Any] = {"model": "quick", "messages": HELLO, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    (whole,) = create(**asked).choices
    assert whole.logprobs is not None and whole.logprobs.content is not None
    content = whole.logprobs.content
    assert "".join(token.token for token in content) == whole.message.content
    assert bytes(byte for token in content for byte in token.bytes or []).decode() == whole.message.content
    assert all(token.logprob == token.top_logprobs[0].logprob == math.log(0.5) for token in content)
    assert [len(token.top_logprobs) for token in content] == [2] * 12
    streamed = []
    for chunk in create(**asked, stream=True):
        if chunk.choices and chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [token.model_dump() for token in streamed] == [token.model_dump() for token in content]
    plain = create(**asked | {"logprobs": False, "top_logprobs": None})
    assert plain.choices[0].logprobs is None


def test_n_answers_come_with_their_index_streamed_and_whole(fake_service: RunningService) -> None:
    create = openai(fake_service).chat.completions.create
    asked: dict[str, Any] = {"model": "quick", "messages": HELLO, "max_tokens": 12, "n": 3}
    whole = create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    assert whole.usage is not None and whole.usage.completion_tokens == 36
    texts, ends = ["", "", ""], []
    for chunk in create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] * (choice.finish_reason is not None)
    assert chunk.usage is not None and chunk.usage.completion_tokens == 36
    assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens
    assert texts == [choice.message.content for choice in whole.choices] and len(texts[0]) == 12
    assert ends == [0, 1, 2]
    wait_until(lambda: idle(fake_service, "quick"), 5, "all of them are over")


def test_n_answers_take_one_place_and_the_client_may_go(fake_service: RunningService) -> None:
    limited = {"Authorization": "Bearer sk-demo-limited"}
    assert ask(fake_service, "quick", "x", limited, n=4, max_tokens=4).status_code == 200
    with stream(fake_service, "slow", "long", limited, n=3) as response:
        found = events(response)
        while next(found)["choices"][0]["index"] != 2:  # type: ignore[index]
            pass
    wait_until(lambda: idle(fake_service, "slow"), 5, "every generation aborted, blocks free")
    wait_until(lambda: ask(fake_service, "quick", "x", limited).status_code == 200, 5, "the place is free")


def test_a_token_outside_the_vocabulary_is_named(fake_service: RunningService) -> None:
    for streamed in (False, True):
        response = ask(fake_service, "quick", logit_bias={"5": 1, "100000": -100}, stream=streamed)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "logit_bias") and "100000" in error["message"]
    assert ask(fake_service, "quick", logit_bias={"5": 1}, max_tokens=2).status_code == 200


def test_min_tokens_beyond_the_models_own_limit_is_refused_by_the_engine(fake_service: RunningService) -> None:
    response = ask(fake_service, "small", "x", min_tokens=40)  # its default_max_tokens is 32
    assert (response.status_code, response.json()["error"]["param"]) == (400, "min_tokens")
    reached = ask(fake_service, "small", "x", min_tokens=30).json()["usage"]["completion_tokens"]
    assert reached >= 30


def test_log_probabilities_cannot_be_replayed_and_say_so(fake_service: RunningService) -> None:
    headers = session() | {"Idempotency-Key": uuid.uuid4().hex}
    response = ask(fake_service, "quick", "x", headers, logprobs=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
    assert ask(fake_service, "quick", "x", headers).status_code == 200
