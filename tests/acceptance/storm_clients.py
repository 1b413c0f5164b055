"""Owns the clients of the swap storm: what they ask, whether they leave, and what each request came to."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from tests.acceptance.client import Turn, say
from tests.acceptance.main_job import GEMMA, QUESTIONS, SMOL
from tests.service import RunningService

TINY = "tiny-llama"
MODELS = {SMOL: "real", GEMMA: "real", TINY: "random weights"}
TENANTS = ("acme", "initech", "globex")  # interactive, standard, batch
SESSION_SHARE, LEAVE_SHARE = 0.35, 0.1  # a few are answered before they leave
LEAVES_WITHIN_SECONDS = 0.8
PATIENCE_SECONDS = 150.0  # the service's deadline twice, as a host's death begins it anew, and some more
POLITE_SECONDS = 5.0  # the longest pause after a refusal that names one
Messages = list[dict[str, str]]
Said = tuple[str, str, int, int]  # text, finish_reason, tokens of prompt and answer


@dataclass(frozen=True)
class Size:
    """How large a storm is. ``kills``: what dies once so large a share of the requests has ended."""

    requests: int
    clients: int
    prompts: int  # known ones, of each model
    replays: int  # turns of sessions computed again, of each model
    kills: tuple[tuple[float, str], ...]


class Outcome(StrEnum):
    """What became of a request."""

    ANSWERED = "answered"  # 200, whole, one finish_reason, a usage that adds up
    REFUSED = "refused"  # one error envelope with a code: as the status, or as an event of the stream
    CANCELLED = "cancelled"  # its client went away first
    LOST = "lost"  # anything else


class Garbage(Exception):
    """What came is no answer and no error of ours."""


class Left(Exception):
    """The client goes away in the middle of a stream."""


@dataclass(frozen=True)
class Reference:
    """What a model says to a prompt when nothing disturbs it."""

    prompt: str
    max_tokens: int
    said: Said


@dataclass
class Call(Turn):
    """One request of the storm, and what its client saw."""

    tenant: str = ""
    session: str = ""
    stream: bool = False
    leaves_after: float | None = None  # seconds
    leaves_at_piece: int | None = None
    expected: Reference | None = None
    finished: list[str] = field(default_factory=list)  # every finish_reason
    dones: int = 0
    pause: float = 0.0  # that a refusal asked for, seconds
    outcome: Outcome | None = None
    seconds: float = 0.0  # from its begin to its end
    why: str = ""
    wrong: str = ""

    @property
    def said(self) -> Said:
        return self.text, self.finished[0], self.usage["prompt_tokens"], self.usage["completion_tokens"]

    def settle(self, outcome: Outcome, why: str = "") -> None:
        self.outcome, self.why, self.seconds = outcome, why, time.monotonic() - self.begun
        if outcome is Outcome.ANSWERED and self.expected is not None and self.said != self.expected.said:
            self.wrong = f"said {self.said}, undisturbed {self.expected.said}"
        if outcome is Outcome.LOST or self.wrong:
            say(f"  {outcome}: request {self.number} to {self.model}: {self.why or self.wrong}")


def plan(size: Size, references: dict[str, list[Reference]], seed: int) -> list[list[Call]]:
    """The calls of each client, in order. A client has one tenant and one session of it."""
    draw = random.Random(seed)
    clients: list[list[Call]] = [[] for _ in range(size.clients)]
    for number in range(size.requests):
        client, model = number % size.clients, draw.choice(list(MODELS))
        known = draw.choice(references[model])
        call = Call(number, model, "", known.prompt, known.max_tokens, tenant=TENANTS[client % len(TENANTS)])
        call.expected, call.stream = known, draw.random() < 0.5
        if draw.random() < SESSION_SHARE:
            call.expected, call.session = None, f"client-{client}"
            call.nonce = f"{call.session}.{number}."
            call.prompt = f"({call.nonce}) {draw.choice(QUESTIONS)}"
        if draw.random() < LEAVE_SHARE:
            if call.stream and draw.random() < 0.5:
                call.leaves_at_piece = draw.randint(1, 2)
            else:
                call.leaves_after = draw.uniform(0, LEAVES_WITHIN_SECONDS)
        clients[client].append(call)
    return clients


def judge(call: Call) -> tuple[Outcome, str]:
    """What an exchange was that came to its end without our leaving."""
    if call.refusals:
        if len(call.refusals) == 1 and not call.finished and not call.dones:
            return Outcome.REFUSED, call.refusals[0]
        return Outcome.LOST, f"errors {call.refusals}, and finish reasons {call.finished}"
    if (len(call.finished), call.dones) != (1, 1):
        return Outcome.LOST, f"finish reasons {call.finished}, {call.dones} times [DONE]"
    usage = call.usage or {}
    prompt, answer = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", -1)
    sane = 0 <= cached <= prompt > 0 < answer <= call.max_tokens and usage.get("total_tokens") == prompt + answer
    if not sane or (call.finished == ["length"] and answer != call.max_tokens):
        return Outcome.LOST, f"finished by {call.finished[0]} with usage {usage}"
    return Outcome.ANSWERED, ""


def code_of(body: Any) -> str:
    """The code of an error envelope; Garbage when it is none."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not all(isinstance(error.get(n), str) for n in ("message", "type", "code")):
        raise Garbage(f"no error envelope: {body!r:.200}")
    return str(error["code"])


