"""Owns ``chat``: a conversation in the terminal, across models, with what each answer cost."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import orjson
import typer

from orchestrator.cli.app import app
from orchestrator.cli.common import UrlOption, err, find_url, out, read_config
from policies.errors import ConfigError, NotReachable

HELP = "/model NAME switches model, /session [ID] shows or changes the session, /history, /quit"
ApiKeyOption = Annotated[
    str | None, typer.Option("--key", help="An API key; none: the demo's.", envvar="ORCHESTRATOR_API_KEY")
]


@dataclass(slots=True)
class Chat:
    """One conversation as the terminal knows it."""

    url: str
    key: str
    model: str
    session: str
    max_tokens: int | None
    temperature: float
    history: list[tuple[str, str]] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Send one message, print the answer as it comes, then one line of figures."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "temperature": self.temperature,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        headers = {"Authorization": f"Bearer {self.key}", "X-Session-ID": self.session}
        begin = time.monotonic()
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=600
            ) as response:
                self._print(response, text, begin)
        except httpx.HTTPError as error:
            raise NotReachable(f"the service at {self.url} does not answer: {error}") from error

    def _print(self, response: httpx.Response, text: str, begin: float) -> None:
        if response.is_error:
            response.read()
            err.print(f"[red]{response.json()['error']['message']}[/red]", highlight=False)
            return
        usage: dict[str, Any] = {}
        answer, timing, first, finished = "", "", None, False
        for event in _events(response):
            if "timing" in event:
                timing = event["timing"]
                continue
            if "error" in event:
                err.print(f"\n[red]{event['error']['message']}[/red]", highlight=False)
                return
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content", "")
                if piece and first is None:
                    first = time.monotonic()
                answer += piece
                finished = finished or choice["finish_reason"] is not None
                out.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
        out.print()
        if finished:
            self.history += [("you", text), (self.model, answer)]
            seconds = (first or begin) - begin
            self._print_figures(response.headers.get("x-context-truncated"), usage, seconds, timing)

    def _print_figures(self, cut: str | None, usage: dict[str, Any], first_seconds: float, timing: str) -> None:
        figures = [self.model, f"first token {first_seconds:.2f} s"]
        if timing:
            figures.append(timing.replace(";dur=", " ") + " ms")
        if usage:
            reused = usage["prompt_tokens_details"]["cached_tokens"]
            figures.append(f"{usage['prompt_tokens']} prompt ({reused} reused) + {usage['completion_tokens']} tokens")
        if cut:
            figures.append(f"cut: {cut}")
        out.print(f"[dim]{' · '.join(figures)}[/dim]", highlight=False)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith(": ") and "waiting" in line:
            err.print(f"[dim]{line[2:]}[/dim]", highlight=False)
        if line.startswith(": server-timing "):
            yield {"timing": line.removeprefix(": server-timing ")}
        if line.startswith("data: ") and line != "data: [DONE]":
            yield orjson.loads(line.removeprefix("data: "))


@app.command(epilog="Example: orchestrator chat smollm2-135m-instruct --session tour")
def chat(
    model: Annotated[str, typer.Argument(help="A model of the service.")],
    session: Annotated[str | None, typer.Option(help="Go on with this session; none: a new one.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy; small models babble at 1.")] = 0.3,
    url: UrlOption = None,
    key: ApiKeyOption = None,
) -> None:
    """Talk to a model; the history is kept by the service, also across models."""
    session = session or f"chat-{uuid.uuid4().hex[:8]}"
    talk = Chat(find_url(url), key or _demo_key(), model, session, max_tokens, temperature)
    err.print(f"[dim]session {talk.session}; {HELP}[/dim]", highlight=False)
    while True:
        try:
            line = out.input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line in ("/quit", "/exit"):
            return
        if line.startswith("/"):
            _command(talk, line)
        elif line:
            talk.say(line)


def _command(talk: Chat, line: str) -> None:
    verb, _, argument = line.partition(" ")
    argument = argument.strip()
    if verb == "/model" and argument:
        talk.model = argument
        out.print(f"[dim]now {argument}; the session goes on[/dim]", highlight=False)
    elif verb == "/session":
        talk.session = argument or talk.session
        out.print(f"[dim]session {talk.session}[/dim]", highlight=False)
    elif verb == "/history":
        for who, said in talk.history:
            out.print(f"{who}: {said}", highlight=False, markup=False)
    else:
        out.print(f"[dim]{HELP}[/dim]", highlight=False)


def _demo_key() -> str:
    demo = next((t.demo_key for t in read_config(None).tenants if t.demo_key and not t.admin), None)
    if demo is None:
        raise ConfigError("no API key: give --key or ORCHESTRATOR_API_KEY")
    return demo
