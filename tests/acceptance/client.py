"""Owns the client's side of the main job: turns sent with the openai client, and the log of what was acknowledged.

A turn is acknowledged when the chunk with ``finish_reason`` has arrived. Whatever ends an attempt earlier (an error
event, a dropped connection, a 5xx, a busy session) means "not acknowledged", and the same request is sent again under
the same Idempotency-Key.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

GIVE_UP_SECONDS = 180.0
RETRY_SECONDS = 0.5
STREAM_PIECES = 6  # of text: then a stream is well under way
RETRIED = (409, 429)  # of the 4xx: busy session, full queue


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class NotAcknowledged(Exception):
    """The stream ended without a finish_reason."""


@dataclass
class Turn:
    """One turn and what the client saw of it. Times are monotonic seconds."""

    number: int
    model: str
    nonce: str
    prompt: str
    max_tokens: int
    state_before: str = ""
    begun: float = 0.0
    begun_wall: float = 0.0
    first_token: float = 0.0  # of the first attempt that got one
    acknowledged: float = 0.0
    attempts: int = 0
    refusals: list[str] = field(default_factory=list)
    text: str = ""
    pieces: list[tuple[float, str]] = field(default_factory=list)  # of the last attempt: when, text
    answer_ids: set[str] = field(default_factory=set)  # of the last attempt: one stream has one
    usage: Any = None
    headers: dict[str, str] = field(default_factory=dict)  # of the attempt that got the first token

    @property
    def key(self) -> str:
        return f"key-{self.nonce}"

    @property
    def ttft_ms(self) -> float:
        return (self.first_token - self.begun) * 1000

    def timing_ms(self, name: str) -> float | None:
        """One entry of Server-Timing; None when the headers had left before the first token."""
        for part in self.headers.get("server-timing", "").split(", "):
            label, _, value = part.partition(";dur=")
            if label == name:
                return float(value)
        return None


def _worth_retrying(status: int) -> bool:
    return status >= 500 or status in RETRIED


class Conversation:
    """One session of one tenant."""

    def __init__(self, base_url: str, api_key: str, session_id: str) -> None:
        # no retries of the client's own: every attempt is to be seen
        self._openai = openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=150)
        self.session_id = session_id
        self.log: list[Turn] = []  # acknowledged, in order

    def messages_before(self, turn: Turn) -> list[dict[str, str]]:
        """The conversation up to this turn's question, as the client knows it."""
        messages = []
        for earlier in self.log:
            if earlier.number < turn.number:
                messages.append({"role": "user", "content": earlier.prompt})
                messages.append({"role": "assistant", "content": earlier.text})
        return [*messages, {"role": "user", "content": turn.prompt}]

    def take(self, turn: Turn, on_begun: Callable[[], None], on_stream: Callable[[], None]) -> None:
        """Send the turn until it is acknowledged. ``on_stream``: called once, when some text has come."""
        turn.begun, turn.begun_wall = time.monotonic(), time.time()
        on_begun()
        while True:
            turn.attempts += 1
            try:
                self._attempt(turn, on_stream)
                break
            except (openai.APIError, httpx.TransportError, NotAcknowledged) as error:
                if isinstance(error, openai.APIStatusError) and not _worth_retrying(error.status_code):
                    raise
                turn.refusals.append(f"{type(error).__name__}: {error}")
                say(f"  not acknowledged, attempt {turn.attempts}: {turn.refusals[-1][:160]}")
                if time.monotonic() - turn.begun > GIVE_UP_SECONDS:
                    raise
                time.sleep(RETRY_SECONDS)
        self.log.append(turn)

    def undisturbed(self, turn: Turn) -> tuple[str, int]:
        """(text, prompt tokens) of the same prompt, asked without a session and without faults."""
        answer = self._openai.chat.completions.create(
            model=turn.model, messages=self.messages_before(turn), max_tokens=turn.max_tokens, temperature=0
        )
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    def _attempt(self, turn: Turn, on_stream: Callable[[], None]) -> None:
        turn.pieces, turn.answer_ids, finished = [], set(), False
        raw = self._openai.chat.completions.with_raw_response.create(
            model=turn.model,
            messages=[{"role": "user", "content": turn.prompt}],
            max_tokens=turn.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Session-ID": self.session_id, "Idempotency-Key": turn.key},
        )
        if not turn.first_token:
            turn.headers = dict(raw.headers)
        try:
            with raw.parse() as chunks:
                for chunk in chunks:
                    turn.answer_ids.add(chunk.id)
                    turn.usage = chunk.usage or turn.usage
                    for choice in chunk.choices:
                        if choice.delta.content:
                            self._piece(turn, choice.delta.content, on_stream)
                        finished = finished or choice.finish_reason is not None
                        if finished and not turn.acknowledged:
                            turn.acknowledged = time.monotonic()
        except (openai.APIError, httpx.TransportError) as error:
            if not finished:
                raise
            say(f"  acknowledged, then: {error}")  # an error after the acknowledgement does not take it back
        if not finished:
            raise NotAcknowledged(f"the stream ended after {len(turn.pieces)} pieces without a finish_reason")
        turn.text = "".join(text for _, text in turn.pieces)

    def _piece(self, turn: Turn, text: str, on_stream: Callable[[], None]) -> None:
        turn.pieces.append((time.monotonic(), text))
        turn.first_token = turn.first_token or turn.pieces[0][0]
        if turn.attempts == 1 and len(turn.pieces) == STREAM_PIECES:
            on_stream()
