"""Every process of the service killed, on fake models: what clients see, what is kept, what comes back.

The tests of the whole service run in the order of this file; the last one leaves no service.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
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
import yaml

from engine.fake import reply_to
from orchestrator.cluster import PrivateCluster, require_token
from tests.service import ADMIN, RunningService, kill_hard, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]

CONFIG = Path(__file__).parents[1] / "data" / "faults.yaml"
ACME = {"Authorization": "Bearer sk-demo-acme"}
OPERATOR = {"Authorization": f"Bearer {ADMIN}"}
WORDS = {"talker": 60, "victim": 60, "doomed": 60, "dozer": 8, "lazy": 8, "left": 8, "right": 8}

# Looks at a host past gateway and controller, so that it can be watched while a gateway is away.
PROBE = """
import json, sys, time, ray
ray.init(address=sys.argv[1], namespace="orchestrator", log_to_driver=False, logging_level="ERROR")
host = ray.get_actor(sys.argv[2])
while True:
    seen = ray.get(host.picture.remote())
    stats = seen.stats
    print(json.dumps([seen.report.in_flight, stats.running, stats.waiting, stats.kv_blocks_used]), flush=True)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    running = RunningService(CONFIG, tmp_path_factory.mktemp("faults"))
    try:
        running.start()
        yield running
        running.stop()
        assert running.sweep() == [], "the stop left processes behind"
    finally:
        running.stop()
        running.sweep()


# -- what a client does -------------------------------------------------------------------


def answer_to(model: str, *said: str) -> str:
    """The undisturbed answer to a conversation: user, assistant, …, user."""
    return reply_to(prompt_of(*said).encode(), WORDS[model]).decode()


def prompt_of(*said: str) -> str:
    turns = [f"{'User: ' if n % 2 == 0 else 'Assistant:'}{text}\n" for n, text in enumerate(said)]
    return "".join(turns) + "Assistant:"


def ask(service: RunningService, model: str, text: str, headers: Any = None, timeout: float = 60) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    url = f"{service.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers={**ACME, **(headers or {})}, timeout=timeout)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def prompt_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens"]


def session() -> dict[str, str]:
    return {"X-Session-ID": f"s-{uuid.uuid4().hex}"}


class Listener:
    """One streamed answer, read in a thread of its own."""

    def __init__(self, service: RunningService, model: str, text: str, headers: Any = None) -> None:
        self.status = 0
        self.text = ""
        self.times: list[float] = []  # of the pieces
        self.finished: list[str] = []
        self.errors: list[dict[str, Any]] = []
        self.dones = 0
        self.broken: httpx.TransportError | None = None
        body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True}
        self._thread = threading.Thread(target=self._read, args=(service, body, {**ACME, **(headers or {})}))
        self._thread.start()

    def wait_for(self, characters: int) -> Listener:
        """Return once so much text has come."""
        wait_until(lambda: len(self.text) >= characters or not self._thread.is_alive(), 30, f"{characters} characters")
        return self

    def wait(self) -> Listener:
        self._thread.join(90)
        assert not self._thread.is_alive(), "the stream does not end"
        return self

    def is_whole(self, text: str) -> bool:
        """Exactly this answer, ended as one success."""
        return (self.text, self.finished, self.errors, self.dones) == (text, ["stop"], [], 1)

    def is_one_error(self) -> bool:
        """Exactly one error, and nothing that looks like success."""
        return (self.finished, len(self.errors), self.dones) == ([], 1, 0)

    def _read(self, service: RunningService, body: dict[str, Any], headers: dict[str, str]) -> None:
        url = f"{service.url}/v1/chat/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
                self.status = response.status_code
                if response.is_error:
                    self.errors.append(json.loads(response.read())["error"])
                    return
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self._event(line.removeprefix("data: "))
        except httpx.TransportError as error:
            self.broken = error

    def _event(self, data: str) -> None:
        if data == "[DONE]":
            self.dones += 1
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event["error"])
            return
        for choice in event["choices"]:
            self.text += choice["delta"].get("content", "")
            self.times.append(time.monotonic())
            if choice["finish_reason"]:
                self.finished.append(choice["finish_reason"])


def host_pids(service: RunningService) -> dict[str, int]:
    return {model["model"]: model["pid"] for model in service.admin()["models"] if "pid" in model}


def transitions(service: RunningService, model: str, since: float) -> list[tuple[str, str]]:
    found = service.events(model)
    return [(e["old"], e["new"]) for e in found if e["kind"] == "transition" and e["at"] >= since]


