"""Owns what the OpenAI Python client does against a service: conversations, chains of responses, chat completions."""

from __future__ import annotations

from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam, Response, ResponseUsage

from tests.acceptance.sdk_talk import (
    CALL,
    FUNCTION,
    KEY,
    MOST_TOKENS,
    QUESTIONS,
    Check,
    Said,
    Talk,
    Target,
    expect,
    said_of,
    weather,
)

PARAMETERS: dict[str, object] = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False
}  # fmt: skip
TOOL: FunctionToolParam = {"type": "function", "name": FUNCTION, "parameters": PARAMETERS, "strict": True}
CHAT_TOOL: ChatCompletionToolParam = {"type": "function", "function": {"name": FUNCTION, "parameters": PARAMETERS}}


def connect(target: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=target.base_url, api_key=KEY)


def in_conversation(target: Target) -> str:
    """Turns of one conversation, every second one streamed."""
    talk = Talk(target)
    with connect(target) as client:
        conversation = client.conversations.create(metadata={"who": "ada"}).id
        for number, question in enumerate(QUESTIONS):
            response = _respond(client, target, number % 2 == 1, input=talk.ask(question), conversation=conversation)
            expect(response.conversation is not None and response.conversation.id == conversation, "its conversation")
            talk.heard(response.output_text, _usage(response).input_tokens)
        talk.held_against(listed(client, conversation), target.stored(conversation))
        expect(client.conversations.retrieve(conversation).metadata == {"who": "ada"}, "metadata are kept")
    return talk.growth


def in_chain(target: Target) -> str:
    """previous_response_id, every second one streamed; then on from the first response, which has one turn to know."""
    talk = Talk(target)
    with connect(target) as client:
        first = last = _respond(client, target, False, input=talk.ask(QUESTIONS[0]))
        talk.heard(last.output_text, _usage(last).input_tokens)
        branch = Talk(target, messages=list(talk.messages))
        for number, question in enumerate(QUESTIONS[1:]):
            last = _respond(client, target, number % 2 == 0, input=talk.ask(question), previous_response_id=last.id)
            talk.heard(last.output_text, _usage(last).input_tokens)
        kept = client.responses.retrieve(last.id)
        expect(kept.output == last.output and kept.usage == last.usage, f"{kept} is kept of {last}")
        brought = [said_of(item.model_dump()) for item in client.responses.input_items.list(last.id)]
        expect(brought == [("user", QUESTIONS[-1])], f"the last request brought {brought}")
        other = _respond(client, target, False, input=branch.ask(QUESTIONS[3]), previous_response_id=first.id)
        branch.heard(other.output_text, _usage(other).input_tokens)
    return f"{talk.growth}; from the first one on: {branch.prompts[-1]}"


def in_chat(target: Target) -> str:
    """Chat completions with the history passed back, every second one streamed."""
    talk = Talk(target)
    with connect(target) as client:
        for number, question in enumerate(QUESTIONS):
            talk.ask(question)
            asked: Any = {"model": target.model, "messages": list(talk.messages)}
            asked |= {"temperature": 0, "max_tokens": MOST_TOKENS}
            if number % 2:
                chunks = list(
                    client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
                )
                text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
                usage = chunks[-1].usage
            else:
                answer = client.chat.completions.create(**asked)
                text, usage = answer.choices[0].message.content or "", answer.usage
            talk.heard(text, usage.prompt_tokens if usage is not None else -1)
    return talk.growth


def call_in_conversation(target: Target) -> str:
    """A function call, its output and the answer, whole and then streamed, as items of one conversation."""
    talk = Talk(target)
    with connect(target) as client:
        conversation = client.conversations.create().id
        for stream in (False, True):
            asked: dict[str, Any] = {"conversation": conversation, "tools": [TOOL]}
            response = _respond(client, target, stream, input=talk.ask(CALL), **asked)
            (call,) = [item for item in response.output if item.type == "function_call"]
            talk.called(response.output_text, call.arguments, _usage(response).input_tokens)
            talk.tool_said(output := weather("Oslo"))
            given = {"type": "function_call_output", "call_id": call.call_id, "output": output}
            response = _respond(client, target, stream, input=[given], **asked)
            talk.heard(response.output_text, _usage(response).input_tokens)
        talk.held_against(listed(client, conversation), target.stored(conversation))
    return talk.growth


def call_in_chat(target: Target) -> str:
    """The same in chat completions, with the history passed back."""
    talk = Talk(target)
    with connect(target) as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": talk.ask(CALL)}]
        answer = client.chat.completions.create(model=target.model, messages=messages, tools=[CHAT_TOOL])
        said = answer.choices[0].message
        call = (said.tool_calls or [])[0]
        expect(call.type == "function" and answer.choices[0].finish_reason == "tool_calls", f"a call: {answer}")
        arguments = call.function.arguments if call.type == "function" else ""
        talk.called(said.content or "", arguments, answer.usage.prompt_tokens if answer.usage else -1)
        talk.tool_said(output := weather("Oslo"))
        passed: Any = said.model_dump(exclude_none=True)
        messages += [passed, {"role": "tool", "tool_call_id": call.id, "content": output}]
        answer = client.chat.completions.create(model=target.model, messages=messages, tools=[CHAT_TOOL])
        talk.heard(answer.choices[0].message.content or "", answer.usage.prompt_tokens if answer.usage else -1)
    return talk.growth


def listed(client: openai.OpenAI, conversation: str) -> list[Said]:
    """What the conversations API lists, in pages of two."""
    found = list(client.conversations.items.list(conversation, order="asc", limit=2))
    expect(len({item.id for item in found}) == len(found), "an item is listed twice")
    return [said_of(item.model_dump()) for item in found]


def _respond(client: openai.OpenAI, target: Target, stream: bool, **asked: Any) -> Response:
    """One response; a streamed one has to say in its pieces what it says at its end."""
    asked |= {"model": target.model, "temperature": 0, "max_output_tokens": MOST_TOKENS}
    if not stream:
        whole: Response = client.responses.create(**asked)
        return whole
    events = list(client.responses.create(**asked, stream=True))
    expect([event.sequence_number for event in events] == list(range(len(events))), "events are numbered")
    expect(events[-1].type == "response.completed", f"a stream ended with {events[-1]}")
    at_end: Response = events[-1].response
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(text == at_end.output_text, f"streamed {text!r}, at the end {at_end.output_text!r}")
    return at_end


def _usage(response: Response) -> ResponseUsage:
    expect(response.status == "completed", f"a response ended {response.status}: {response.incomplete_details}")
    if response.usage is None:
        raise AssertionError("a response has no usage")
    return response.usage


CHECKS = (
    Check("openai", "responses in a conversation, whole and streamed", in_conversation),
    Check("openai", "previous_response_id, whole and streamed, and a branch", in_chain),
    Check("openai", "chat completions, history passed back, whole and streamed", in_chat),
    Check("openai", "function calls in a conversation, whole and streamed", call_in_conversation, fake_only=True),
    Check("openai", "a function call in chat completions", call_in_chat, fake_only=True),
)
