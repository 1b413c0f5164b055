"""Scenario entries through HTTP: what a session's next turn reuses, two turns at once, and what a body may ask for."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai.types import completion_create_params as plain_params
from openai.types.chat import completion_create_params as chat_params
from tokenizers import Tokenizer

from orchestrator.api.wire import ChatRequest
from orchestrator.contexts import parse
from tests.engine_helpers import scale_values
from tests.scenarios.calls import ACME, ask, ask_all, idle, listen, said, session, text_of, usage
from tests.service import ADMIN, RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}
BLOCK = 16

BREAKS = {
    "test_E04": ("engine/weights.py", "if found != self.stamp:", "if False:"),
    "test_E13_turn": (
        "engine/kv_cache.py",
        "full = context.num_computed // self.block_size",
        "full = min(context.num_computed, len(context.request.prompt_token_ids)) // self.block_size",
    ),
    "test_E13_a_base": (
        "orchestrator/tokens.py",
        "%}Assistant:{{ message['content'] }}",
        "%}Assistant: {{ message['content'] }}",
    ),
    "test_E13_what_was_said": (
        "orchestrator/prompting.py",
        "and item.ids is not None and item.model == ask.model.name",
        "and False",
    ),
    "test_E13_where": (
        "engine/blocks.py",
        "return block if block is not None and self._tokens[block] == tuple(token_ids) else None",
        "return None",
    ),
    "test_E37_a_second_turn_is_refused": (
        "session_store/lua/begin_turn.lua",
        "local busy = held[1] and held[1] ~= turn",
        "local busy = false",
    ),
    "test_E37_a_second_turn_waits": ("session_store/changing.py", "if left_seconds <= 0:", "if True:"),
    "test_E37_one_that_leaves": ("orchestrator/turn.py", "if not committed:", "if False:"),
    "test_E59_every": (
        "orchestrator/api/wire.py",
        'extra="forbid", strict=True)\n\n    model: str',
        'extra="ignore", strict=True)\n\n    model: str',
    ),
    "test_E59_what_contradicts": ("orchestrator/api/wire.py", 'not info.data.get("stream"):', "False:"),
    "test_E59_what_is_taken": (
        "orchestrator/prompting.py",
        "frequency_penalty=ask.frequency_penalty,",
        "frequency_penalty=0.0,",
    ),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Iterator[RunningService]:
    """A demo model, a tiny one, and fake ones; a busy session is waited for."""
    directory = tmp_path_factory.mktemp("reuse")
    fake = {"source": "fake", "memory": "160MiB"}
    plain, small = {"compile_layers": False}, {"memory": "900MiB", "max_model_len": 512}
    shutil.copytree(tiny_models["llama"], directory / "edited")
    config = {
        "http": {"deadline_seconds": 60, "busy_session_seconds": 5},
        "devices": [{"name": "cpu0", "memory": "4GiB"}],
        "models": [
            {**plain, "name": "real", "source": "demo:smollm2-135m-instruct", "memory": "2GiB", "max_model_len": 1024},
            {**plain, **small, "name": "tiny", "source": str(tiny_models["llama"])},
            {**plain, **small, "name": "edited", "source": str(directory / "edited")},
            {"name": "bytes", **fake, "chat_template": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
             "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"},
            {"name": "base", **fake},  # as base models: the fallback template
            {"name": "slow", **fake, "preload": True, "fake": {"step_seconds": 0.03, "reply_words": 200}},
        ],
        "tenants": [
            {"name": "acme", "demo_key": "sk-demo-acme"},
            {"name": "operator", "demo_key": ADMIN, "admin": True},
        ],
    }  # fmt: skip
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    running = RunningService(directory / "config.yaml", directory / "state")
    running.start()
    yield running
    running.stop()


# -- a session's next turn ---------------------------------------------------------------------


def again(service: RunningService, model: str, text: str, **fields: Any) -> tuple[int, int, int]:
    """Of a session's first two turns: prompt and answer tokens of the first, prompt tokens found by the second."""
    headers = session()
    first = ask(service, model, text, headers, temperature=0, max_tokens=40, **fields)
    counts = first.raise_for_status().json()["usage"]
    prompt, found = usage(ask(service, model, "and then?", headers, temperature=0, max_tokens=2))
    assert prompt > counts["prompt_tokens"] + len("and then?") // 4
    return counts["prompt_tokens"], counts["completion_tokens"], found


