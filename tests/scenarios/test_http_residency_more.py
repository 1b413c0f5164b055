"""More residency of the scenario bank through HTTP: sleep under load, many cycles, pins, what is stuck or changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.scenarios.calls import ask, bring_up, listen, said, text_of, timed
from tests.scenarios.conftest import CONFIG, TEMPLATES
from tests.service import ADMIN, RunningService, kill_hard, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]

BREAKS = {
    "test_R08": ("model_pool/pool.py", "if waited >= limit:", "if False:"),
    "test_R11": (
        "model_pool/lifecycle.py",
        "self._effects.drain(slot.ref, self",
        "self._effects.sleep(slot.ref); (slot.ref, self",
    ),
    "test_R23": (
        "model_pool/host.py",
        "self._residual_bytes = self._measure()\n        self._stats = await",
        'self.__dict__.setdefault("left", []).append(b"x" * 2**20)\n        self._stats = await',
    ),
    "test_R31": (
        "orchestrator/controller.py",
        "            ray.kill(actor)\n            if not await until_dead(actor, picture):\n",
        "            if False:\n",
    ),
    "test_R28": ("orchestrator/processes.py", "return await until_gone(picture)", "return True"),
    "test_R40": ("orchestrator/gateway.py", "if await self._picture() is None:", "if False:"),
    "test_R44": (
        "orchestrator/controller.py",
        "self._pool.on_quarantined(ref, answer, time.time())",
        "self._pool.on_wake_failed(ref, answer, time.time())",
    ),
    "test_R47": (
        "policies/residency.py",
        "if host.model not in spared and not host.pinned]",
        "if host.model not in spared]",
    ),
}
LOAD_LIMIT_SECONDS = 3.0
SLACK_BYTES = 12 * 2**20  # what a process may grow by between two looks
FIRST_ROUNDS, SLEEPS, LOADS = 5, 40, 6


@pytest.fixture
def fakes(scarce_service: RunningService) -> RunningService:
    """The real models of other tests keep hundreds of MiB, asleep too: nothing here would fit beside them."""
    _put_away(scarce_service, *TEMPLATES)
    return scarce_service


@pytest.fixture(scope="module")
def own_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service whose parts are stopped and killed here; a load of its model ``late`` has three seconds."""
    directory = tmp_path_factory.mktemp("own")
    config = yaml.safe_load(CONFIG.read_text())
    small = {"source": "fake", "memory": "100MiB", "fake": {"weight_bytes": "16MiB", "kv_bytes": "16MiB"}}
    config["models"] = [
        {"name": "up", "preload": True, **small},
        {"name": "late", "load_timeout_seconds": LOAD_LIMIT_SECONDS, **small},
    ]
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    service = RunningService(directory / "config.yaml", directory / "state")
    service.start()
    yield service
    service.stop()


def test_R08_a_host_that_cannot_be_placed_is_an_error_at_its_limit_and_leaves_nothing(
    own_service: RunningService,
) -> None:
    """The raylet, which starts processes, does nothing: no process comes up for the host."""
    service = own_service
    bring_up(service, "up")
    booked, processes = _books(service), service.engine_pids()
    with _stopped(_part(service, "raylet").pid):
        waited = timed(service, "late")
        again = timed(service, "late")
        other = timed(service, "up", max_tokens=4)
    assert waited.response.status_code == again.response.status_code == 503
    assert waited.seconds < LOAD_LIMIT_SECONDS + 3 and again.seconds < 2
    error = waited.response.json()["error"]
    assert error["code"] == "load_failed" and "no answer, limit 3.0 s" in error["message"]
    assert int(waited.response.headers["retry-after"]) >= 1
    assert other.response.status_code == 200
    wait_until(lambda: service.model("late")["state"] == "cold", 20, "the cooldown is over")
    assert (_books(service), service.engine_pids()) == (booked, processes)
    assert ask(service, "late", max_tokens=4).status_code == 200


