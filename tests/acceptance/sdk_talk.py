"""Owns what the client libraries are held against: a conversation as its client knows it, and what must come of it.

Three things nobody asks the code under test for: how many tokens a prompt of exactly these messages has, what the model
answers to exactly this prompt, and what lies in Redis. The fake model's answer is drawn from a hash of its prompt, so
that an equal answer means an equal prompt. The real one's is asked for once more, greedily, of a session-less request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine.fake import reply_to
from tests.acceptance.reader import Reader, oracle_tokens

TENANT, KEY = "acme", "sk-demo-acme"
MOST_TOKENS = 200  # of an answer: the Agents SDK raises for one that is cut off
QUESTIONS = ("My name is Ada. Say hello.", "What is my name?", "Name one colour.", "Which colour did you name?")
FUNCTION, CITY = "look_up", "Oslo"
ARGUMENTS = '{"city":"Oslo"}'  # as the service writes it
BEFORE_CALL = "Let me look. "
CALL = f'say {BEFORE_CALL}<tool_call>{{"name": "{FUNCTION}", "arguments": {{"city": "{CITY}"}}}}</tool_call>'
ROLES = {"system": ("", "\n\n"), "user": ("User: ", "\n"), "assistant": ("Assistant:", "\n"), "tool": ("Tool: ", "\n")}

Said = tuple[str, str]  # role or type of an item, its text


def weather(city: str) -> str:
    """What the function answers that the fake model calls."""
    return f"rain in {city}"


def expect(holds: bool, what: str) -> None:
    """An assertion that python -O leaves in."""
    if not holds:
        raise AssertionError(what)


@dataclass(frozen=True)
class Target:
    """A model of a running service."""

    url: str
    state_dir: Path
    model: str
    model_dir: Path | None = None  # None: the fake model

    @property
    def kind(self) -> str:
        return "fake" if self.model_dir is None else "real"

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def tokens(self, messages: Sequence[dict[str, str]]) -> int:
        """Of a prompt of these messages."""
        if self.model_dir is None:
            return len(plain(messages).encode())
        return oracle_tokens(self.model_dir, list(messages), "")

    def answer(self, messages: Sequence[dict[str, str]]) -> str:
        """To a prompt of these messages, at temperature 0."""
        if self.model_dir is None:
            return reply_to(plain(messages).encode(), 8).decode()
        body = {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": MOST_TOKENS}
        url, headers = f"{self.base_url}/chat/completions", {"Authorization": f"Bearer {KEY}"}
        found = httpx.post(url, json=body, headers=headers, timeout=120).raise_for_status().json()
        return str(found["choices"][0]["message"]["content"])

    def stored(self, conversation: str) -> list[Said]:
        """What lies in Redis, read past the service; a deleted item has left its place behind."""
        lying = Reader(self.state_dir).records(TENANT, conversation)
        return [said_of(one["item"]) for one in lying if not one.get("gone")]


@dataclass(frozen=True)
class Check:
    """One thing a client library does. ``run`` says what was seen; an exception is a failure."""

    client: str
    what: str
    run: Callable[[Target], str]
    fake_only: bool = False


@dataclass
class Talk:
    """A conversation as its client knows it."""

    target: Target
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)  # tokens of each prompt so far

    def __post_init__(self) -> None:
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    def ask(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        return text

    def heard(self, text: str, prompt_tokens: int) -> None:
        """An answer: AssertionError unless it is the one to all that was said before, and nothing else."""
        self._check_prompt(prompt_tokens)
        expected = self.target.answer(self.messages)
        expect(text == expected, f"answered {text!r}; to what was said before it is {expected!r}")
        self.messages.append({"role": "assistant", "content": text})

    def called(self, text: str, arguments: str, prompt_tokens: int, sent_back: str = ARGUMENTS) -> None:
        """The answer to CALL; ``sent_back``: how this client writes the arguments when it passes the call back."""
        self._check_prompt(prompt_tokens)
        expect(text == BEFORE_CALL, f"said {text!r} before the call, not {BEFORE_CALL!r}")
        expect(json.loads(arguments) == {"city": CITY}, f"called with {arguments}")
        self.messages.append({"role": "assistant", "content": text, "call": sent_back})

    def tool_said(self, text: str) -> None:
        expect(text == weather(CITY), f"the function said {text!r}")
        self.messages.append({"role": "tool", "content": text})

    def held_against(self, *found: Iterable[Said]) -> None:
        """AssertionError where a list of items is not what was said, once each, in its order."""
        for one in found:
            items = list(one)
            expect(items == self.items, f"{len(items)} items are stored: {items}; said were {self.items}")

    @property
    def items(self) -> list[Said]:
        """What must be stored; instructions are not."""
        out: list[Said] = []
        for message in self.messages:
            if message["role"] == "system":
                continue
            if message["role"] == "tool":
                out.append(("function_call_output", message["content"]))
                continue
            out.append((message["role"], message["content"]))
            out += [("function_call", message["call"])] if "call" in message else []
        return out

    @property
    def growth(self) -> str:
        return "prompt tokens " + " → ".join(map(str, self.prompts))

    def _check_prompt(self, tokens: int) -> None:
        expected = self.target.tokens(self.messages)
        expect(tokens == expected, f"a prompt of {tokens} tokens; what was said before has {expected}")
        self.prompts.append(tokens)


def plain(messages: Iterable[dict[str, str]]) -> str:
    """The prompt the fake model must see, written down a second time."""
    text = ""
    for message in messages:
        before, after = ROLES[message["role"]]
        text += before + message["content"] + after
        text += f"Call: {FUNCTION}({message['call']})\n" if "call" in message else ""
    return text + "Assistant:"


def said_of(item: dict[str, Any]) -> Said:
    """Of an item as the APIs show it."""
    if item["type"] == "function_call":
        return item["type"], item["arguments"]
    content = item["output"] if item["type"] == "function_call_output" else item["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return item["role"] if item["type"] == "message" else item["type"], text
