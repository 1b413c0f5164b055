"""What a body may say: the README's table against the code, bounds, and the answers' JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import response_create_params
from pydantic import BaseModel

from orchestrator.api import response_wire
from orchestrator.api.intake import most_calls, parse_object, validate
from orchestrator.api.wire import MOST_BIASES, UNSUPPORTED, ChatRequest
from orchestrator.config import ModelConfig
from policies.errors import BadRequest, UnsupportedField

SECTION = (Path(__file__).parents[2] / "README.md").read_text().split("## What a request may say")[1].split("\n## ")[0]
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the section's table whose first heading is this."""
    lines = SECTION.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def parsed(**fields: Any) -> ChatRequest:
    return validate(ChatRequest, parse_object(json.dumps(BODY | fields).encode()), UNSUPPORTED)


def test_the_readme_lists_exactly_the_fields_that_are_accepted() -> None:
    for heading, kind in (("field", ChatRequest), ("field of a response", response_wire.ResponseRequest)):
        rows = table(heading)
        assert sorted(cells[0].strip("`") for cells in rows) == sorted(kind.model_fields)
        assert all(len(cells) == 3 and all(cells) for cells in rows)


@pytest.mark.parametrize(
    ("heading", "refused", "kind"),
    [
        ("not supported", UNSUPPORTED, ChatRequest),
        ("not supported in responses", response_wire.UNSUPPORTED, response_wire.ResponseRequest),
    ],
)
def test_the_readme_lists_exactly_what_is_refused_and_what_switches_it_off(
    heading: str, refused: dict[str, tuple[Any, ...]], kind: type[BaseModel]
) -> None:
    listed = {}
    for names, values in table(heading):
        off = () if values == "left out" else tuple(json.loads(v) for v in re.findall(r"`([^`]+)`", values))
        listed |= dict.fromkeys(re.findall(r"`([^`]+)`", names), off)
    assert listed == refused
    assert not set(refused) & set(kind.model_fields)


def test_every_field_that_the_openai_client_can_send_with_a_response_is_known() -> None:
    known = set(response_wire.ResponseRequest.model_fields) | set(response_wire.UNSUPPORTED)
    assert set(response_create_params.ResponseCreateParamsStreaming.__annotations__) <= known


def test_real_models_do_not_call_functions_yet() -> None:
    model = ModelConfig(name="m", source="demo:smollm2-135m-instruct", memory=1)  # type: ignore[arg-type]
    assert not most_calls([], "auto", model, parallel=True)
    with pytest.raises(UnsupportedField, match="tools"):
        most_calls([{"type": "function"}], "auto", model, parallel=True)


def test_how_many_functions_may_be_called() -> None:
    model, tools = ModelConfig(name="m", source="fake", memory=1), [{"type": "function"}]  # type: ignore[arg-type]
    assert most_calls(tools, "auto", model, parallel=True) > 1 == most_calls(tools, "auto", model, parallel=False)
    assert most_calls(tools, "none", model, parallel=True) == 0
    with pytest.raises(UnsupportedField, match="tool_choice 'required'"):
        most_calls(tools, "required", model, parallel=True)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_an_unsupported_field_is_refused_by_name_and_taken_switched_off(name: str) -> None:
    for value in (*UNSUPPORTED[name], None):
        parsed(**{name: value})
    with pytest.raises(UnsupportedField) as raised:
        parsed(**{name: "surely not"})
    assert raised.value.param == name


@pytest.mark.parametrize("name", sorted(set(ChatRequest.model_fields) - {"model", "messages"}))
def test_null_is_as_if_left_out(name: str) -> None:
    assert parsed(**{name: None}) == parsed()


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("top_k", [-1, 0, 1, 10**6], [-2, 1.5, "many"]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1]),
        ("repetition_penalty", [0.01, 1, 10], [0, -1, 11]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1]),
        ("logit_bias", [{}, {"0": 100, "7": -100.0}], [{"a": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {"²": 1}, [1]]),
        ("logit_bias", [{"7": 0}], [{"1": True}, {"1": None}, {"": 1}, "7"]),
        ("min_tokens", [0, 5], [-1]),
        ("logprobs", [True, False], ["perhaps"]),
        ("n", [1, 8], [0, 9, 1.5]),
    ],
)  # fmt: skip
def test_bounds(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        parsed(**{field: value})
    for value in bad:
        with pytest.raises(BadRequest) as raised:
            parsed(**{field: value})
        assert raised.value.param == field, (value, raised.value.message)


def test_logit_bias_has_ints_and_a_bound() -> None:
    assert parsed(logit_bias={"5": 1, "07": -2.5}).logit_bias == {5: 1.0, 7: -2.5}
    parsed(logit_bias={str(i): 1 for i in range(MOST_BIASES)})
    with pytest.raises(BadRequest, match="at most 1024"):
        parsed(logit_bias={str(i): 1 for i in range(MOST_BIASES + 1)})


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_min_tokens_is_at_most_the_answers_limit(limit: str) -> None:
    assert parsed(min_tokens=5, **{limit: 5}).min_tokens == 5
    with pytest.raises(BadRequest, match=f"above {limit} 4") as raised:
        parsed(min_tokens=5, **{limit: 4})
    assert raised.value.param == "min_tokens"


def test_top_logprobs_needs_logprobs() -> None:
    assert parsed(logprobs=True).alternatives == 0
    assert parsed(logprobs=True, top_logprobs=20).alternatives == 20
    assert parsed().alternatives is None and parsed(logprobs=False, top_logprobs=0).alternatives is None
    for fields in ({"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(BadRequest) as raised:
            parsed(**fields)
        assert raised.value.param == "top_logprobs"


def test_stream_options_are_a_streams() -> None:
    options = parsed(stream=True, stream_options={"include_usage": True}).stream_options
    assert options is not None and options.include_usage
    for fields in ({}, {"stream": False}, {"stream": None}):
        for value in ({}, {"include_usage": False}):
            with pytest.raises(BadRequest, match="stream: true") as raised:
                parsed(stream_options=value, **fields)
            assert raised.value.param == "stream_options"


def test_two_limits_must_agree() -> None:
    assert parsed(max_tokens=4, max_completion_tokens=4).answer_limit == 4
    assert parsed(max_tokens=4, max_completion_tokens=None).answer_limit == 4
    with pytest.raises(BadRequest, match="max_completion_tokens 5") as raised:
        parsed(max_tokens=4, max_completion_tokens=5)
    assert raised.value.param == "max_tokens"