def test_R11_sleep_with_generations_in_flight_drains_them_and_loses_none(fakes: RunningService) -> None:
    service, fields = fakes, {"max_tokens": 150, "min_tokens": 150}
    bring_up(service, "one")
    pid, since = service.model("one")["pid"], time.time()
    with ThreadPoolExecutor(10) as pool:
        begun = [threading.Event() for _ in range(4)]
        running = [pool.submit(listen, service, event, "one", f"long {n}", **fields) for n, event in enumerate(begun)]
        assert all(event.wait(10) for event in begun)
        service.operate("one", "sleep")
        assert service.model("one")["state"] == "draining" and not any(stream.done() for stream in running)
        late = [pool.submit(timed, service, "one", f"late {n}", max_tokens=20, min_tokens=20) for n in range(6)]
        heard = [stream.result() for stream in running]
        answers = [answer.result() for answer in late]
    for number, found in enumerate(heard):
        assert found[-1] == "[DONE]" and len(text_of(found)) == 150
        assert text_of(found) == said(ask(service, "one", f"long {number}", **fields))
    for number, answer in enumerate(answers):
        assert answer.load_ms > 0, "it came too early: this test shows nothing"
        assert len(said(answer.response)) == 20
        assert said(answer.response) == said(ask(service, "one", f"late {number}", max_tokens=20, min_tokens=20))
    assert service.model("one")["pid"] == pid and psutil.pid_exists(pid)
    moves = service.transitions("one", since)
    assert moves[:3] == [("ready", "draining"), ("draining", "sleeping"), ("sleeping", "waking")]


def test_R23_many_sleeps_and_wakes_leave_memory_and_books_as_they_were(fakes: RunningService) -> None:
    service = fakes
    bring_up(service, "one")

    def cycle(rounds: int) -> None:
        for _ in range(rounds):
            service.operate("one", "sleep")
            assert ask(service, "one", max_tokens=1).status_code == 200

    cycle(FIRST_ROUNDS)
    host, since = psutil.Process(service.model("one")["pid"]), time.time()
    watched = [host, _controller(service)]
    before, books = [_held_bytes(process) for process in watched], _sizes(service)
    cycle(SLEEPS)
    grown = [_held_bytes(process) - held for process, held in zip(watched, before, strict=True)]
    assert max(grown) < SLACK_BYTES, f"host and controller have grown by {grown} bytes"
    assert _sizes(service) == books
    assert service.model("one")["pid"] == host.pid
    assert service.transitions("one", since).count(("waking", "ready")) == SLEEPS


def test_R31_many_loads_and_unloads_leave_memory_processes_and_books_as_they_were(
    fakes: RunningService,
) -> None:
    service = fakes
    both = ("one", "two")
    bring_up(service, *both)

    def cycle(rounds: int) -> None:
        for _ in range(rounds):
            for model in both:
                service.operate(model, "unload")
            wait_until(lambda: {service.model(m)["state"] for m in both} == {"cold"}, 20, "both are unloaded")
            with ThreadPoolExecutor(2) as pool:
                assert all(a.status_code == 200 for a in pool.map(lambda m: ask(service, m, max_tokens=1), both))

    cycle(2)
    watched = [_controller(service), _part(service, "raylet"), _part(service, "gcs_server")]
    before, books = [_held_bytes(process) for process in watched], _sizes(service)
    pids = service.engine_pids()
    cycle(LOADS)
    grown = [_held_bytes(process) - held for process, held in zip(watched, before, strict=True)]
    assert max(grown) < SLACK_BYTES, f"controller, raylet and GCS have grown by {grown} bytes"
    assert _sizes(service) == books
    wait_until(lambda: len(service.engine_pids()) == len(pids), 5, "as many processes as before")
    assert not pids & {service.model(model)["pid"] for model in both}, "they were never really unloaded"


def test_R28_bytes_are_free_only_when_the_process_that_held_them_is_gone(fakes: RunningService) -> None:
    """A process that is stopped outlives its actor's death by seconds."""
    bring_up(fakes, "one")
    pid = fakes.model("one")["pid"]
    os.kill(pid, signal.SIGSTOP)
    fakes.operate("one", "unload")
    wait_until(lambda: fakes.model("one")["state"] == "cold", 60, "it is unloaded")
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_R40_a_controller_that_is_stuck_shows_at_ready_and_not_at_health(own_service: RunningService) -> None:
    service = own_service
    bring_up(service, "up")
    controller = _controller(service)
    with _stopped(controller.pid):
        stuck, alive = _get(service, "/ready"), _get(service, "/health")
        served = timed(service, "up", max_tokens=4)
    assert (stuck.status_code, stuck.json()["error"]["code"]) == (503, "unavailable")
    assert "controller does not answer" in stuck.json()["error"]["message"]
    assert stuck.headers["retry-after"] == "1"
    assert alive.status_code == 200
    assert served.response.status_code == 200 and served.seconds < 5, "what is up is served all the same"
    wait_until(lambda: _get(service, "/ready").status_code == 200, 10, "it goes on, and that shows")
    pid = service.model("up")["pid"]
    kill_hard(controller.pid)
    wait_until(lambda: _get(service, "/ready").status_code == 200, 20, "its successor answers")
    assert service.admin()["controller_pid"] != controller.pid
    assert (service.model("up")["state"], service.model("up")["pid"]) == ("ready", pid)


