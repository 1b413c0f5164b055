"""What ``doctor`` makes of real processes: a running service is blamed for nothing, a killed one's are all named."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.holders import Conclusion, Picture, conclude, look, settled
from session_store.embedded import EmbeddedRedis
from tests.service import RunningService

pytestmark = [pytest.mark.service, pytest.mark.timeout(240)]


def seen(state_dir: Path) -> tuple[Picture, list[Conclusion]]:
    """What is said of one state directory: other services may come and go beside us."""
    picture, found = settled(lambda: look(state_dir, 1, 0))
    return picture, [one for one in found if str(state_dir.resolve()) in one.said]


def test_a_running_service_is_blamed_for_nothing(fake_service: RunningService) -> None:
    picture, found = seen(fake_service.state_dir)
    assert found == []
    assert picture.services[picture.home] == fake_service.pid
    hosts = {p.pid: p for p in picture.processes if p.is_host and p.state_dir == picture.home}
    assert fake_service.engine_pids() <= hosts.keys() and len(hosts) >= 3  # those that begin have another title
    assert all(host.held_bytes > 10 * 2**20 for host in hosts.values())
    short = Picture(picture.processes, picture.services, picture.home, picture.own_pid, 0, 10)
    blamed = {pid for one in conclude(short) if one.kind == "foreign" for pid in one.pids}
    assert not blamed & {fake_service.pid, fake_service.redis_pid(), *hosts}


def test_doctor_says_so(fake_service: RunningService) -> None:
    environment = os.environ | {"ORCHESTRATOR_STATE_DIR": str(fake_service.state_dir)}
    command = [sys.executable, "-m", "orchestrator.cli", "doctor", "--json", "--config", str(fake_service.config)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    findings = [one for one in json.loads(ended.stdout)["findings"] if one["name"] == "holders"]
    assert findings and not [one for one in findings if str(fake_service.state_dir) in one["said"]]
    assert all(one["good"] or one["fix"] for one in findings)


@pytest.fixture
def own_service(tmp_path: Path) -> Iterator[RunningService]:
    config = tmp_path / "one.yaml"
    config.write_text(
        "devices: [{name: cpu0, memory: 400MiB}]\n"
        "models: [{name: quick, source: fake, memory: 160MiB, preload: true}]\n"
        "tenants: [{name: acme, demo_key: sk-demo-acme}, {name: operator, demo_key: sk-demo-admin, admin: true}]\n"
    )
    service = RunningService(config, tmp_path / "state")
    service.start()
    yield service
    service.sweep()


def test_a_killed_service_leaves_hosts_ray_and_redis_and_all_are_named(own_service: RunningService) -> None:
    hosts, redis = own_service.engine_pids(), own_service.redis_pid()
    own_service.kill()
    picture, found = seen(own_service.state_dir)
    assert picture.home not in picture.services
    assert [(one.kind, one.warning) for one in found] == [("orphan", False), ("leftover", False)]
    assert hosts and hosts <= set(found[0].pids)
    assert redis in found[1].pids and "raylet" in found[1].said
    until = time.monotonic() + 20
    while found:  # Ray starts a process again now and then until the last of it is gone
        assert time.monotonic() < until, found
        for pid in {pid for one in found for pid in one.pids}:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        _, found = seen(own_service.state_dir)


def test_a_redis_of_a_program_without_a_service_is_its_own(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path)
    redis.start()
    try:
        picture, found = seen(tmp_path)
        assert found == []
        assert redis.pid in {p.pid for p in picture.processes if p.state_dir == picture.home}
    finally:
        redis.stop()


def test_a_zombie_is_seen_as_one() -> None:
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
        (one,) = [p for p in look(Path("/nonexistent"), 1, 0).processes if p.pid == child]
        assert one.zombie and one.parent == os.getpid() and one.held_bytes == 0
    finally:
        os.waitpid(child, 0)