def everything_is_found(prompt: int, answer: int, found: int) -> None:
    assert answer > 2 * BLOCK
    assert found >= prompt + answer - BLOCK  # all but the last block, whose last token's KV was never computed


@pytest.mark.parametrize("model", ["bytes", pytest.param("real", marks=pytest.mark.models)])
def test_E13_turn_two_finds_the_kv_of_what_turn_one_said(service: RunningService, model: str) -> None:
    everything_is_found(*again(service, model, "Tell me a short story about a fox."))


def test_E13_a_base_models_answer_is_written_where_it_was_said(service: RunningService) -> None:
    """With the fallback template. It once put a space before the answer that was not there when it was made."""
    everything_is_found(*again(service, "base", "Tell me a short story about a fox."))


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        # a byte that is no character, token 176; the text has U+FFFD for it, tokens 173, 125, 123
        pytest.param("tiny", {}, id="half a character"),
        # token 198 over and over; of two, the text is token 1116, as prime-rl#1863 has it
        pytest.param("real", {"logit_bias": {"198": 100}}, id="line ends", marks=pytest.mark.models),
    ],
)
def test_E13_what_was_said_otherwise_than_its_text_is_tokenized_is_found_too(
    service: RunningService, model: str, fields: dict[str, Any]
) -> None:
    everything_is_found(*again(service, model, "Tell me a short story about a fox.", **fields))


def test_E13_where_the_history_reads_otherwise_what_comes_before_it_is_found(
    service: RunningService, tiny_models: dict[str, Path]
) -> None:
    """The template trims an answer, of line ends only, down to nothing."""
    line_end = Tokenizer.from_file(str(tiny_models["llama"] / "tokenizer.json")).token_to_id("Ċ")
    prompt, answer, found = again(
        service,
        "tiny",
        "Tell me a short story about a fox, a crow and a piece of cheese.",
        logit_bias={str(line_end): 100},
    )
    assert prompt + answer - BLOCK > found >= prompt - BLOCK > BLOCK


def test_E04_weights_written_over_while_the_model_sleeps_are_loaded_anew(service: RunningService) -> None:
    """At once, by the next request: nobody has to unload the model, and no KV of the old ones is found."""
    headers = session()
    assert ask(service, "edited", "Tell me a story.", headers, max_tokens=40).status_code == 200
    pid = service.model("edited")["pid"]
    service.operate("edited", "sleep")
    scale_values(service.state_dir.parent / "edited" / "model.safetensors")
    assert usage(ask(service, "edited", "and then?", headers, max_tokens=2))[1] == 0
    assert service.model("edited")["pid"] != pid


# -- two turns of one session at once ------------------------------------------------------------


def stored(service: RunningService, headers: dict[str, str]) -> Any:
    url = f"{service.url}/admin/sessions/acme/{headers['X-Session-ID']}"
    return httpx.get(url, headers=AS_ADMIN, timeout=30).raise_for_status().json()


def nothing_is_left(service: RunningService, headers: dict[str, str], turns: list[tuple[str, str]]) -> None:
    """The session has these turns and no other; the engine holds nothing, and the session can be closed."""
    wait_until(lambda: idle(service, "slow"), 10, "nothing runs")
    found = stored(service, headers)
    assert [item["content"][0]["text"] for item in found["last_items"]] == [text for turn in turns for text in turn]
    assert (found["version"], found["running_turn_id"]) == (len(turns), None)
    shown = httpx.get(f"{service.url}/admin/contexts", params={"model": "slow"}, headers=AS_ADMIN, timeout=30)
    (host,) = parse(shown.raise_for_status().json())
    assert host.snapshot is not None
    assert (host.snapshot.contexts, host.snapshot.unfreed_blocks) == ((), 0)
    assert set(host.snapshot.blocks) <= {"free", "cached"}
    books = host.snapshot.pool
    assert (books.free, books.held, books.fenced) == (books.total, 0, 0)
    url = f"{service.url}/admin/sessions/acme/{headers['X-Session-ID']}"
    gone = httpx.delete(url, headers=AS_ADMIN, timeout=30).raise_for_status().json()
    assert gone["deleted"] and gone["hosts_not_reached"] == []
    assert httpx.get(url, headers=AS_ADMIN, timeout=30).status_code == 404


