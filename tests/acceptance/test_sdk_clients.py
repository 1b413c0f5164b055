"""The client libraries in the quick form, and that what holds them against the truth would see a lie."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.sdk_clients import CHECKS, run_check
from tests.acceptance.sdk_talk import ARGUMENTS, BEFORE_CALL, CALL, Check, Talk, Target, plain, weather

ROOT = Path(__file__).parents[2]
BREAKS = {  # a client that adds up a call's arguments from the stream's events has them twice then
    "test_three_client": ("orchestrator/api/response_bodies.py", '{**item, "arguments": "", ', "{**item, "),
    "test_a_lost_a_doubled": ("tests/acceptance/sdk_talk.py", "expect(items == self.items,", "expect(bool(items),"),
    "test_another_history": ("tests/acceptance/sdk_talk.py", "expect(text == expected,", "expect(bool(text),"),
}
NOWHERE = Target("http://127.0.0.1:1", Path("/nonexistent"), "scripted")


@pytest.mark.service
@pytest.mark.timeout(300)
def test_three_client_stacks_hold_conversations() -> None:
    command = [sys.executable, "-m", "tests.acceptance.sdk_clients", "--quick"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == f"{len(CHECKS)} of {len(CHECKS)} checks held"
    for shown in ("openai", "openai-agents", "langchain-openai", "scripted (fake)"):
        assert shown in ended.stdout


def heard(talk: Talk, question: str) -> None:
    """A turn as it should be."""
    talk.ask(question)
    talk.heard(NOWHERE.answer(talk.messages), NOWHERE.tokens(talk.messages))


@pytest.fixture
def talk() -> Talk:
    """A conversation of one turn."""
    made = Talk(NOWHERE, "You are brief.")
    heard(made, "hello")
    return made


def test_a_whole_conversation_is_accepted(talk: Talk) -> None:
    talk.ask(CALL)
    talk.called(BEFORE_CALL, '{"city": "Oslo"}', NOWHERE.tokens(talk.messages))
    talk.tool_said(weather("Oslo"))
    talk.heard(NOWHERE.answer(talk.messages), NOWHERE.tokens(talk.messages))
    kinds = ["user", "assistant", "user", "assistant", "function_call", "function_call_output", "assistant"]
    assert [kind for kind, _ in talk.items] == kinds and talk.items[4][1] == ARGUMENTS
    talk.held_against(talk.items)


def test_a_forgotten_and_a_doubled_turn_are_seen_in_the_prompt(talk: Talk) -> None:
    talk.ask("and now?")
    right = NOWHERE.answer(talk.messages)
    for messages in (talk.messages[:1] + talk.messages[3:], talk.messages[:3] + talk.messages[1:]):
        with pytest.raises(AssertionError, match="a prompt of"):
            talk.heard(right, NOWHERE.tokens(messages))


def test_another_history_of_the_same_length_is_seen_in_the_answer(talk: Talk) -> None:
    talk.ask("and now?")
    other = [dict(message) for message in talk.messages]
    other[1]["content"] = "hallo"
    assert NOWHERE.tokens(other) == NOWHERE.tokens(talk.messages)
    with pytest.raises(AssertionError, match="to what was said before"):
        talk.heard(NOWHERE.answer(other), NOWHERE.tokens(talk.messages))


def test_a_lost_a_doubled_and_a_moved_item_are_seen(talk: Talk) -> None:
    items = talk.items
    for stored in (items[:1], [*items, items[1]], items[::-1]):
        with pytest.raises(AssertionError, match="are stored"):
            talk.held_against(items, stored)


def test_the_fakes_prompt() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}]
    assert plain(messages) == "S\n\nUser: u\nAssistant:"
    called = [{"role": "assistant", "content": "a", "call": "{}"}, {"role": "tool", "content": "t"}]
    assert plain(called) == "Assistant:a\nCall: look_up({})\nTool: t\nAssistant:"


def test_what_a_client_raises_fails_its_check_alone() -> None:
    def broken(target: Target) -> str:
        raise ValueError(target.model)

    row = run_check(Check("openai", "nothing", broken), NOWHERE)
    assert row.failed and row.seen == "ValueError: scripted"
