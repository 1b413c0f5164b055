"""Switching between models through HTTP: in the background, within a request's patience, with news for who waits."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import yaml

from tests.scenarios.calls import ACME, GLOBEX, ask, bring_up, stream, timed
from tests.service import RunningService, wait_until

pytestmark = pytest.mark.service

BREAKS = {
    "test_while_a_cold_model_loads": (
        "orchestrator/serve.py",
        "background=config.pool.background_load",
        "background=False",
    ),
    "test_who_waits_is_told": ("orchestrator/waiting.py", "progress.state = said(model, wait)", "pass"),
    "test_a_request_too_hasty": (
        "orchestrator/gateway.py",
        "config.deadline_seconds",
        "lambda _: config.http.deadline_seconds",
    ),
    "test_a_crowd_that_leaves": (
        "orchestrator/generation.py",
        "leaving.callback(self._abandon, ticket)",
        "pass",
    ),
    "test_a_load_that_fails_after": (
        "orchestrator/api/delivery.py",
        "yield self.failure(error)",
        'yield b"data: "',
    ),
}
LOAD_SECONDS = 2.0
HASTY_SECONDS = 1.0
HALF = {"source": "fake", "memory": "400MiB"}
FAKE = {"weight_bytes": "250MiB", "kv_bytes": "100MiB", "residual_bytes": "32MiB"}
CONFIG = {
    "http": {"deadline_seconds": 20, "stream_hold_seconds": 0.5},
    "tiers": {"batch": {"deadline_seconds": HASTY_SECONDS}},
    "pool": {"min_resident_seconds": 0, "cooldown_seconds": 1},
    "devices": [{"name": "cpu0", "memory": "600MiB"}],  # room for one, and sleeping processes
    "models": [
        {"name": "here", "preload": True, **HALF, "fake": FAKE},
        {"name": "there", **HALF, "fake": {**FAKE, "load_seconds": LOAD_SECONDS, "wake_seconds": 0.1}},
        {"name": "broken", **HALF, "fake": {**FAKE, "load_seconds": LOAD_SECONDS, "load_error": "weights are cut"}},
    ],
    "tenants": [
        {"name": "acme", "tier": "interactive", "demo_key": "sk-demo-acme"},
        {"name": "globex", "tier": "batch", "demo_key": "sk-demo-globex"},
        {"name": "operator", "demo_key": "sk-demo-admin", "admin": True},
    ],
}


@pytest.fixture(scope="module")
def swapping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    directory = tmp_path_factory.mktemp("swaps")
    (directory / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    service = RunningService(directory / "config.yaml", directory / "state")
    service.start()
    yield service
    service.stop()


@pytest.fixture
def service(swapping: RunningService) -> RunningService:
    """``here`` is ready, and ``there`` is cold."""
    swapping.operate("there", "unload")
    wait_until(lambda: swapping.model("there")["state"] == "cold", 20, "there is cold")
    bring_up(swapping, "here")
    return swapping


def test_while_a_cold_model_loads_the_one_it_will_replace_answers_as_ever(service: RunningService) -> None:
    since = time.time()
    with ThreadPoolExecutor(1) as pool:
        swap = pool.submit(timed, service, "there")
        wait_until(lambda: service.model("there")["state"] == "loading", 10, "there loads")
        meanwhile = [timed(service, "here", f"while it loads {n}", max_tokens=4) for n in range(10)]
        assert service.model("there")["state"] == "loading", "the load was over too soon: this shows nothing"
        assert swap.result().response.status_code == 200
    assert {answer.response.status_code for answer in meanwhile} == {200}
    assert max(answer.load_ms for answer in meanwhile) == 0
    assert service.transitions("there", since) == [
        ("cold", "loading"), ("loading", "sleeping"), ("sleeping", "waking"), ("waking", "ready"),
    ]  # fmt: skip
    assert service.model("here")["state"] == "sleeping"


def test_who_waits_is_told_the_state_the_place_in_line_and_the_time_it_took_before(service: RunningService) -> None:
    assert ask(service, "there").status_code == 200  # now it is known how long a load takes
    service.operate("there", "unload")
    wait_until(lambda: service.model("there")["state"] == "cold", 20, "there is cold")
    with stream(service, "there") as response:
        lines = list(response.iter_lines())
    news = [line for line in lines if line.startswith(": waiting for there")]
    assert any("which is loading; 1 of 1 in line; ready in about" in line for line in news), news
    assert lines[-2] == "data: [DONE]"


def test_a_request_too_hasty_for_a_swap_is_refused_at_once_and_a_retry_finds_the_model(service: RunningService) -> None:
    assert ask(service, "there").status_code == 200
    service.operate("there", "unload")
    wait_until(lambda: service.model("there")["state"] == "cold", 20, "there is cold")
    refused = timed(service, "there", headers=GLOBEX)
    error = refused.response.json()["error"]
    assert (refused.response.status_code, error["code"]) == (503, "swap_budget_exceeded")
    assert "s until it is ready, as the last time" in error["message"] and "It is being made ready" in error["message"]
    assert refused.seconds < HASTY_SECONDS
    assert LOAD_SECONDS <= int(refused.response.headers["retry-after"]) <= 10 * LOAD_SECONDS
    wait_until(lambda: service.model("there")["state"] == "ready", 20, "it came up although nobody waited")
    assert timed(service, "there", headers=GLOBEX).response.status_code == 200


def test_a_crowd_that_leaves_while_it_waits_holds_up_no_sleep(service: RunningService) -> None:
    draw = random.Random(3)

    async def crowd() -> list[int | None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            return await asyncio.gather(*(one(client, draw.uniform(0.02, 1.5 * LOAD_SECONDS)) for _ in range(40)))

    async def one(client: httpx.AsyncClient, patience: float) -> int | None:
        body = {"model": "there", "messages": [{"role": "user", "content": "x"}], "stream": draw.random() < 0.5}
        try:
            async with asyncio.timeout(patience):
                return (await client.post(f"{service.url}/v1/chat/completions", json=body, headers=ACME)).status_code
        except TimeoutError:
            return None

    for _ in range(2):
        statuses = asyncio.run(crowd())
        assert statuses.count(None) > 5 and set(statuses) <= {200, None}
        wait_until(lambda: service.model("there")["state"] == "ready", 20, "there is ready")
        service.operate("there", "sleep")
        wait_until(lambda: service.model("there")["state"] == "sleeping", 5, "no ticket is waited for (10 s)")
        service.operate("there", "unload")
        wait_until(lambda: service.model("there")["state"] == "cold", 20, "there is cold")


def test_a_load_that_fails_after_the_headers_is_an_error_event_and_nothing_like_success(
    service: RunningService,
) -> None:
    wait_until(lambda: service.model("broken")["state"] in ("cold", "failed"), 20, "no load of it runs")
    wait_until(lambda: service.model("broken")["cooldown_until"] < time.time(), 20, "its cooldown is over")
    with stream(service, "broken") as response:
        assert response.status_code == 200, "the headers left before it failed"
        lines = [line for line in response.iter_lines() if line]
    comments = list(itertools.takewhile(lambda line: line.startswith(":"), lines))
    (last,) = lines[len(comments) :]
    assert '"code":"load_failed"' in last and "weights are cut" in last
    assert service.model("here")["state"] == "ready", "it gave nothing up for a load that failed"
