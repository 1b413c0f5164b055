"""Owns the clients of the crash test: turns over three APIs, sent until acknowledged or given up, and what was seen.

A turn is acknowledged when its client has ``finish_reason`` and ``[DONE]``, ``response.completed`` or ``.incomplete``,
or the body of a 200. Whatever ends an attempt earlier means "not acknowledged": the client sends the same again under
the same Idempotency-Key, or, sometimes, gives up and goes on with its next turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import httpx

from tests.acceptance.client import say

KEY = "sk-demo-acme"
GIVE_UP_SHARE = 0.2  # of the turns whose first attempt came to nothing
ATTEMPT_SECONDS, TURN_SECONDS = 90.0, 240.0
PAUSE_SECONDS = (0.1, 0.6)  # before the same is sent again
RETRIED = (409, 429)  # of the 4xx: busy session, full queue
BROKEN = (httpx.TransportError, TimeoutError, ValueError, LookupError)


class Api(StrEnum):
    CHAT = "chat, X-Session-ID"
    CONVERSATION = "responses, conversation"
    CHAIN = "responses, previous_response_id"


class NotAcknowledged(Exception):
    """An attempt came to its end without an acknowledgement."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.final = final  # not worth retrying: the service says that the request itself is wrong


@dataclass
class Attempt:
    """One time that a turn was sent. ``ended``: "" while it is open."""

    turn: CrashTurn
    number: int
    sent: bool = False
    pieces: int = 0
    ended: str = ""


@dataclass
class CrashTurn:
    """One turn. ``expected``: what a fake answers; None: whatever a real model says."""

    talk: Talk
    number: int
    nonce: str
    prompt: str
    expected: str | None
    stream: bool
    places: tuple[str, ...]  # the sessions in which it can be
    previous: str = ""  # the response that it goes on from
    attempts: list[Attempt] = field(default_factory=list)
    acknowledged: bool = False
    gave_up: bool = False
    text: str = ""  # that was acknowledged
    response: str = ""  # its id, where there is one

    @property
    def key(self) -> str:
        return f"key-{self.nonce}"


@dataclass
class Talk:
    """Consecutive turns of one conversation."""

    name: str
    api: Api
    model: str
    kind: str  # fake | real
    session: str = ""  # of a chain: where its last acknowledged response lies
    turns: list[CrashTurn] = field(default_factory=list)

    @property
    def last_response(self) -> str:
        return next((turn.response for turn in reversed(self.turns) if turn.acknowledged), "")


class Watcher(Protocol):
    """Told of what happens to attempts, at once."""

    def sent(self, attempt: Attempt) -> None: ...

    async def piece(self, attempt: Attempt) -> None:
        """May raise NotAcknowledged: the client goes away."""


@dataclass(frozen=True)
class Questions:
    """What the clients of one phase ask of which model."""

    kind: str
    model: str
    max_tokens: int
    turns_of_talk: int
    ask: Callable[[str, random.Random], tuple[str, str | None]]  # nonce → prompt, the answer where it is known


