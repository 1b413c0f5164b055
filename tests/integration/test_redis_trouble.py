"""What clients of the whole service see of a Redis that is slow, full, read-only or gone. Nothing is lost by it."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
import yaml

from session_store.embedded import EmbeddedRedis
from tests.conftest_redis import Wire, require_server, wire_to
from tests.scenarios.calls import ACME, ask, events, said, stream, text_of
from tests.service import RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]
BREAKS = {
    "test_a_server_that_takes": ("orchestrator/gateway.py", "observe=self.metrics.store_seconds.observe,", ""),
    "test_a_server_that_fills": (
        "orchestrator/turn.py",
        "            committed = True\n            yield done",
        "            committed = True\n            yield done\n"
        "        except StoreUnavailable:\n            yield done",
    ),
}
BUCKET = "orchestrator_store_round_trip_seconds_bucket{"
CONFIG = Path(__file__).parents[1] / "data" / "redis_trouble.yaml"


class Line:
    """The service's line to Redis, in a thread of its own: ``wire.delay_seconds`` makes it slow."""

    def __init__(self, url: str) -> None:
        self.wire: Wire | None = None
        self._up, self._url = threading.Event(), url
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    async def _run(self) -> None:
        async with wire_to(self._url) as self.wire:
            self._up.set()
            await self._end.wait()

    def __enter__(self) -> Line:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    require_server()
    made = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def line(server: EmbeddedRedis) -> Iterator[Line]:
    with Line(server.url) as made:
        yield made


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, line: Line) -> Iterator[RunningService]:
    directory = tmp_path_factory.mktemp("trouble")
    config = yaml.safe_load(CONFIG.read_text())
    assert line.wire is not None
    config["redis"] = {"url": line.wire.url}
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    running = RunningService(file, directory / "state")
    try:
        running.start()
        yield running
    finally:
        running.stop()
        running.sweep()


def history(service: RunningService, name: str) -> list[str]:
    url = f"{service.url}/v1/conversations/{name}/items?order=asc&limit=100"
    found = httpx.get(url, headers=ACME, timeout=30).json()
    return [item["content"][0]["text"] for item in found["data"]]


def _slow_trips(service: RunningService) -> float:
    lines = httpx.get(f"{service.url}/metrics", timeout=30).text.splitlines()
    counted = {line.split('le="')[1].split('"')[0]: float(line.split()[-1]) for line in lines if BUCKET in line}
    return counted["+Inf"] - counted["1.0"]


def fresh() -> dict[str, str]:
    return {"X-Session-ID": uuid.uuid4().hex}


def refused(response: httpx.Response, words: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "store_unavailable"), error
    assert words in error["message"] and int(response.headers["retry-after"]) >= 1


def test_a_server_that_takes_two_seconds_a_command_makes_turns_slow_and_says_so(
    service: RunningService, line: Line
) -> None:
    headers = fresh()
    assert line.wire is not None
    line.wire.delay_seconds = 2.0
    try:
        begin = time.monotonic()
        answer = ask(service, "echo", "say slow", headers)
        assert said(answer) == "slow" and 4 < time.monotonic() - begin < 30
    finally:
        line.wire.delay_seconds = 0.0
    assert history(service, headers["X-Session-ID"]) == ["say slow", "slow"]
    wait_until(lambda: _slow_trips(service) >= 2, 10, "the metrics tell of round trips above a second")


def test_a_full_server_is_a_503_and_nothing_is_lost(service: RunningService, server: EmbeddedRedis) -> None:
    headers = fresh()
    assert said(ask(service, "echo", "say one", headers)) == "one"
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        try:
            refused(ask(service, "echo", "say two", headers), "is full")
            body = {"items": [{"role": "user", "content": "x"}]}
            refused(httpx.post(f"{service.url}/v1/conversations", json=body, headers=ACME, timeout=30), "is full")
            assert history(service, headers["X-Session-ID"]) == ["say one", "one"]
        finally:
            client.config_set("maxmemory", 0)
    assert said(ask(service, "echo", "say three", headers)) == "three"
    assert history(service, headers["X-Session-ID"]) == ["say one", "one", "say three", "three"]


def test_a_server_that_fills_up_during_a_turn_leaves_it_unacknowledged_and_the_retry_has_it_once(
    service: RunningService, server: EmbeddedRedis
) -> None:
    headers = fresh() | {"Idempotency-Key": uuid.uuid4().hex}
    with redis.Redis.from_url(server.url) as client:
        try:
            with stream(service, "echo", "say one two three", headers) as response:
                found = events(response)
                heard: list[Any] = [next(found)]
                client.config_set("maxmemory", 1)
                heard += list(found)
        finally:
            client.config_set("maxmemory", 0)
    assert heard[-1]["error"]["code"] == "store_unavailable" and "[DONE]" not in heard
    assert said(ask(service, "echo", "say one two three", headers)) == "one two three"
    assert history(service, headers["X-Session-ID"]) == ["say one two three", "one two three"]


def test_a_read_only_server_is_a_503_until_it_is_a_primary_again(
    service: RunningService, server: EmbeddedRedis
) -> None:
    headers = fresh()
    assert said(ask(service, "echo", "say one", headers)) == "one"
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", 1)  # type: ignore[no-untyped-call]
        try:
            refused(ask(service, "echo", "say two", headers), "read-only replica")
        finally:
            client.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]
    assert said(ask(service, "echo", "say two", headers)) == "two"


def test_a_server_that_dies_during_a_turn_and_is_back_within_its_lease_costs_nothing(
    service: RunningService, server: EmbeddedRedis
) -> None:
    headers = fresh()
    long = "say " + " ".join(f"w{n}" for n in range(20))
    with ThreadPoolExecutor(1) as pool:
        with stream(service, "echo", long, headers) as response:
            found = events(response)
            heard = [next(found)]
            assert server.pid is not None
            killed = psutil.Process(server.pid)
            killed.kill()
            killed.wait(5)
            refused(ask(service, "echo", "say other", fresh()), "cannot be reached")
            back = pool.submit(server.start)
            heard += list(found)
        back.result()
    assert heard[-1] == "[DONE]" and text_of(heard) == long.removeprefix("say ")
    wait_until(lambda: ask(service, "echo", "say next", headers).status_code == 200, 10, "the session goes on")
    assert history(service, headers["X-Session-ID"]) == [long, long.removeprefix("say "), "say next", "next"]
