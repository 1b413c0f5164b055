"""Who holds an engine's memory, over HTTP and as a user sees it, while generations run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.snapshot import EngineSnapshot
from orchestrator.contexts import parse
from policies.types import ContextState
from tests.scenarios.calls import ACME, ask, events, session, stream
from tests.service import ADMIN, RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}
LONG = 1500  # bytes of the slow model's whole answer, about; at 30 ms each it outlasts every test here


def get(service: RunningService, model: str | None = None, headers: Any = None) -> httpx.Response:
    params = {} if model is None else {"model": model}
    return httpx.get(f"{service.url}/admin/contexts", params=params, headers=headers or AS_ADMIN, timeout=30)


def snapshot_or_none(service: RunningService, model: str) -> EngineSnapshot | None:
    (host,) = parse(get(service, model).raise_for_status().json())
    return host.snapshot


def snapshot(service: RunningService, model: str) -> EngineSnapshot:
    found = snapshot_or_none(service, model)
    assert found is not None
    return found


def count(service: RunningService, state: ContextState) -> int:
    return snapshot(service, "slow").states.get(state, 0)


@contextlib.contextmanager
def generating(service: RunningService, name: str, headers: Any = None, **fields: Any) -> Iterator[None]:
    """A slow answer streams meanwhile; then its client goes away and all of it is gone."""
    begun, enough = threading.Event(), threading.Event()

    def listen() -> None:
        with stream(service, "slow", name, headers, **fields) as response:
            for _ in events(response):
                begun.set()
                if enough.is_set():
                    return

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        enough.set()
        thread.join(60)


@contextlib.contextmanager
def crowd(service: RunningService, requests: int) -> Iterator[None]:
    """So many slow answers stream meanwhile, or wait; then their clients go away."""
    enough = threading.Event()

    async def listen(client: httpx.AsyncClient, number: int) -> None:
        messages = [{"role": "user", "content": f"crowd {number}"}]
        body = {"model": "slow", "messages": messages, "stream": True, "max_tokens": LONG}
        async with client.stream("POST", f"{service.url}/v1/chat/completions", json=body, headers=ACME) as response:
            async for _ in response.aiter_raw():
                pass

    async def listen_all() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=requests)) as client:
            tasks = [asyncio.ensure_future(listen(client, number)) for number in range(requests)]
            await asyncio.to_thread(enough.wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(listen_all(),))
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join(60)


def cli(service: RunningService, *words: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "ORCHESTRATOR_URL": service.url, "ORCHESTRATOR_ADMIN_KEY": ADMIN, "COLUMNS": str(columns)
    }  # fmt: skip
    command = [sys.executable, "-m", "orchestrator.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_running_generation_is_seen_with_what_it_holds_and_then_how_it_ended(fake_service: RunningService) -> None:
    name = session()
    with generating(fake_service, "seen", name, max_tokens=LONG):
        seen = snapshot(fake_service, "slow")
        (one,) = (context for context in seen.contexts if context.session is not None)
        assert (one.state, one.tenant, one.tier) == ("running", "acme", "interactive")
        assert one.session is not None and one.session.endswith(name["X-Session-ID"])
        assert one.blocks_held * seen.limits.block_size >= one.computed_tokens > one.prompt_tokens
        assert one.memory_bytes == one.blocks_held * seen.block_bytes < one.estimated_memory_bytes
        assert sum(use == (one.context_id,) for use in seen.blocks) == one.blocks_held
        assert (seen.pool.total, seen.unfreed_blocks) == (len(seen.blocks), 0)
        shown = cli(fake_service, "contexts", "slow")
        assert shown.returncode == 0, shown.stderr
        words = ("host:slow:0 (ready): 1 running", "WAITS-FOR", one.session, f"of {one.max_token_limit}", ". free")
        for word in (*words, f"{one.context_id} a", f"a {one.context_id} {one.request_id}"):
            assert word in shown.stdout, shown.stdout
        drawn = [line for line in shown.stdout.splitlines() if len(line) > 20 and not line.strip("a.+~")]
        assert {len(line) for line in drawn[:-1]} == {100} and "a" in "".join(drawn)
        without = cli(fake_service, "contexts", "slow", "--no-map").stdout
        assert "host:slow:0" in without and ". free" not in without
    wait_until(lambda: not snapshot(fake_service, "slow").contexts, 20, "the generation is gone")
    last = snapshot(fake_service, "slow").ended[-1]
    assert (last.how, last.context_id, last.request_id) == ("cancelled", one.context_id, one.request_id)
    assert last.generated_tokens >= one.generated_tokens


def test_the_queue_is_seen_and_doctor_concludes_from_it(fake_service: RunningService) -> None:
    with crowd(fake_service, 40):
        wait_until(lambda: count(fake_service, ContextState.WAITING) == 24, 30, "24 of 40 wait")
        seen = snapshot(fake_service, "slow")
        assert (seen.states, seen.max_running) == ({"running": 16, "waiting": 24}, 16)
        waits = [context.wait for context in seen.contexts if context.wait is not None]
        assert [wait.position for wait in waits] == list(range(1, 25))
        assert (waits[0].reason, waits[0].said) == ("batch_full", "a place: 16 of 16 run")
        assert "1. a place: 16 of 16 run" in cli(fake_service, "contexts", columns=200).stdout
        said: list[str] = []

        def concluded() -> bool:
            said.append(cli(fake_service, "doctor").stdout)
            return "warn contexts: host:slow:0: 24 wait" in said[-1]

        wait_until(concluded, 30, "doctor says that 24 wait")
        assert "raise max_running (16)" in said[-1] and "ok   contexts" not in said[-1]
    wait_until(lambda: not snapshot(fake_service, "slow").contexts, 20, "all are gone")
    assert snapshot(fake_service, "slow").pool.held == 0


def test_all_live_hosts_are_shown_and_those_that_hang_are_listed(fake_service: RunningService) -> None:
    assert ask(fake_service, "small").status_code == 200
    pid = fake_service.model("small")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        hosts = {host.host: host for host in parse(get(fake_service).raise_for_status().json())}
        shown = cli(fake_service, "contexts", "small")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert hosts["host:small:0"].snapshot is None
    assert hosts["host:small:0"].error == "host:small:0 did not answer within 2 s"
    assert (shown.returncode, "did not answer within 2 s" in shown.stdout) == (0, True)
    for name in ("host:quick:0", "host:slow:0", "host:wide:0"):
        assert hosts[name].snapshot is not None
    assert not any(host.model == "broken" for host in hosts.values())
    (broken,) = parse(get(fake_service, "broken").raise_for_status().json())
    assert broken.snapshot is None and "holds nothing" in str(broken.error)


def test_a_loading_host_is_listed_at_once_with_that_fact(fake_service: RunningService) -> None:
    fake_service.operate("late", "unload")
    wait_until(lambda: fake_service.model("late")["state"] == "cold", 30, "late is cold")
    fake_service.operate("late", "load")  # takes two seconds

    def listed() -> bool:
        (host,) = parse(get(fake_service, "late").json())
        return host.error == "host:late:0 is loading: there is no engine to ask"

    wait_until(listed, 20, "late is listed as loading")
    wait_until(lambda: snapshot_or_none(fake_service, "late") is not None, 20, "late has a picture")


def test_a_sleeping_model_has_a_picture_too(fake_service: RunningService) -> None:
    assert ask(fake_service, "small").status_code == 200
    fake_service.operate("small", "sleep")
    wait_until(lambda: fake_service.model("small")["state"] == "sleeping", 30, "small sleeps")
    asleep = snapshot(fake_service, "small")
    assert (asleep.awake, asleep.contexts, asleep.host.used) == (False, (), 0)
    assert "host:small:0 (sleeping): no context" in cli(fake_service, "contexts", "small").stdout


def test_an_unknown_model_is_a_404_that_names_the_nearest(fake_service: RunningService) -> None:
    answer = get(fake_service, "slwo")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "did you mean 'slow'" in answer.json()["error"]["message"]
    asked = cli(fake_service, "contexts", "slwo")
    assert (asked.returncode, "did you mean 'slow'" in asked.stderr) == (1, True)
    assert get(fake_service, headers=ACME).status_code == 403


def test_json_is_the_whole_answer_and_watch_goes_on_until_interrupted(fake_service: RunningService) -> None:
    hosts = json.loads(cli(fake_service, "contexts", "quick", "--json").stdout)["hosts"]
    assert [host["host"] for host in hosts] == ["host:quick:0"] and parse({"hosts": hosts})
    environment = os.environ | {"ORCHESTRATOR_URL": fake_service.url, "ORCHESTRATOR_ADMIN_KEY": ADMIN}
    command = [sys.executable, "-m", "orchestrator.cli", "contexts", "quick", "--watch", "--no-map"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as watching:
        assert watching.stdout is not None
        seen = 0
        while seen < 2:
            seen += "host:quick:0" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 0