def put_to_sleep(service: RunningService, model: str) -> None:
    httpx.post(f"{service.url}/admin/models/{model}/sleep", headers=OPERATOR, timeout=30).raise_for_status()
    wait_until(lambda: service.model(model)["state"] == "sleeping", 10, f"{model} sleeps")


def answers(service: RunningService) -> bool:
    """A request gets through."""
    try:
        return ask(service, "dozer", "ping", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


# -- the command line, where nothing runs -------------------------------------------------


def cli(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ORCHESTRATOR_")}
    environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    command = [sys.executable, "-m", "orchestrator.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def config_with(tmp_path: Path, **sections: Any) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(CONFIG.read_text()), **sections}))
    return str(path)


def one_line(ended: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in ended.stderr.splitlines() if line.strip() and line != "stopped"]
    assert len(lines) == 1 and lines[0].startswith("error:"), ended.stderr
    return lines[0]


def test_serve_on_a_taken_port_says_so_and_exits_with_3(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = cli(tmp_path, "serve", "-c", str(CONFIG), "--port", str(port), "--state-dir", str(tmp_path / "s"))
    assert ended.returncode == 3
    assert f"port {port}" in one_line(ended) and "--port" in one_line(ended)


def test_serve_with_an_unreachable_redis_says_so_and_exits_with_3(tmp_path: Path) -> None:
    config = config_with(tmp_path, redis={"url": "redis://:hush@127.0.0.1:1/0"})
    ended = cli(tmp_path, "serve", "-c", config, "--state-dir", str(tmp_path / "s"))
    assert ended.returncode == 3
    assert "Redis at 127.0.0.1:1" in one_line(ended) and "hush" not in ended.stderr + ended.stdout


def test_serve_with_an_unknown_key_names_the_nearest_and_exits_with_2(tmp_path: Path) -> None:
    config = config_with(tmp_path, pool={"min_residence_seconds": 1})
    ended = cli(tmp_path, "serve", "-c", config, "--state-dir", str(tmp_path / "s"))
    assert ended.returncode == 2
    assert "pool.min_residence_seconds" in one_line(ended) and "'min_resident_seconds'" in one_line(ended)


def test_ps_without_a_service_exits_with_3(tmp_path: Path) -> None:
    ended = cli(tmp_path, "ps")
    assert ended.returncode == 3
    assert "orchestrator serve" in one_line(ended)


# -- a client -----------------------------------------------------------------------------


def test_S62_a_leaving_client_takes_nobody_elses_stream_along(service: RunningService) -> None:
    """The first on this host, so that its request opened the stream which gateway and host share."""
    leaver = httpx.Client(timeout=60)
    body = {"model": "talker", "messages": [{"role": "user", "content": "first"}], "stream": True}
    request = leaver.build_request("POST", f"{service.url}/v1/chat/completions", json=body, headers=ACME)
    leaving = leaver.send(request, stream=True)
    assert any(line.startswith("data: ") for line in leaving.iter_lines())
    stays = Listener(service, "talker", "second").wait_for(20)
    leaving.close()
    leaver.close()
    answer = answer_to("talker", "second")
    assert stays.wait().is_whole(answer), vars(stays)
    time.sleep(1.5)  # until the host has reported
    stats = service.model("talker")["stats"]
    # had the stream broken, the second generation would have been computed anew, and the first gone on to its end
    assert stats["prompt_tokens"] == len(prompt_of("first")) + len(prompt_of("second"))
    assert stats["generated_tokens"] < 1.5 * len(answer)


# -- hosts --------------------------------------------------------------------------------


def test_a_host_killed_mid_stream_is_replaced_and_nothing_is_repeated_or_dropped(service: RunningService) -> None:
    headers, answer = session(), answer_to("victim", "go on")
    put_to_sleep(service, "victim")  # so that the stream is placed by a ticket
    pid = host_pids(service)["victim"]
    heard = Listener(service, "victim", "go on", headers).wait_for(8)
    kill_hard(pid)
    before = len(heard.text)
    heard.wait()
    assert heard.is_whole(answer), vars(heard)
    assert 8 <= before < len(answer) and host_pids(service)["victim"] != pid
    # what was committed is what was said
    follow = ask(service, "dozer", "and?", headers)
    assert prompt_tokens(follow) == len(prompt_of("go on", answer, "and?"))
    # nothing waits for it any more: no ticket of the lost host is left to hold up the draining of its successor
    begin = time.monotonic()
    put_to_sleep(service, "victim")
    assert time.monotonic() - begin < 3


def test_S61_a_model_that_cannot_come_back_ends_the_stream_with_one_error(service: RunningService) -> None:
    headers = session()
    heard = Listener(service, "doomed", "try", headers).wait()
    assert heard.is_one_error(), vars(heard)
    assert heard.status == 200 and heard.errors[0]["code"] == "load_failed"
    assert "3 losses" in heard.errors[0]["message"]
    # it went on after the first and the second death, without repeating or dropping anything
    assert 30 < len(heard.text) < 60 and answer_to("doomed", "try").startswith(heard.text)
    assert prompt_tokens(ask(service, "dozer", "else", headers)) == len(prompt_of("else"))


# -- the controller -----------------------------------------------------------------------


def test_a_killed_controller_is_not_noticed_by_warm_requests_and_adopts_the_hosts(service: RunningService) -> None:
    text_of(ask(service, "victim", "wake up"))
    pids, controller = host_pids(service), service.admin()["controller_pid"]
    streams = [Listener(service, "talker", f"stream {n}") for n in range(4)]
    for heard in streams:
        heard.wait_for(10)
    kill_hard(controller)
    for n in range(5):
        begin = time.monotonic()
        assert text_of(ask(service, "dozer", f"warm {n}")) == answer_to("dozer", f"warm {n}")
        assert time.monotonic() - begin < 3
    for n, heard in enumerate(streams):
        assert heard.wait().is_whole(answer_to("talker", f"stream {n}")), vars(heard)
        assert max(b - a for a, b in zip(heard.times, heard.times[1:], strict=False)) < 2, "a stream stood still"
    assert service.admin()["controller_pid"] != controller
    assert host_pids(service) == pids
    shown = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "ps", "--json", "--url", service.url, "--key", ADMIN],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    states = {model["model"]: model["state"] for model in json.loads(shown.stdout)["models"]}
    assert states["talker"] == states["victim"] == states["dozer"] == "ready"


def test_a_load_survives_the_death_of_the_controller_that_began_it(service: RunningService) -> None:
    put_to_sleep(service, "victim")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, service, "lazy", "x")
        wait_until(lambda: service.model("lazy")["state"] == "loading", 10, "the load has begun")
        wait_until(lambda: "pid" in service.model("lazy"), 5, "its process is there")
        pid = host_pids(service)["lazy"]
        kill_hard(service.admin()["controller_pid"])
        assert text_of(asked.result()) == answer_to("lazy", "x")
    assert host_pids(service)["lazy"] == pid
    assert service.model("victim")["state"] == "sleeping", "a restarted controller preloads nothing"


# -- a gateway ----------------------------------------------------------------------------


def test_a_killed_gateway_leaks_nothing_on_the_hosts_and_comes_back(service: RunningService) -> None:
    gateway = service.gateway_pid()
    command = [sys.executable, "-c", PROBE, service.ray_address, "host:talker:0"]
    environment = os.environ | require_token(service.state_dir)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as probe:
        try:
            assert probe.stdout is not None
            streams = [Listener(service, "talker", f"lost {n}") for n in range(8)]
            for heard in streams:
                heard.wait_for(5)
            while (books := json.loads(probe.stdout.readline()))[1] < 8:
                pass
            kill_hard(gateway)
            died = time.monotonic()
            while any(books):
                books = json.loads(probe.stdout.readline())
                assert time.monotonic() - died < 15, f"in flight, running, waiting, blocks used: {books}"
        finally:
            probe.kill()
    for heard in streams:  # dropped, not ended as if all were well
        heard.wait()
        assert heard.broken is not None and not heard.finished and not heard.dones
    wait_until(lambda: answers(service), 20, "a gateway is back")
    assert service.gateway_pid() != gateway
    stats = service.model("talker")["stats"]
    assert stats["running"] == stats["waiting"] == stats["kv_blocks_used"] == 0


# -- residency through HTTP -----------------------------------------------------------------


def test_R20_fifty_requests_for_a_sleeping_model_make_one_wake(service: RunningService) -> None:
    put_to_sleep(service, "dozer")
    since = time.time()
    with ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(lambda n: text_of(ask(service, "dozer", f"wake {n}")), range(50)))
    assert texts == [answer_to("dozer", f"wake {n}") for n in range(50)]
    assert transitions(service, "dozer", since) == [("sleeping", "waking"), ("waking", "ready")]


def test_R37_a_retry_joins_the_load_of_a_client_that_left(service: RunningService) -> None:
    httpx.post(f"{service.url}/admin/models/lazy/unload", headers=OPERATOR, timeout=30).raise_for_status()
    wait_until(lambda: service.model("lazy")["state"] == "cold", 10, "lazy is cold")
    since = time.time()
    with pytest.raises(httpx.ReadTimeout):
        ask(service, "lazy", "hello", timeout=0.5)
    assert text_of(ask(service, "lazy", "hello")) == answer_to("lazy", "hello")
    assert transitions(service, "lazy", since).count(("cold", "loading")) == 1
    assert time.time() - since < 2 * 2, "the retry waited for a load of its own"


def test_R05_two_sessions_alternating_on_two_models_with_room_for_one(service: RunningService) -> None:
    def talk(name: str, models: tuple[str, str]) -> None:
        headers, said = session(), []
        for turn in range(10):
            said.append(f"{name} {turn}")
            response = ask(service, models[turn % 2], said[-1], headers)
            assert prompt_tokens(response) == len(prompt_of(*said))
            assert text_of(response) == answer_to("left", *said)
            said.append(text_of(response))

    since = time.time()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(talk, "one", ("left", "right"))
        two = pool.submit(talk, "two", ("right", "left"))
        one.result(120), two.result(120)
    ready = [t for model in ("left", "right") for t in transitions(service, model, since) if t[1] == "ready"]
    assert len(ready) > 2, "there was room for both: this test shows nothing"


# -- the whole service ----------------------------------------------------------------------


def start_session(service: RunningService) -> tuple[dict[str, str], list[str]]:
    headers = session()
    return headers, ["remember", text_of(ask(service, "talker", "remember", headers))]


def check_session(service: RunningService, headers: dict[str, str], said: list[str]) -> None:
    response = ask(service, "dozer", "still there?", headers)
    assert prompt_tokens(response) == len(prompt_of(*said, "still there?"))
    assert text_of(response) == answer_to("dozer", *said, "still there?")


def test_sessions_outlive_a_restart_of_the_service(service: RunningService) -> None:
    headers, said = start_session(service)
    service.stop()
    assert service.sweep() == [], "the stop left processes behind"
    service.start()
    check_session(service, headers, said)


def test_sessions_outlive_a_killed_serve_and_its_leftovers_are_cleaned(service: RunningService) -> None:
    headers, said = start_session(service)
    heard = Listener(service, "talker", "cut off", headers).wait_for(20)
    pids = [service.redis_pid(), service.gateway_pid(), service.admin()["controller_pid"], *host_pids(service).values()]
    service.kill()
    assert all(psutil.pid_exists(pid) for pid in pids), "nothing was left over: this test shows nothing"
    service.start()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not heard.wait().finished
    wait_until(lambda: ask(service, "dozer", "x", headers | {"X-Session-ID": "probe"}).status_code == 200, 20, "up")
    wait_until(lambda: ask(service, "dozer", "", headers).status_code != 409, 30, "the lease of the dead turn is over")
    said += ["", answer_to("dozer", *said, "")]
    check_session(service, headers, said)


def test_a_killed_redis_is_a_clear_error_acknowledges_nothing_and_is_started_again(service: RunningService) -> None:
    kept = session()
    said = ["hello", answer_to("dozer", "hello")]
    assert ask(service, "dozer", "hello", kept).status_code == 200
    heard = Listener(service, "talker", "mid-turn", session()).wait_for(20)
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGSTOP)  # else it would start Redis again before we have looked
    try:
        kill_hard(service.redis_pid())
        heard.wait()
        assert heard.is_one_error(), vars(heard)
        assert heard.errors[0]["code"] == "store_unavailable"
        for headers in (session(), {}):
            refused = ask(service, "dozer", "x", headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
            assert int(refused.headers["retry-after"]) >= 1
        assert httpx.get(f"{service.url}/ready", timeout=30).status_code == 503
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    wait_until(lambda: httpx.get(f"{service.url}/ready", timeout=30).status_code == 200, 20, "Redis is back")
    check_session(service, kept, said)


def test_serve_ends_with_a_message_when_its_ray_cluster_dies(service: RunningService) -> None:
    """The last test: it leaves no service."""
    raylet = next(p for p in psutil.process_iter(["cmdline"]) if _is_raylet_of(p, service))
    raylet.kill()
    assert service.process is not None
    assert service.process.wait(timeout=60) != 0
    service.process = None
    assert "Ray cluster has died" in service.output.read_text()
    assert service.sweep() == []


def _is_raylet_of(process: psutil.Process, service: RunningService) -> bool:
    words = process.info["cmdline"] or []
    mark = str(PrivateCluster(service.state_dir, None).temp_dir)
    return bool(words) and words[0].endswith("/raylet") and any(mark in word for word in words)