class CrashClients:
    """Concurrent clients of one phase; each has a talk after the other."""

    def __init__(self, url: str, questions: Questions, watcher: Watcher, seed: int) -> None:
        self._url, self._questions, self._watcher = url, questions, watcher
        self._draw = random.Random(seed)
        self.talks: list[Talk] = []
        self.open: dict[int, Attempt] = {}
        self.acknowledged = 0
        self.problems: list[str] = []

    async def run(self, clients: int, over: Callable[[], bool]) -> None:
        # no kept connections: one that a killed process leaves behind would look like another kill
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, limits=limits) as self._http:
            await asyncio.gather(*(self._client(number, over) for number in range(clients)))

    async def _client(self, number: int, over: Callable[[], bool]) -> None:
        count = 0
        while not over():
            api = list(Api)[(number + count) % len(Api)]
            talk = Talk(f"{self._questions.kind}-c{number}-k{count}", api, self._questions.model, self._questions.kind)
            self.talks.append(talk)
            talk.session = await self._conversation() if api is Api.CONVERSATION else talk.name
            for at in range(self._questions.turns_of_talk):
                if over():
                    break
                await self._turn(self._next(talk, at))
            count += 1

    async def _conversation(self) -> str:
        """A new one. One that was made while its answer was lost stays empty."""
        until = time.monotonic() + TURN_SECONDS
        while True:
            try:
                headers = {"Authorization": f"Bearer {KEY}"}
                answer = await self._http.post(f"{self._url}/v1/conversations", json={}, headers=headers, timeout=30)
                return str(answer.raise_for_status().json()["id"])
            except (httpx.HTTPError, ValueError, LookupError):
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.3)

    # -- one turn ------------------------------------------------------------------------

    def _next(self, talk: Talk, at: int) -> CrashTurn:
        nonce = f"{talk.name}-t{at}."
        prompt, expected = self._questions.ask(nonce, self._draw)
        places: tuple[str, ...] = (talk.session,)
        previous = ""
        if talk.api is Api.CHAIN:
            # documented: a keyed response begins or forks its chain at this name, so that a retry finds it
            forked = hashlib.sha256(f"key-{nonce}".encode()).hexdigest()[:32]
            previous = talk.last_response
            places = (talk.session, forked) if previous else (forked,)
        turn = CrashTurn(talk, at, nonce, prompt, expected, self._draw.random() < 0.7, places, previous)
        talk.turns.append(turn)
        return turn

    async def _turn(self, turn: CrashTurn) -> None:
        """Send it until it is acknowledged or given up."""
        until = time.monotonic() + TURN_SECONDS
        patient = self._draw.random() >= GIVE_UP_SHARE
        while not turn.acknowledged:
            attempt = Attempt(turn, len(turn.attempts) + 1)
            turn.attempts.append(attempt)
            self.open[id(attempt)] = attempt
            try:
                async with asyncio.timeout(ATTEMPT_SECONDS):
                    await self._attempt(attempt)
                attempt.ended = "acknowledged"
                self._take(turn)
                return
            except (*BROKEN, NotAcknowledged) as error:
                attempt.ended = f"{type(error).__name__}: {error}"
                if isinstance(error, NotAcknowledged) and error.final:
                    self._problem(f"{turn.nonce} attempt {attempt.number}: {error}")
                    turn.gave_up = True
                elif time.monotonic() > until:
                    self._problem(f"{turn.nonce} was not acknowledged within {TURN_SECONDS:.0f} s: {error}")
                    turn.gave_up = True
            finally:
                del self.open[id(attempt)]
            if turn.gave_up or not patient:
                turn.gave_up = True
                return
            await asyncio.sleep(self._draw.uniform(*PAUSE_SECONDS))

    def _take(self, turn: CrashTurn) -> None:
        turn.acknowledged = True
        self.acknowledged += 1
        if turn.talk.api is Api.CHAIN:
            turn.talk.session = session_of(turn.response)
        if turn.expected is not None and turn.text != turn.expected:
            self._problem(f"{turn.nonce} was answered {turn.text!r}, not {turn.expected!r}")

    def _problem(self, what: str) -> None:
        say(f"  FAILED: {what}")
        self.problems.append(what)

    # -- one attempt ---------------------------------------------------------------------

    async def _attempt(self, attempt: Attempt) -> None:
        async def trace(event: str, info: dict[str, Any]) -> None:
            if event == "http11.send_request_body.complete":
                attempt.sent = True
                self._watcher.sent(attempt)

        path, body = _request(attempt.turn, self._questions.max_tokens)
        headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": attempt.turn.key}
        if attempt.turn.talk.api is Api.CHAT:
            headers["X-Session-ID"] = attempt.turn.talk.session
        url, extensions = f"{self._url}{path}", {"trace": trace}
        async with self._http.stream("POST", url, json=body, headers=headers, extensions=extensions) as answer:
            if answer.status_code != 200:
                said = (await answer.aread()).decode(errors="replace")
                final = answer.status_code < 500 and answer.status_code not in RETRIED
                raise NotAcknowledged(f"status {answer.status_code}: {said:.300}", final)
            if not attempt.turn.stream:
                _read_whole(attempt.turn, json.loads(await answer.aread()))
                return
            await self._read_stream(attempt, answer.aiter_lines())

    async def _read_stream(self, attempt: Attempt, lines: AsyncIterator[str]) -> None:
        turn, text, finished = attempt.turn, "", False
        async for line in lines:
            if line == "data: [DONE]" and finished:
                turn.text = text
                return
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise NotAcknowledged(f"error event: {event['error']}")
            if event.get("type") in ("response.completed", "response.incomplete"):
                _read_whole(turn, event["response"])
                return
            piece, ended = _piece(event)
            text, finished = text + piece, finished or ended
            if piece:
                attempt.pieces += 1
                await self._watcher.piece(attempt)
        raise NotAcknowledged(f"the stream ended after {attempt.pieces} pieces")


def session_of(response: str) -> str:
    """Where a response lies, by its id: ``resp_<session>_<turn>``, or ``resp_<turn>`` if that began the session."""
    return response.split("_")[1]


def _request(turn: CrashTurn, max_tokens: int) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": turn.talk.model, "stream": turn.stream, "temperature": 0}
    if turn.talk.api is Api.CHAT:
        said = {"messages": [{"role": "user", "content": turn.prompt}], "max_tokens": max_tokens}
        return "/v1/chat/completions", body | said
    body |= {"input": turn.prompt, "max_output_tokens": max_tokens, "truncation": "auto"}
    if turn.talk.api is Api.CONVERSATION:
        body["conversation"] = turn.talk.session
    elif turn.previous:
        body["previous_response_id"] = turn.previous
    return "/v1/responses", body


def _piece(event: dict[str, Any]) -> tuple[str, bool]:
    """(text, whether it names a finish_reason) of one event of a stream."""
    if event.get("type") == "response.output_text.delta":
        return event["delta"], False
    choices: Sequence[dict[str, Any]] = event.get("choices", ())
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, any(choice["finish_reason"] is not None for choice in choices)


def _read_whole(turn: CrashTurn, body: dict[str, Any]) -> None:
    """The text of a whole answer; LookupError if it is none."""
    if turn.talk.api is Api.CHAT:
        (choice,) = body["choices"]
        turn.text = choice["message"]["content"]
        return
    parts = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
    turn.text, turn.response = "".join(parts), body["id"]
