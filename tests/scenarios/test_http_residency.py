"""The scenario bank's entries about residency through HTTP: a whole service with fake models that do not all fit."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.scenarios.calls import ACME, Timed, ask, bring_up, listen, said, text_of, timed
from tests.scenarios.conftest import TEMPLATES
from tests.service import RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]

BREAKS = {
    "test_R02": (
        "policies/residency.py",
        "return host.state is ModelState.READY and view.now",
        "return host.state is ModelState.READY and False and view.now",
    ),
    "test_R04": (
        "model_pool/pool.py",
        "self._desk.add(ticket)\n            if any(slot.state in STARTABLE for slot in slots):",
        "if any(slot.state in STARTABLE for slot in slots):\n                self._desk.add(ticket)",
    ),
    "test_R16": (
        "model_pool/host.py",
        "if self._channels.in_flight:\n            return\n        if self._busy",
        "if False:\n            return\n        if self._busy",
    ),
    "test_R34": (
        "model_pool/pool.py",
        "if all(s.cooling(now) or (s.state is _S.FAILED and not s.climbed) for s in slots):",
        "if False:",
    ),
    "test_S56": ("orchestrator/controller.py", "if ref in self._pictures and", "if False and"),
}
DEADLINE_SECONDS = 25.0  # of the service's config
BOUND_SECONDS = 10.0  # for a switch or two; it takes one or two when nothing else runs here


@pytest.fixture(scope="module", autouse=True)
def only_fakes(scarce_service: RunningService) -> None:
    """The real models of other files keep hundreds of MiB, asleep too: nothing here would fit beside them."""
    for model in scarce_service.admin()["models"]:
        if model["model"] in TEMPLATES and model["state"] != "cold":
            scarce_service.operate(model["model"], "unload")
            wait_until(lambda name=model["model"]: scarce_service.model(name)["state"] == "cold", 20, "unloaded")  # type: ignore[misc]


def test_R02_a_model_under_constant_load_gives_way_within_bounds_and_is_served_again(
    scarce_service: RunningService,
) -> None:
    """No setting that a client can send reloads a model; what needs its memory is another model."""
    service, stop = scarce_service, threading.Event()
    bring_up(service, "one")
    served: list[list[Timed]] = [[] for _ in range(4)]

    def keep_asking(answers: list[Timed]) -> None:
        while not stop.is_set():
            answers.append(timed(service, "one", max_tokens=40, min_tokens=40))

    with ThreadPoolExecutor(4) as pool:
        load = [pool.submit(keep_asking, answers) for answers in served]
        try:
            wait_until(lambda: service.model("one")["in_flight"] >= 2, 10, "the load overlaps")
            other = timed(service, "big", max_tokens=4)
            over = other.begun + other.seconds
            wait_until(lambda: all(answers[-1].begun > over for answers in served), 10, "all are served again")
        finally:
            stop.set()
        for asking in load:
            asking.result()
    assert other.response.status_code == 200 and other.seconds < BOUND_SECONDS
    assert all(answer.response.status_code == 200 for answers in served for answer in answers)
    assert max(answer.seconds for answers in served for answer in answers) < BOUND_SECONDS
    assert any(answer.load_ms > 0 for answers in served for answer in answers), "it never had to give way"


@pytest.mark.parametrize(
    ("verb", "stopped", "restarted"),
    [
        ("sleep", ("draining", "sleeping"), ("sleeping", "waking")),
        ("unload", ("unloading", "cold"), ("cold", "loading")),
    ],
)
def test_R04_a_request_right_after_a_stop_began_restarts_the_model_after_it(
    scarce_service: RunningService, verb: str, stopped: tuple[str, str], restarted: tuple[str, str]
) -> None:
    service = scarce_service
    for offset_seconds in (0.0, 0.05, 0.4):
        bring_up(service, "one", "two")
        since = time.time()
        service.operate("one", verb)
        time.sleep(offset_seconds)
        answer = timed(service, "one", max_tokens=4)
        assert answer.response.status_code == 200, answer.response.text
        assert answer.seconds < BOUND_SECONDS and answer.load_ms > 0
        moves = service.transitions("one", since)
        assert moves.index(stopped) < moves.index(restarted) and moves[-1][1] == "ready"
    with ThreadPoolExecutor(9) as pool:
        later = list(pool.map(lambda n: timed(service, ("one", "two", "three")[n % 3], f"later {n}"), range(9)))
    assert {one.response.status_code for one in later} == {200}
    assert max(one.seconds for one in later) < BOUND_SECONDS


def test_R13_requests_racing_with_sleep_are_answered(scarce_service: RunningService) -> None:
    """Every one has its answer, soon; some found the model still up, some waited for it to wake.

    The next sleep comes before the host has reported what has arrived: it must not wait for that.
    """
    service, draw = scarce_service, random.Random(13)
    answers: list[Timed] = []

    def later(seconds: float) -> Timed:
        time.sleep(seconds)
        return timed(service, "one", max_tokens=10)

    with ThreadPoolExecutor(6) as pool:
        for _ in range(12):
            bring_up(service, "one")
            racing = [pool.submit(later, draw.uniform(0, 0.1)) for _ in range(6)]
            time.sleep(draw.uniform(0, 0.1))
            service.operate("one", "sleep")
            answers += [one.result() for one in racing]
    assert {one.response.status_code for one in answers} == {200}
    assert max(one.seconds for one in answers) < BOUND_SECONDS / 2
    waited = sum(one.load_ms > 0 for one in answers)
    assert 10 < waited < len(answers) - 10, f"{waited} of {len(answers)} came too late: this test shows nothing"


def test_R16_models_with_active_calls_are_not_taken_apart_for_another(scarce_service: RunningService) -> None:
    service = scarce_service
    bring_up(service, "one", "two")
    pids = {model: service.model(model)["pid"] for model in ("one", "two")}
    since = time.time()
    fields = {"max_tokens": 150, "min_tokens": 150}
    with ThreadPoolExecutor(3) as pool:
        running = {}
        for model in ("one", "two"):  # "one" is the least recently used
            begun = threading.Event()
            running[model] = pool.submit(listen, service, begun, model, "long", **fields)
            assert begun.wait(10)
        third = timed(service, "three", max_tokens=4)
        assert third.response.status_code == 200 and third.load_ms > 500, "it waited for one of the streams"
    for model, heard in running.items():
        found = heard.result()
        assert found[-1] == "[DONE]" and len(text_of(found)) == 150
        assert text_of(found) == said(ask(service, model, "long", **fields))
        assert service.model(model)["pid"] == pids[model]
        assert not {"unloading", "lost"} & {new for _, new in service.transitions(model, since)}
    gave_way = [m for m in ("one", "two") if ("ready", "draining") in service.transitions(m, since)]
    assert gave_way, "there was room for all three: this test shows nothing"


def test_R34_a_broken_model_costs_one_attempt_per_cooldown_and_leaks_nothing(scarce_service: RunningService) -> None:
    service, since = scarce_service, time.time()
    bring_up(service, "one")
    booked, processes = _booked(service), service.engine_pids()
    told = []
    for attempt in (1, 2):
        first = ask(service, "faulty")
        polled = [timed(service, "faulty") for _ in range(3)]
        causes = {r.json()["error"]["message"] for r in (first, *(one.response for one in polled))}
        assert len(causes) == 1 and "truncated at 12 of 80 bytes" in causes.pop()
        assert {one.response.status_code for one in polled} == {first.status_code} == {503}
        assert max(one.seconds for one in polled) < 2, "told from the cache, not waited for"
        assert service.transitions("faulty", since).count(("cold", "loading")) == attempt
        assert ask(service, "one", max_tokens=4).status_code == 200
        told.append(int(first.headers["retry-after"]))
        wait_until(lambda: service.engine_pids() == processes, 5, "its process is gone")
        wait_until(lambda: _booked(service) == booked, 5, "its bytes are given back")
        wait_until(lambda: service.model("faulty")["state"] == "cold", told[-1] + 1, "the cooldown ends when it said")
    assert told == [1, 2]


def test_S56_a_hung_host_delays_nobody_else_and_is_replaced(scarce_service: RunningService) -> None:
    service = scarce_service
    bring_up(service, "one", "two")
    gateway, hung = service.gateway_pid(), service.model("two")["pid"]
    before = statistics.median(timed(service, "one", max_tokens=4).seconds for _ in range(10))
    with ThreadPoolExecutor(4) as pool:
        os.kill(hung, signal.SIGSTOP)
        try:
            stuck = [pool.submit(timed, service, "two", f"stuck {n}", max_tokens=4) for n in range(4)]
            during = [timed(service, "one", max_tokens=4) for _ in range(10)]
            crowd_begun = time.monotonic()
            statuses = _crowd(service, "one", 200)
            waited = [one.result() for one in stuck]
        finally:
            if psutil.pid_exists(hung):
                os.kill(hung, signal.SIGCONT)
    over = min(one.begun + one.seconds for one in waited)
    assert during[-1].begun + during[-1].seconds < crowd_begun < over, "they came too late: this test shows nothing"
    assert {one.response.status_code for one in during} == {200}
    assert statistics.median(one.seconds for one in during) < 2 * before + 0.2
    assert statuses == [200] * 200 and service.gateway_pid() == gateway
    assert {one.response.status_code for one in waited} == {200}
    assert max(one.seconds for one in waited) < DEADLINE_SECONDS
    assert service.model("two")["pid"] != hung


def _crowd(service: RunningService, model: str, size: int) -> list[int]:
    """The statuses of so many requests at once."""
    body = {"model": model, "messages": [{"role": "user", "content": "crowd"}], "max_tokens": 4}
    url = f"{service.url}/v1/chat/completions"
    limits = httpx.Limits(max_connections=size)
    with httpx.Client(headers=ACME, timeout=60, limits=limits) as client, ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda _: client.post(url, json=body).status_code, range(size)))


def _booked(service: RunningService) -> int:
    return sum(device["held_bytes"] for device in service.admin()["devices"])
