"""Owns what LangChain's ChatOpenAI does against a service, through Responses and through chat completions."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.acceptance.sdk_talk import (
    ARGUMENTS,
    CALL,
    KEY,
    MOST_TOKENS,
    QUESTIONS,
    Check,
    Talk,
    Target,
    expect,
    said_of,
    weather,
)

SYSTEM = "You are brief."


@tool
def look_up(city: str) -> str:
    """The weather of a city."""
    return weather(city)


def connect(target: Target, **options: Any) -> ChatOpenAI:
    asked: dict[str, Any] = {"model": target.model, "temperature": 0, "max_tokens": MOST_TOKENS, "stream_usage": True}
    return ChatOpenAI(base_url=target.base_url, api_key=KEY, **asked, **options)


def with_history(target: Target, *, responses: bool) -> str:
    """The messages are passed back, every second answer streamed."""
    model, talk = connect(target, use_responses_api=responses), Talk(target, SYSTEM)
    history: list[BaseMessage] = [SystemMessage(SYSTEM)]
    for number, question in enumerate(QUESTIONS):
        history.append(HumanMessage(talk.ask(question)))
        history.append(answer := _ask(model, history, stream=number % 2 == 1))
        talk.heard(answer.text, _prompt_tokens(answer))
    return talk.growth


def in_chain(target: Target) -> str:
    """previous_response_id as an argument, and found by LangChain itself in the messages."""
    model, talk, last = connect(target, use_responses_api=True), Talk(target), None
    for number, question in enumerate(QUESTIONS):
        known: dict[str, Any] = {} if last is None else {"previous_response_id": last.response_metadata["id"]}
        last = _ask(model, [HumanMessage(talk.ask(question))], stream=number % 2 == 1, **known)
        talk.heard(last.text, _prompt_tokens(last))
    finder, found = connect(target, use_responses_api=True, use_previous_response_id=True), Talk(target)
    history: list[BaseMessage] = []
    for question in QUESTIONS[:2]:
        history.append(HumanMessage(found.ask(question)))
        history.append(answer := _ask(finder, history, stream=False))
        found.heard(answer.text, _prompt_tokens(answer))
    return f"{talk.growth}; found by itself: {found.prompts[-1]}"


def in_conversation(target: Target) -> str:
    """``conversation`` as an argument: the service keeps the history."""
    headers = {"Authorization": f"Bearer {KEY}"}
    made = httpx.post(f"{target.base_url}/conversations", json={}, headers=headers, timeout=30).raise_for_status()
    conversation = made.json()["id"]
    model, talk = connect(target, use_responses_api=True), Talk(target)
    for number, question in enumerate(QUESTIONS):
        answer = _ask(model, [HumanMessage(talk.ask(question))], stream=number % 2 == 1, conversation=conversation)
        talk.heard(answer.text, _prompt_tokens(answer))
    url = f"{target.base_url}/conversations/{conversation}/items?order=asc"
    listed = httpx.get(url, headers=headers, timeout=30).raise_for_status().json()["data"]
    talk.held_against([said_of(item) for item in listed], target.stored(conversation))
    return talk.growth


def with_tools(target: Target, *, responses: bool) -> str:
    """bind_tools: a call, the function's output and the answer, whole and then streamed, in one history."""
    model, talk = connect(target, use_responses_api=responses).bind_tools([look_up]), Talk(target)
    # chat completions: LangChain parses the arguments and writes them anew
    sent_back = ARGUMENTS if responses else json.dumps(json.loads(ARGUMENTS))
    history: list[BaseMessage] = []
    for stream in (False, True):
        history.append(HumanMessage(talk.ask(CALL)))
        history.append(asked := _ask(model, history, stream=stream))
        (call,) = asked.tool_calls
        talk.called(asked.text, json.dumps(call["args"]), _prompt_tokens(asked), sent_back)
        history.append(output := look_up.invoke(call))
        talk.tool_said(output.text)
        history.append(answer := _ask(model, history, stream=stream))
        talk.heard(answer.text, _prompt_tokens(answer))
    return talk.growth


def _ask(model: Runnable[Any, AIMessage], messages: list[BaseMessage], *, stream: bool, **known: Any) -> AIMessage:
    if not stream:
        return model.invoke(messages, **known)
    first, *rest = model.stream(messages, **known)
    whole: Any = first
    for chunk in rest:
        whole = whole + chunk
    expect(len(rest) > 1, "the stream came in one piece")
    answer: AIMessage = whole
    return answer


def _prompt_tokens(answer: AIMessage) -> int:
    if answer.usage_metadata is None:
        raise AssertionError("an answer has no usage")
    return answer.usage_metadata["input_tokens"]


NAME = "langchain-openai"
BY_RESPONSES, BY_CHAT = partial(with_history, responses=True), partial(with_history, responses=False)
TOOLS_BY_RESPONSES, TOOLS_BY_CHAT = partial(with_tools, responses=True), partial(with_tools, responses=False)
CHECKS = (
    Check(NAME, "responses: history passed back, invoke and stream", BY_RESPONSES),
    Check(NAME, "responses: previous_response_id, given and found by LangChain", in_chain),
    Check(NAME, "responses: in a conversation, invoke and stream", in_conversation),
    Check(NAME, "chat completions: history passed back, invoke and stream", BY_CHAT),
    Check(NAME, "responses: bind_tools, invoke and stream", TOOLS_BY_RESPONSES, fake_only=True),
    Check(NAME, "chat completions: bind_tools, invoke and stream", TOOLS_BY_CHAT, fake_only=True),
)