def test_E37_a_second_turn_waits_for_the_first_and_reads_it(service: RunningService) -> None:
    headers, begun = session(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(listen, service, begun, "slow", "one", max_tokens=40, headers=headers)
        assert begun.wait(30)
        second = ask(service, "slow", "two", headers, max_tokens=4)
        assert first.done() or first.result(1)[-1] == "[DONE]"  # it was acknowledged before the second began
    answers = text_of(first.result()), said(second)
    assert len(answers[0]) == 40
    history = [("user", "one"), ("assistant", answers[0]), ("user", "two")]
    alone = ask_all(service, "slow", [{"role": role, "content": text} for role, text in history], max_tokens=4)
    assert usage(second)[0] == usage(alone)[0]
    nothing_is_left(service, headers, [("one", answers[0]), ("two", answers[1])])


@pytest.mark.parametrize("streamed", [False, True])
def test_E37_a_second_turn_is_refused_when_the_first_takes_too_long(
    fake_service: RunningService, streamed: bool
) -> None:
    headers, begun = session(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(listen, fake_service, begun, "slow", "one", max_tokens=80, headers=headers)
        assert begun.wait(30)
        for number in range(2):  # more than http.busy_session_seconds, 0.3, less than the first
            second = ask(fake_service, "slow", f"two {number}", headers, max_tokens=4, stream=streamed)
            assert (second.status_code, second.json()["error"]["code"]) == (409, "session_busy")
            assert 1 <= int(second.headers["retry-after"]) <= 10
        assert not first.done()
    third = said(ask(fake_service, "slow", "three", headers, max_tokens=4))
    nothing_is_left(fake_service, headers, [("one", text_of(first.result())), ("three", third)])


def test_E37_one_that_leaves_while_it_waits_or_runs_holds_nothing_back(service: RunningService) -> None:
    headers, begun = session(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(listen, service, begun, "slow", "one", max_tokens=40, headers=headers)
        assert begun.wait(30)
        body = {"model": "slow", "messages": [{"role": "user", "content": "two"}]}
        for seconds in (0.2, 3):  # while it waits for the first; while it runs
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{service.url}/v1/chat/completions", json=body, headers=ACME | headers, timeout=seconds
                )  # fmt: skip
        assert first.done()
    begin = time.monotonic()
    third = said(ask(service, "slow", "three", headers, max_tokens=4))
    assert time.monotonic() - begin < 4  # the lease was given back, it has not lapsed: that takes 9 s
    nothing_is_left(service, headers, [("one", text_of(first.result())), ("three", third)])


# -- what a body may ask for -----------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
# A usual value of every field of the openai client, and of what other servers add to them.
USUAL: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [TOOL["function"]],
    "logit_bias": {"7": 5},
    "logprobs": True,
    "max_completion_tokens": 2,
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "hello"}],
    "metadata": {"ticket": "7"},
    "modalities": ["text", "audio"],
    "model": "quick",
    "moderation": {"model": "omni-moderation-latest"},
    "n": 2,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "hello"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "mine",
    "prompt_cache_options": {"ttl": "24h"},
    "prompt_cache_retention": "in_memory",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "mine",
    "seed": 5,
    "service_tier": "flex",
    "stop": ["."],
    "store": True,
    "stream": False,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "tool_choice": "auto",
    "tools": [TOOL],
    "top_logprobs": 0,
    "top_p": 0.5,
    "user": "ada",
    "verbosity": "low",
    "web_search_options": {},
    # of OpenAI's older endpoint
    "best_of": 2,
    "echo": True,
    "prompt": "hello",
    "suffix": "!",
    # vLLM, SGLang
    "add_generation_prompt": False,
    "allowed_token_ids": [7],
    "bad_words": ["no"],
    "cache_salt": "theirs",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "guided_json": {"type": "object"},
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "length_penalty": 2.0,
    "lora_path": "mine",
    "min_p": 0.1,
    "min_tokens": 1,
    "priority": 5,
    "prompt_logprobs": 1,
    "regex": "[a-z]+",
    "repetition_penalty": 1.1,
    "separate_reasoning": True,
    "skip_special_tokens": False,
    "stop_token_ids": [7],
    "structured_outputs": {"json": {}},
    "top_k": 5,
    "truncate_prompt_tokens": 10,
    "use_beam_search": True,
    # Ollama, llama.cpp, LM Studio, Anthropic
    "cache_prompt": True,
    "format": "json",
    "grammar": 'root ::= "yes"',
    "id_slot": 1,
    "keep_alive": "5m",
    "mirostat": 2,
    "num_ctx": 2048,
    "num_predict": 5,
    "options": {"num_ctx": 2048},
    "repeat_penalty": 1.1,
    "stop_sequences": ["."],
    "system": "be brief",
    "thinking": {"type": "enabled"},
    "top_a": 0.5,
    "typical_p": 0.5,
    # ours, and a slip of the pen
    "session_id": "E59",
    "tenant": "globex",
    "Temperature": 0.5,
    "max_token": 5,
}


