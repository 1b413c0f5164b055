"""The scenario bank's entries about HTTP, on a whole service with fake models."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.scenarios.calls import (
    ACME,
    GLOBEX,
    ask,
    ask_all,
    events,
    idle,
    listen,
    said,
    session,
    stream,
    text_of,
    usage,
)
from tests.service import RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]

BREAKS = {
    "test_S59_E59": (
        "orchestrator/api/intake.py",
        "if name in body and body[name] is not None and not _is_one_of(body[name], off):",
        "if False:",
    ),
    "test_E16": (
        "engine/scheduler.py",
        "limit = min(self.limits.max_model_len, self.capacity_tokens)",
        "limit = 10**9",
    ),
    "test_S19": ("orchestrator/messages.py", 'messages[-1].setdefault("tool_calls", []).append(_call(item))', "pass"),
    "test_S20": ("session_store/lua/begin_turn.lua", "local busy = held[1] and held[1] ~= turn", "local busy = false"),
    "test_S22": ("orchestrator/turn.py", "idempotency_key=ask.idempotency_key", "idempotency_key=None"),
    "test_S23_S62_E28": (  # both guards: who is dropped is cancelled, and what nobody listens to is
        "orchestrator/links.py",
        "self._streams.pop(stream.key, None)\n        if not stream.ended and self.lost is None:",
        "if False:",
    ),
    "test_S62": ("orchestrator/turn.py", "if not committed:", "if False:"),
    "test_S35": (
        "orchestrator/turn.py",
        "ask.tenant.name,\n            place.session_id",
        '"all",\n            place.session_id',
    ),
    "test_S61": ("orchestrator/api/chat.py", "return _data(error.envelope())", 'return b"data: [DONE]"'),
}


# -- wire errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "nope"}, 404, "model", "model_not_found"),
        ({"n": 0}, 400, "n", "invalid_request"),
        ({"n": 9}, 400, "n", "invalid_request"),
        ({"n": 2, "session_id": "s"}, 400, "n", "invalid_request"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.function", "invalid_request"),
        ({"keep_alive": "soon"}, 400, "keep_alive", "invalid_request"),
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


def test_S19_a_stored_function_call_and_its_output_are_both_in_the_next_prompt(fake_service: RunningService) -> None:
    def after(function: str, output: str) -> int:
        """Prompt tokens of the turn after a call, its output and the answer, without those of the answer."""
        headers = session()
        call = {"id": "c1", "type": "function", "function": {"name": function, "arguments": '{"city": "Oslo"}'}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "how is the weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": output, "tool_call_id": "c1"},
        ]
        answer = said(ask_all(fake_service, "quick", messages, headers))
        continued, _ = usage(ask(fake_service, "quick", "and now?", headers))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and now?"}]
        assert continued == usage(ask_all(fake_service, "quick", messages))[0]
        return continued - len(answer)

    tokens = after("look_up", "rain")  # a token of the fake is a byte
    assert after("look_up_the_weather", "rain") == tokens + len("_the_weather")
    assert after("look_up", "rain and wind") == tokens + len(" and wind")


def test_the_name_of_a_message_stays_with_it_in_a_session(fake_service: RunningService) -> None:
    headers, named = session(), {"role": "user", "content": "hello", "name": "ada"}
    answer = said(ask_all(fake_service, "tall", [named], headers))
    tokens, _ = usage(ask(fake_service, "tall", "and?", headers))
    assert tokens == len(f"<user ada>hello</><assistant >{answer}</><user >and?</><assistant >")


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
    one_turn = len(first.json()["choices"][0]["message"]["content"]) + len("User: once\nAssistant:\n")
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
    if fake_service.model("late")["state"] != "cold":  # another test has had it
        fake_service.operate("late", "unload")
    wait_until(lambda: fake_service.model("late")["state"] == "cold", 20, "late is cold")
    with stream(fake_service, "late", "and now", headers) as response:  # a load of 2 s outlasts the hold of 1 s
        assert response.headers["x-context-truncated"].startswith("turns=")
        assert "server-timing" not in response.headers
        lines = list(response.iter_lines())
    timing = next(line for line in lines if line.startswith(": server-timing "))
    assert float(timing.partition("load;dur=")[2].partition(",")[0]) > 1000
    assert any(line.startswith(": waiting for ") and "in line" in line for line in lines)
    assert lines[-2:] == ["data: [DONE]", ""]


def test_a_second_turn_on_another_model_sees_the_first(fake_service: RunningService) -> None:
    headers = session()
    first = ask(fake_service, "quick", "hello", headers).json()["choices"][0]["message"]["content"]
    second = ask(fake_service, "small", "and?", headers)
    expected = f"User: hello\nAssistant:{first}\nUser: and?\nAssistant:"
    assert second.json()["usage"]["prompt_tokens"] == len(expected)


# -- residency through HTTP -------------------------------------------------------------------


def test_R10_R01_a_stream_completes_before_its_model_gives_way_and_everybody_is_served(
    fake_service: RunningService,
) -> None:
    with ThreadPoolExecutor(4) as pool:
        begun = threading.Event()
        running = pool.submit(listen, fake_service, begun, "left", "long", max_tokens=200)
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
