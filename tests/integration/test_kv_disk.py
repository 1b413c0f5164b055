"""KV on disk around a whole service: it outlives hosts and the service, and goes with its session; and pins."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from orchestrator.contexts import parse
from tests.acceptance.reader import Reader
from tests.scenarios.calls import GLOBEX, ask, usage
from tests.service import ADMIN, RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    found = RunningService(Path(__file__).parents[1] / "data" / "disk.yaml", tmp_path_factory.mktemp("disk"))
    found.start()
    yield found
    found.stop()


def begin(service: RunningService) -> tuple[str, int]:
    """A session with one turn; its name, and the tokens of a history that only it has."""
    name = uuid.uuid4().hex
    tokens, cached = usage(ask(service, "quick", f"{name} " + "a long history " * 20, {"X-Session-ID": name}))
    assert cached < 64
    return name, tokens


def found_again(service: RunningService, name: str) -> int:
    return usage(ask(service, "quick", "go on", {"X-Session-ID": name}))[1]


def unload(service: RunningService) -> None:
    service.operate("quick", "unload")
    wait_until(lambda: service.model("quick")["state"] == "cold", 30, "quick is unloaded")


def files(service: RunningService) -> int:
    return len(list((service.state_dir / "kv").rglob("*.kv")))


def test_an_unloaded_model_finds_its_sessions_on_disk(service: RunningService) -> None:
    name, tokens = begin(service)
    unload(service)
    assert files(service) >= tokens // 16
    assert found_again(service, name) > tokens - 32


def test_a_session_goes_on_from_disk_after_the_service_was_stopped_and_started(service: RunningService) -> None:
    name, tokens = begin(service)
    service.stop()
    service.start()
    assert found_again(service, name) > tokens - 32


def test_deleting_a_session_of_a_model_that_has_no_process_removes_its_files(service: RunningService) -> None:
    name, tokens = begin(service)
    unload(service)
    before = files(service)
    httpx.delete(f"{service.url}/admin/sessions/acme/{name}", headers=AS_ADMIN, timeout=30).raise_for_status()
    assert files(service) <= before - tokens // 16


def test_a_session_that_expired_leaves_no_kv_within_a_minute(service: RunningService) -> None:
    name, tokens = begin(service)
    unload(service)
    assert found_again(service, name) > tokens - 32  # so it is on disk and on the device
    keys = Reader(service.state_dir)._lines("KEYS", f"co:{{acme/{name}}}:*")
    Reader(service.state_dir)._lines("DEL", *keys)  # as Redis does when the time is over
    text = f"{name} " + "a long history " * 20
    before = files(service)
    wait_until(lambda: files(service) <= before - tokens // 16, 60, "its files are gone")
    assert usage(ask(service, "quick", text))[1] < 64


def pinned(service: RunningService) -> int:
    (host,) = parse(httpx.get(f"{service.url}/admin/contexts", headers=AS_ADMIN, timeout=30).json())
    assert host.snapshot is not None
    return host.snapshot.pool.pinned


def test_a_session_s_kv_is_pinned_where_the_tenant_may_and_else_refused_by_name(service: RunningService) -> None:
    name = uuid.uuid4().hex
    text = f"{name} " + "a long history " * 20
    kept = ask(service, "quick", text, {"X-Session-ID": name}, prompt_cache_retention="24h")
    assert usage(kept)[0] // 16 <= pinned(service) <= usage(kept)[0] // 16 + 8
    for headers, why in (({}, "session"), ({**GLOBEX, "X-Session-ID": name}, "kv_pin")):
        refused = ask(service, "quick", text, headers, prompt_cache_retention="24h")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_cache_retention"
        assert why in refused.json()["error"]["message"]
    assert ask(service, "quick", text, prompt_cache_retention="in_memory").status_code == 200
    assert ask(service, "quick", text, prompt_cache_retention="for ever").status_code == 400


def test_a_second_service_on_the_same_directory_is_refused_by_name(service: RunningService, tmp_path: Path) -> None:
    """It would drop the KV of all sessions that it does not know."""
    directory = str(service.state_dir / "kv")
    second = RunningService(service.config, tmp_path, {"ORCHESTRATOR_KV_DISK__DIRECTORY": directory})
    with pytest.raises(RuntimeError, match="another service keeps its KV"):
        second.start()
    second.process = None
    assert service.model("quick")["state"] in ("ready", "cold", "sleeping")