def test_R44_a_real_model_that_is_not_what_it_was_at_its_wake_is_loaded_cold(
    scarce_service: RunningService, tiny_models: dict[str, Path]
) -> None:
    service, fields = scarce_service, {"max_tokens": 8, "temperature": 0}
    _put_away(service, "one", "two")  # else they come back as soon as there is room
    before = said(ask(service, "llama", "who are you?", **fields))
    pid, since = service.model("llama")["pid"], time.time()
    service.operate("llama", "sleep")
    wait_until(lambda: service.model("llama")["state"] == "sleeping", 20, "asleep")
    for file in tiny_models["llama"].glob("*.safetensors"):
        os.utime(file)  # written to, for all that can be known
    assert said(ask(service, "llama", "who are you?", **fields)) == before
    moves = service.transitions("llama", since)
    assert moves[2:7] == [
        ("sleeping", "waking"),
        ("waking", "quarantined"),
        ("quarantined", "unloading"),
        ("unloading", "cold"),
        ("cold", "loading"),
    ]
    reasons = [e["reason"] for e in service.events("llama") if e["new"] == "quarantined" and e["at"] >= since]
    assert len(reasons) == 1 and "is not what this model was loaded from" in reasons[0]
    assert service.model("llama")["pid"] != pid and not psutil.pid_exists(pid)


def test_R47_a_pinned_model_stays_whatever_comes_and_ps_says_so(fakes: RunningService) -> None:
    service = fakes
    bring_up(service, "one", "two")
    pid, since = service.model("one")["pid"], time.time()
    service.operate("one", "pin")
    try:
        assert (service.model("one")["pinned"], service.model("two")["pinned"]) == (True, False)
        line = next(line for line in _ps(service).splitlines() if line.startswith("one "))
        assert "ready (pinned)" in line
        assert ask(service, "one", keep_alive="1s", max_tokens=1).status_code == 200
        assert ask(service, "two", max_tokens=1).status_code == 200  # "one" was used longest ago
        refused = timed(service, "big")
        error = refused.response.json()["error"]
        device = service.admin()["devices"][0]
        kept = next(entry for entry in device["entries"] if entry["host"] == "host:one:0")["measured_bytes"]
        assert (refused.response.status_code, error["code"]) == (503, "capacity_pinned")
        assert refused.seconds < 2 and int(refused.response.headers["retry-after"]) >= 1
        said_why = f"but pinned models keep {kept} of the {device['budget_bytes']} bytes of cpu0; unpin one"
        assert error["message"].startswith("big needs ") and said_why in error["message"]
        assert ask(service, "three", max_tokens=1).status_code == 200  # fits beside it, if "two" goes
        time.sleep(1.5)  # its keep_alive is long over
        assert (service.model("one")["state"], service.model("one")["pid"]) == ("ready", pid)
        assert service.transitions("one", since) == []
    finally:
        service.operate("one", "unpin")
    assert ask(service, "big", max_tokens=1).status_code == 200
    assert service.model("one")["state"] != "ready"


# -- the service's parts, as the kernel sees them -----------------------------------------------------


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """A process that hangs for as long as this lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _part(service: RunningService, program: str) -> psutil.Process:
    """A program of the service's Ray cluster."""
    mark = str(service._cluster.temp_dir)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[0].endswith(f"/{program}") and any(mark in word for word in words):
            return process
    raise AssertionError(f"no {program} runs")


def _controller(service: RunningService) -> psutil.Process:
    return psutil.Process(service.admin()["controller_pid"])


def _held_bytes(process: psutil.Process) -> int:
    """Memory that is its own."""
    return int(process.memory_full_info().uss)


def _books(service: RunningService) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Of each device: its name, what is held, and by whom."""
    devices: list[dict[str, Any]] = service.admin()["devices"]
    return [
        (d["device"], d["held_bytes"], sorted((e["host"], e["measured_bytes"]) for e in d["entries"])) for d in devices
    ]


def _sizes(service: RunningService) -> list[tuple[str, int, list[int]]]:
    """The same without who: idle memory may have gone to another one of those that were pushed out."""
    return [(device, held, sorted(size for _, size in entries)) for device, held, entries in _books(service)]


def _get(service: RunningService, path: str) -> httpx.Response:
    return httpx.get(f"{service.url}{path}", timeout=30)


def _ps(service: RunningService) -> str:
    command = [sys.executable, "-m", "orchestrator.cli", "ps", "--url", service.url, "--key", ADMIN]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "200"})
    return ended.stdout


def _put_away(service: RunningService, *models: str) -> None:
    for model in models:
        if service.model(model)["state"] != "cold":
            service.operate(model, "unload")
            wait_until(lambda name=model: service.model(name)["state"] == "cold", 20, "unloaded")  # type: ignore[misc]