# What some of them need beside them.
WITH: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}, "max_tokens": {"max_completion_tokens": None}}


def test_E59_the_list_is_of_everything_that_the_openai_client_can_send() -> None:
    for params in (chat_params.CompletionCreateParamsStreaming, plain_params.CompletionCreateParamsStreaming):
        assert set(params.__annotations__) <= set(USUAL)
    assert set(ChatRequest.model_fields) <= set(USUAL)


@pytest.mark.parametrize("name", sorted(USUAL))
def test_E59_every_parameter_is_taken_or_refused_by_its_name(fake_service: RunningService, name: str) -> None:
    plain = {"model": "quick", "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 4}
    taken = name in ChatRequest.model_fields
    for value in (USUAL[name], {"no such thing": ["at all"]}):
        body = plain | WITH.get(name, {}) | {name: value}
        response = httpx.post(f"{fake_service.url}/v1/chat/completions", json=body, headers=ACME, timeout=30)
        if taken and value is USUAL[name]:
            assert response.status_code == 200, response.text
            continue
        error = response.json()["error"]
        assert (response.status_code, error["param"].partition(".")[0]) == (400, name), error
        assert f"{name!r}" in error["message"] or taken
        assert taken or error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}]}, "cache_control"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]}, "function_call"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
    ],
)
def test_E59_every_field_inside_another_too(fake_service: RunningService, fields: dict[str, Any], param: str) -> None:
    body = {"model": "quick", "messages": [{"role": "user", "content": "x"}], **fields}
    response = httpx.post(f"{fake_service.url}/v1/chat/completions", json=body, headers=ACME, timeout=30)
    assert response.status_code == 400 and param in response.json()["error"]["param"], response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"max_tokens": 2, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_E59_what_contradicts_itself_is_refused(
    fake_service: RunningService, fields: dict[str, Any], param: str
) -> None:
    response = ask(fake_service, "quick", **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


@pytest.mark.parametrize("endpoint", ["completions", "embeddings", "messages"])
def test_E59_an_endpoint_that_is_not_there_takes_nothing(fake_service: RunningService, endpoint: str) -> None:
    """When /v1/completions is built, the list above is asked of it as well."""
    body = {"model": "quick", "prompt": "x", "best_of": 2}
    response = httpx.post(f"{fake_service.url}/v1/{endpoint}", json=body, headers=ACME, timeout=30)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_E59_what_is_taken_changes_the_answer(service: RunningService) -> None:
    """By a model that samples. ``user`` and ``metadata`` are the client's own notes, as with OpenAI."""

    def answer(**fields: Any) -> str:
        return said(ask(service, "tiny", "hello", **{"max_tokens": 24, "seed": 7, **fields}))

    greedy, drawn = answer(temperature=0), answer()
    assert greedy == answer(temperature=0, seed=8) and drawn == answer()
    assert len({greedy, drawn, answer(seed=8), answer(temperature=2), answer(max_tokens=23)}) == 5
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        assert answer(**narrow) == greedy
    for penalty in ({"repetition_penalty": 5}, {"presence_penalty": 2}, {"frequency_penalty": 2}):
        assert answer(temperature=0, **penalty) != greedy
    assert answer(temperature=0, max_tokens=None, max_completion_tokens=5) == answer(temperature=0, max_tokens=5)
    assert answer(temperature=0, stop=greedy[4:6]) == greedy.partition(greedy[4:6])[0]
    only = answer(temperature=0, logit_bias={"40": 100})
    assert len(set(only)) == 1
    ended = ask(service, "tiny", "hello", logit_bias={"1": 100}, max_tokens=24, min_tokens=9).json()
    assert ended["usage"]["completion_tokens"] == 10
    several = ask(service, "tiny", "hello", n=3, logprobs=True, top_logprobs=4, max_tokens=3).json()["choices"]
    assert len(several) == 3
    assert {len(token["top_logprobs"]) for one in several for token in one["logprobs"]["content"]} == {4}
