"""The scenario bank's entries about HTTP, on a whole service with fake models."""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.service import RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]

ACME = {"Authorization": "Bearer sk-demo-acme"}
GLOBEX = {"Authorization": "Bearer sk-demo-globex"}

BREAKS = {
    "test_S59_E59": (
        "orchestrator/api/wire.py",
        "if name in body and body[name] is not None and body[name] not in off:",
        "if False:",
    ),
    "test_E16": (
        "engine/scheduler.py",
        "limit = min(self.limits.max_model_len, self.capacity_tokens)",
        "limit = 10**9",
    ),
    "test_S20": ("session_store/lua/begin_turn.lua", "if held[1] and held[1] ~= turn then", "if false then"),
    "test_S22": ("orchestrator/turn.py", "idempotency_key=ask.idempotency_key", "idempotency_key=None"),
    "test_S23_S62_E28": ("orchestrator/links.py", "if not stream.ended and self.lost is None:", "if False:"),
    "test_S62": ("orchestrator/turn.py", "if not committed:", "if False:"),
    "test_S35": (
        "orchestrator/turn.py",
        "ask.tenant.name,\n            ask.session_id",
        '"all",\n            ask.session_id',
    ),
    "test_S61": ("orchestrator/api/chat.py", "orjson.dumps(error.envelope())", 'b"[DONE]"'),
}


def ask(service: RunningService, model: str, text: str = "hello", headers: Any = None, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, headers={**ACME, **(headers or {})}, timeout=60)


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def stream(service: RunningService, model: str, text: str = "hello", headers: Any = None, **fields: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True, **fields}
    return httpx.stream(
        "POST", f"{service.url}/v1/chat/completions", json=body, headers={**ACME, **(headers or {})}, timeout=60
    )


def text_of(found: list[Any]) -> str:
    deltas = [e["choices"][0]["delta"] for e in found if isinstance(e, dict) and e.get("choices")]
    return "".join(delta.get("content", "") for delta in deltas)


def session() -> dict[str, str]:
    return {"X-Session-ID": f"s-{uuid.uuid4().hex}"}


def idle(service: RunningService, model: str) -> bool:
    stats = service.model(model)["stats"]
    return stats["running"] == stats["waiting"] == stats["kv_blocks_used"] == 0