class Clients:
    """Send calls, each over a connection of its own, and note what comes."""

    def __init__(self, service: RunningService) -> None:
        self._url = f"{service.url}/v1/chat/completions"
        # no kept connections: one that the server closes just then would look like a lost request
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, limits=limits)

    async def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            await self.take(call)
            await asyncio.sleep(min(call.pause, POLITE_SECONDS))

    async def take(self, call: Call) -> None:
        """Send one call, once, and settle it."""
        call.begun, call.begun_wall = time.monotonic(), time.time()
        leaves = call.leaves_after is not None
        try:
            async with asyncio.timeout(call.leaves_after if leaves else PATIENCE_SECONDS):
                await (self._streamed(call) if call.stream else self._whole(call))
            call.settle(*judge(call))
        except Left:
            call.settle(Outcome.CANCELLED)
        except TimeoutError:
            call.settle(Outcome.CANCELLED if leaves else Outcome.LOST, f"no end within {PATIENCE_SECONDS:.0f} s")
        except (httpx.HTTPError, Garbage, ValueError, LookupError, TypeError) as error:
            call.settle(Outcome.LOST, f"{type(error).__name__}: {error}")

    async def _whole(self, call: Call) -> None:
        response = await self._http.post(self._url, json=self._body(call), headers=self._headers(call))
        if self._refused(call, response):
            return
        body = response.json()
        (choice,) = body["choices"]
        call.text, call.usage = choice["message"]["content"], body["usage"]
        call.finished, call.dones, call.acknowledged = [choice["finish_reason"]], 1, time.monotonic()

    async def _streamed(self, call: Call) -> None:
        sent = self._http.stream("POST", self._url, json=self._body(call), headers=self._headers(call))
        async with sent as response:
            if response.status_code != 200:
                await response.aread()
            if self._refused(call, response):
                return
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    self._event(call, line.removeprefix("data: "))
                if call.leaves_at_piece is not None and len(call.pieces) >= call.leaves_at_piece:
                    raise Left
        call.text = "".join(text for _, text in call.pieces)

    def _event(self, call: Call, data: str) -> None:
        if data == "[DONE]":
            call.dones += 1
            return
        event = json.loads(data)
        if "error" in event:
            call.refusals.append(code_of(event))
            return
        call.usage = event["usage"] or call.usage
        for choice in event["choices"]:
            call.first_token = call.first_token or time.monotonic()
            if choice["delta"].get("content"):
                call.pieces.append((time.monotonic(), choice["delta"]["content"]))
            if choice["finish_reason"] is not None:
                call.finished.append(choice["finish_reason"])
                call.acknowledged = time.monotonic()

    def _refused(self, call: Call, response: httpx.Response) -> bool:
        if response.status_code == 200:
            return False
        call.refusals.append(code_of(response.json()))
        call.pause = float(response.headers.get("retry-after", 0))
        return True

    def _body(self, call: Call) -> dict[str, Any]:
        body = asking(call.model, [{"role": "user", "content": call.prompt}], call.max_tokens)
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if call.stream else {})

    def _headers(self, call: Call) -> dict[str, str]:
        session = {"X-Session-ID": call.session} if call.session else {}
        return {"Authorization": f"Bearer sk-demo-{call.tenant}", **session}


def asking(model: str, messages: Messages, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
