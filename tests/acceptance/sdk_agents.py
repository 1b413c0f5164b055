"""Owns what the OpenAI Agents SDK does against a service: sessions, conversations, chains, function tools."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from agents import (
    Agent,
    ModelResponse,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from tests.acceptance.sdk_talk import (
    BEFORE_CALL,
    CALL,
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

INSTRUCTIONS = "You are brief."
LONG_TURNS = 13  # of two items: more than the 20 of a page
Work = Callable[[Target, openai.AsyncOpenAI], Awaitable[str]]


class Assistant:
    """An agent, and how often its function was called."""

    def __init__(self, target: Target, client: openai.AsyncOpenAI, *, tools: bool = False) -> None:
        self.calls = 0

        @function_tool
        def look_up(city: str) -> str:
            """The weather of a city."""
            self.calls += 1
            return weather(city)

        self._agent = Agent(
            name="assistant",
            instructions=INSTRUCTIONS,
            model=OpenAIResponsesModel(model=target.model, openai_client=client),
            model_settings=ModelSettings(temperature=0, max_tokens=MOST_TOKENS),
            tools=[look_up] if tools else [],
        )

    async def run(
        self, text: str, *, stream: bool = False, **where: Any
    ) -> tuple[str, list[ModelResponse], str | None]:
        """(final output, the model's responses, the id of the last one)"""
        if not stream:
            result = await Runner.run(self._agent, text, **where)
            return result.final_output, result.raw_responses, result.last_response_id
        streamed, pieces = Runner.run_streamed(self._agent, text, **where), ""
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                pieces += event.data.delta
        before = BEFORE_CALL * (len(streamed.raw_responses) - 1)
        expect(pieces == before + streamed.final_output, f"streamed {pieces!r}, at the end {streamed.final_output!r}")
        return streamed.final_output, streamed.raw_responses, streamed.last_response_id


async def in_session(target: Target, client: openai.AsyncOpenAI) -> str:
    """OpenAIConversationsSession: run, run_streamed, get_items, pop_item, clear_session."""
    session = OpenAIConversationsSession(openai_client=client)
    assistant, talk = Assistant(target, client), Talk(target, INSTRUCTIONS)
    for number, question in enumerate(QUESTIONS[:3]):
        await _turn(assistant, talk, question, stream=number == 2, session=session)
    talk.held_against(await _items(session), target.stored(session.session_id))
    expect(await _items(session, 2) == talk.items[-2:], "get_items(limit=2) has the last two")
    for _ in range(2):
        popped: Any = await session.pop_item()
        expect(said_of(popped) == talk.items[-1], f"popped {popped}")
        talk.messages.pop()
    talk.held_against(await _items(session), target.stored(session.session_id))
    await _turn(assistant, talk, QUESTIONS[1], session=session)  # the popped turn is forgotten
    talk.held_against(await _items(session), target.stored(session.session_id))
    cleared = session.session_id
    await session.clear_session()
    expect(target.stored(cleared) == [], "a cleared session is empty")
    fresh = Talk(target, INSTRUCTIONS)
    await _turn(assistant, fresh, QUESTIONS[1], session=session)
    fresh.held_against(await _items(session), target.stored(session.session_id))
    return f"{talk.growth} after two pops; cleared: {fresh.prompts[-1]}"


async def in_conversation(target: Target, client: openai.AsyncOpenAI) -> str:
    """conversation_id: the service keeps the history, the SDK sends what is new."""
    conversation = (await client.conversations.create()).id
    assistant, talk = Assistant(target, client), Talk(target, INSTRUCTIONS)
    for number, question in enumerate(QUESTIONS):
        await _turn(assistant, talk, question, stream=number % 2 == 1, conversation_id=conversation)
    session = OpenAIConversationsSession(conversation_id=conversation, openai_client=client)
    talk.held_against(await _items(session), target.stored(conversation))
    return talk.growth


async def in_chain(target: Target, client: openai.AsyncOpenAI) -> str:
    """previous_response_id."""
    assistant, talk, last = Assistant(target, client), Talk(target, INSTRUCTIONS), None
    for number, question in enumerate(QUESTIONS):
        last = await _turn(assistant, talk, question, stream=number % 2 == 1, previous_response_id=last)
    return talk.growth


async def long_session(target: Target, client: openai.AsyncOpenAI) -> str:
    """A history of more than one page."""
    session = OpenAIConversationsSession(openai_client=client)
    assistant, talk = Assistant(target, client), Talk(target, INSTRUCTIONS)
    for number in range(LONG_TURNS):
        await _turn(assistant, talk, f"this is question {number}", session=session)
    talk.held_against(await _items(session), target.stored(session.session_id))
    return f"{len(talk.items)} items, prompt tokens {talk.prompts[0]} … {talk.prompts[-1]}"


async def calls_in_session(target: Target, client: openai.AsyncOpenAI) -> str:
    """@function_tool, called in a run and in a streamed run; then a turn that has to know it all."""
    session = OpenAIConversationsSession(openai_client=client)
    talk = await _calls(target, client, session=session)
    talk.held_against(await _items(session), target.stored(session.session_id))
    return talk.growth


async def calls_in_conversation(target: Target, client: openai.AsyncOpenAI) -> str:
    """The same where the service keeps the history: the second request of a run has the function's output alone."""
    conversation = (await client.conversations.create()).id
    talk = await _calls(target, client, conversation_id=conversation)
    session = OpenAIConversationsSession(conversation_id=conversation, openai_client=client)
    talk.held_against(await _items(session), target.stored(conversation))
    return talk.growth


async def _calls(target: Target, client: openai.AsyncOpenAI, **where: Any) -> Talk:
    assistant, talk = Assistant(target, client, tools=True), Talk(target, INSTRUCTIONS)
    for stream in (False, True):
        text, (asked, answered), _ = await assistant.run(talk.ask(CALL), stream=stream, **where)
        said = [item.model_dump() for item in asked.output]
        before, call = (dict(said_of(item) for item in said).get(kind, "") for kind in ("assistant", "function_call"))
        talk.called(before, call, asked.usage.input_tokens)
        talk.tool_said(weather("Oslo"))
        talk.heard(text, answered.usage.input_tokens)
    await _turn(assistant, talk, QUESTIONS[0], **where)
    expect(assistant.calls == 2, f"the function was called {assistant.calls} times, not twice")
    return talk


async def _turn(assistant: Assistant, talk: Talk, question: str, **how: Any) -> str | None:
    text, (response,), last = await assistant.run(talk.ask(question), **how)
    talk.heard(text, response.usage.input_tokens)
    return last


async def _items(session: OpenAIConversationsSession, limit: int | None = None) -> list[Said]:
    found: list[Any] = list(await session.get_items(limit))
    expect(len({item["id"] for item in found}) == len(found), "an item is listed twice")
    return [said_of(item) for item in found]


def _alone(work: Work) -> Callable[[Target], str]:
    """With a client and an event loop of its own."""

    async def whole(target: Target) -> str:
        async with openai.AsyncOpenAI(base_url=target.base_url, api_key=KEY) as client:
            return await work(target, client)

    def run(target: Target) -> str:
        set_tracing_disabled(True)  # traces go to OpenAI
        return asyncio.run(whole(target))

    return run


NAME = "openai-agents"
CHECKS = (
    Check(NAME, "session: run, run_streamed, get_items, pop_item, clear_session", _alone(in_session)),
    Check(NAME, "conversation_id, run and run_streamed", _alone(in_conversation)),
    Check(NAME, "previous_response_id, run and run_streamed", _alone(in_chain)),
    Check(NAME, "session of more than one page", _alone(long_session), fake_only=True),
    Check(NAME, "function tool in a session, run and run_streamed", _alone(calls_in_session), fake_only=True),
    Check(NAME, "function tool with conversation_id, the same", _alone(calls_in_conversation), fake_only=True),
)