# -- wire errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "nope"}, 404, "model", "model_not_found"),
        ({"n": 0}, 400, "n", "invalid_request"),
        ({"n": 9}, 400, "n", "invalid_request"),
        ({"n": 2, "session_id": "s"}, 400, "n", "invalid_request"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
        ({"keep_alive": "5m"}, 400, "keep_alive", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, 400, "reasoning_effort", "unsupported_parameter"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty", "invalid_request"),
        ({"frequency_penalty": -2.5}, 400, "frequency_penalty", "invalid_request"),
        ({"logit_bias": {"256": 1}}, 400, "logit_bias", "invalid_request"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "invalid_request"),
        ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "invalid_request"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
        ({"no_such_field": 1}, 400, "no_such_field", "unsupported_parameter"),
        ({"temperature": 3}, 400, "temperature", "invalid_request"),
        ({"top_p": -1}, 400, "top_p", "invalid_request"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_request"),
        ({"messages": []}, 400, "messages", "invalid_request"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0", "invalid_request"),
        ({"seed": "5"}, 400, "seed", "invalid_request"),
        ({"max_tokens": True}, 400, "max_tokens", "invalid_request"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role", "invalid_request"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop", "invalid_request"),
    ],
)
def test_S59_E59_bad_fields_get_the_envelope(
    fake_service: RunningService, fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    body = {"model": "quick", "messages": [{"role": "user", "content": "x"}], **fields}
    response = httpx.post(f"{fake_service.url}/v1/chat/completions", json=body, headers=ACME, timeout=30)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["message"] and error["type"] == "invalid_request_error"


def test_S59_switched_off_fields_are_accepted(fake_service: RunningService) -> None:
    assert ask(fake_service, "quick", n=1, logprobs=False, presence_penalty=0, tools=[]).status_code == 200


def test_S59_unknown_route_method_and_body(fake_service: RunningService) -> None:
    url = fake_service.url
    for response, status, code in (
        (httpx.get(f"{url}/v1/nothing", headers=ACME), 404, "not_found"),
        (httpx.get(f"{url}/v1/chat/completions", headers=ACME), 405, "method_not_allowed"),
        (httpx.post(f"{url}/v1/chat/completions", content=b"{", headers=ACME), 400, "invalid_request"),
        (httpx.post(f"{url}/v1/chat/completions", content=b"[]", headers=ACME), 400, "invalid_request"),
        (httpx.get(f"{url}/v1/models"), 401, "invalid_api_key"),
        (httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer wrong"}), 401, "invalid_api_key"),
        (httpx.get(f"{url}/admin/models", headers=ACME), 403, "permission_denied"),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_a_huge_body_is_refused_and_stalls_nobody(fake_service: RunningService) -> None:
    response = ask(fake_service, "quick", "x" * 9_000_000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, fake_service, "quick", "x" * 7_000_000)
        slowest = 0.0
        while not long.done():
            begin = time.monotonic()
            httpx.get(f"{fake_service.url}/health", timeout=30)
            slowest = max(slowest, time.monotonic() - begin)
    assert (long.result().status_code, long.result().json()["error"]["code"]) == (400, "context_length_exceeded")
    assert slowest < 1.0  # tokenizing on the event loop took seconds


def test_too_long_a_prompt_is_refused_before_any_stream_header(fake_service: RunningService) -> None:
    for stream_it in (False, True):
        response = ask(fake_service, "small", "x" * 300, stream=stream_it)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_E16_what_can_never_fit_the_kv_pool_is_refused_at_once(fake_service: RunningService) -> None:
    begin = time.monotonic()
    response = ask(fake_service, "tight", "x" * 400, max_tokens=300)
    assert response.status_code == 400 and response.json()["error"]["code"] == "request_too_large"
    assert "512" in response.json()["error"]["message"]
    assert time.monotonic() - begin < 10
    assert ask(fake_service, "tight", "x" * 400, max_tokens=30).status_code == 200


# -- turns ----------------------------------------------------------------------------------


def test_streamed_and_whole_answers_agree_and_usage_is_right(fake_service: RunningService) -> None:
    whole = ask(fake_service, "quick", "same", max_tokens=20).json()
    with stream(fake_service, "quick", "same", max_tokens=20, stream_options={"include_usage": True}) as response:
        found = list(events(response))
    assert text_of(found) == whole["choices"][0]["message"]["content"] != ""
    assert found[-1] == "[DONE]"
    assert found[-2]["usage"] == whole["usage"] | {"prompt_tokens_details": found[-2]["usage"]["prompt_tokens_details"]}
    assert found[-3]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


def test_S20_two_turns_on_one_session_never_interleave(fake_service: RunningService) -> None:
    headers = session()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, fake_service, "slow", "one", headers, max_tokens=60)
        time.sleep(0.5)
        second = ask(fake_service, "slow", "two", headers, max_tokens=4)
    assert first.result().status_code == 200
    assert second.status_code == 409
    assert second.json()["error"]["code"] == "session_busy"
    assert int(second.headers["retry-after"]) >= 1
    assert ask(fake_service, "slow", "three", headers, max_tokens=4).status_code == 200


def test_S22_retry_with_the_same_key_gets_the_stored_reply(fake_service: RunningService) -> None:
    headers = session() | {"Idempotency-Key": uuid.uuid4().hex}
    first = ask(fake_service, "quick", "once", headers)
    again = ask(fake_service, "quick", "once", headers)
    with stream(fake_service, "quick", "once", headers) as response:
        streamed = list(events(response))
    assert first.json()["choices"] == again.json()["choices"]
    assert first.json()["id"] == again.json()["id"] == streamed[0]["id"]
    assert text_of(streamed) == first.json()["choices"][0]["message"]["content"]
    assert again.headers["x-idempotent-replayed"] == "true"
    other = ask(fake_service, "quick", "something else", headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_mismatch")
    follow = ask(fake_service, "quick", "next", {"X-Session-ID": headers["X-Session-ID"]})
    alone = ask(fake_service, "quick", "next").json()["usage"]["prompt_tokens"]
    one_turn = len(first.json()["choices"][0]["message"]["content"]) + len("User: once\nAssistant: \n")
    assert follow.json()["usage"]["prompt_tokens"] == alone + one_turn


@pytest.mark.parametrize("streamed", [True, False])
def test_S23_S62_E28_client_gone_aborts_and_releases_everything(fake_service: RunningService, streamed: bool) -> None:
    headers = session()
    client = httpx.Client(timeout=60)
    body = {"model": "slow", "messages": [{"role": "user", "content": "long"}], "stream": streamed}
    request = client.build_request(
        "POST", f"{fake_service.url}/v1/chat/completions", json=body, headers={**ACME, **headers}
    )
    if streamed:
        response = client.send(request, stream=True)
        next(events(response))
        response.close()
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.send(client.build_request(
                "POST", f"{fake_service.url}/v1/chat/completions", json=body,
                headers={**ACME, **headers}, timeout=1.0,
            ))  # fmt: skip
    client.close()
    wait_until(lambda: idle(fake_service, "slow"), 5, "generation aborted, blocks free")
    # the lease is free, and the aborted turn is not in the prompt
    after = ask(fake_service, "slow", "next", headers, max_tokens=4)
    assert after.status_code == 200
    assert (
        after.json()["usage"]["prompt_tokens"]
        == ask(fake_service, "slow", "next", max_tokens=4).json()["usage"]["prompt_tokens"]
    )


def test_S62_the_reservation_of_a_gone_client_is_released(fake_service: RunningService) -> None:
    limited = {"Authorization": "Bearer sk-demo-limited"}
    with stream(fake_service, "slow", "long", limited) as response:
        found = events(response)  # kept: dropping the iterator closes the connection
        next(found)
        refused = ask(fake_service, "quick", "x", limited)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
    wait_until(lambda: ask(fake_service, "quick", "x", limited).status_code == 200, 5, "the place is free")


def test_S35_another_tenants_session_does_not_exist(fake_service: RunningService) -> None:
    headers = session()
    ask(fake_service, "quick", "a secret", headers)
    theirs = ask(fake_service, "quick", "hi", headers | GLOBEX).json()["usage"]["prompt_tokens"]
    fresh = ask(fake_service, "quick", "hi").json()["usage"]["prompt_tokens"]
    assert theirs == fresh


def test_S61_an_engine_error_after_the_first_token_is_an_error_event(fake_service: RunningService) -> None:
    headers = session()
    with stream(fake_service, "nan", "x", headers) as response:
        found = list(events(response))
    assert response.status_code == 200
    assert found[-1]["error"]["code"] == "engine_error"
    assert "[DONE]" not in found
    assert all(e["choices"][0]["finish_reason"] is None for e in found[:-1])
    # nothing of it is in the history
    again = ask(fake_service, "quick", "y", headers).json()["usage"]["prompt_tokens"]
    assert again == ask(fake_service, "quick", "y").json()["usage"]["prompt_tokens"]


def test_session_truncation_is_reported(fake_service: RunningService) -> None:
    headers = session()
    for turn in range(6):
        last = ask(fake_service, "small", f"turn {turn} " + "x" * 40, headers)
        assert last.status_code == 200
    assert last.headers["x-context-truncated"].startswith("turns=")
    assert last.json()["usage"]["prompt_tokens"] <= 256 - 32


def test_a_held_stream_still_says_what_was_cut_and_where_the_time_went(fake_service: RunningService) -> None:
    headers = session()
    for turn in range(6):
        ask(fake_service, "small", f"turn {turn} " + "x" * 40, headers)
    assert fake_service.model("late")["state"] == "cold"
    with stream(fake_service, "late", "and now", headers) as response:  # a load of 2 s outlasts the hold of 1 s
        assert response.headers["x-context-truncated"].startswith("turns=")
        assert "server-timing" not in response.headers
        lines = list(response.iter_lines())
    timing = next(line for line in lines if line.startswith(": server-timing "))
    assert float(timing.partition("load;dur=")[2].partition(",")[0]) > 1000
    assert any(line.startswith(": waiting for the model") for line in lines)
    assert lines[-2:] == ["data: [DONE]", ""]


def test_a_second_turn_on_another_model_sees_the_first(fake_service: RunningService) -> None:
    headers = session()
    first = ask(fake_service, "quick", "hello", headers).json()["choices"][0]["message"]["content"]
    second = ask(fake_service, "small", "and?", headers)
    expected = f"User: hello\nAssistant: {first}\nUser: and?\nAssistant:"
    assert second.json()["usage"]["prompt_tokens"] == len(expected)


# -- residency through HTTP -------------------------------------------------------------------


def test_R10_R01_a_stream_completes_before_its_model_gives_way_and_everybody_is_served(
    fake_service: RunningService,
) -> None:
    with ThreadPoolExecutor(4) as pool:
        begun = threading.Event()

        def long() -> list[Any]:
            with stream(fake_service, "left", "long", max_tokens=200) as response:
                found = []
                for event in events(response):
                    found.append(event)
                    begun.set()
                return found

        running = pool.submit(long)
        assert begun.wait(30)
        right = pool.submit(ask, fake_service, "right", "x")
        time.sleep(0.2)
        left_again = pool.submit(ask, fake_service, "left", "again", max_tokens=4)
        found = running.result(60)
        assert found[-1] == "[DONE]" and len(text_of(found)) == 200
        assert right.result(60).status_code == 200
        assert left_again.result(60).status_code == 200


def test_a_broken_model_fails_with_its_cause_and_the_others_serve(fake_service: RunningService) -> None:
    response = ask(fake_service, "broken")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "load_failed")
    assert "/nonexistent/model" in error["message"]
    assert "retry-after" not in response.headers  # asking again does not help
    shown = fake_service.model("broken")
    assert shown["state"] == "failed" and "/nonexistent/model" in shown["cause"]
    assert ask(fake_service, "quick").status_code == 200


# -- sampling -----------------------------------------------------------------------------------

BREAKS |= {
    "test_logprobs_are_openais": ("orchestrator/turn.py", "if output.text or output.logprobs:", "if False:"),
    "test_n_answers": ("orchestrator/choices.py", "queue.put_nowait((index, output))", "queue.put_nowait((0, output))"),
    "test_a_token_outside": ("engine/core.py", "for token, _ in sampling.logit_bias:", "for token, _ in ():"),
    "test_min_tokens_beyond": ("engine/core.py", "if sampling.min_tokens > sampling.max_tokens:", "if False:"),
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
