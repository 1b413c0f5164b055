"""What the HTTP scenarios share: a request, a stream, and what can be read from them."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from tests.service import RunningService, wait_until

ACME = {"Authorization": "Bearer sk-demo-acme"}
GLOBEX = {"Authorization": "Bearer sk-demo-globex"}


def ask(service: RunningService, model: str, text: str = "hello", headers: Any = None, **fields: Any) -> httpx.Response:
    return ask_all(service, model, [{"role": "user", "content": text}], headers, **fields)


def ask_all(
    service: RunningService, model: str, messages: list[dict[str, Any]], headers: Any = None, **fields: Any
) -> httpx.Response:
    body = {"model": model, "messages": messages, **fields}
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, headers={**ACME, **(headers or {})}, timeout=60)


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def stream(service: RunningService, model: str, text: str = "hello", headers: Any = None, **fields: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True, **fields}
    return httpx.stream(
        "POST", f"{service.url}/v1/chat/completions", json=body, headers={**ACME, **(headers or {})}, timeout=60
    )


def listen(service: RunningService, begun: threading.Event, model: str, text: str, **fields: Any) -> list[Any]:
    """All events of one streamed answer; ``begun`` is set at the first."""
    with stream(service, model, text, **fields) as response:
        found = []
        for event in events(response):
            found.append(event)
            begun.set()
        return found


def text_of(found: list[Any]) -> str:
    deltas = [e["choices"][0]["delta"] for e in found if isinstance(e, dict) and e.get("choices")]
    return "".join(delta.get("content", "") for delta in deltas)


def said(response: httpx.Response) -> str:
    """The text of a whole answer."""
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def usage(response: httpx.Response) -> tuple[int, int]:
    """(prompt tokens, cached tokens) of a whole answer."""
    assert response.status_code == 200, response.text
    found = response.json()["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


def session() -> dict[str, str]:
    return {"X-Session-ID": f"s-{uuid.uuid4().hex}"}


def idle(service: RunningService, model: str) -> bool:
    stats = service.model(model)["stats"]
    return stats["running"] == stats["waiting"] == stats["kv_blocks_used"] == 0


@dataclass(frozen=True)
class Timed:
    """One answer and how long it took, seconds."""

    response: httpx.Response
    begun: float
    seconds: float

    @property
    def load_ms(self) -> float:
        """What Server-Timing says about waiting for the model."""
        return float(self.response.headers["server-timing"].partition("load;dur=")[2].partition(",")[0])


def timed(service: RunningService, model: str, text: str = "hello", headers: Any = None, **fields: Any) -> Timed:
    begun = time.monotonic()
    response = ask(service, model, text, headers, **fields)
    return Timed(response, begun, time.monotonic() - begun)


def bring_up(service: RunningService, *models: str) -> None:
    """Make these models READY and idle; they must fit together."""
    for model in models:
        assert ask(service, model, max_tokens=1).status_code == 200
    states = {model: service.model(model)["state"] for model in models}
    assert set(states.values()) == {"ready"}, states
    wait_until(lambda: all(idle(service, model) for model in models), 10, "nothing runs on them")
