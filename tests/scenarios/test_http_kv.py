"""Scenario entries about a session's KV, through HTTP: it survives the model's sleep, and goes with the session."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from tests.scenarios.calls import ask
from tests.service import ADMIN, RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(120)]
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}

BREAKS = {
    "test_R56": ("engine/core.py", "            self._park()\n", ""),
    "test_deleting": ("engine/core.py", "self._kv_cache.forget(keys)", "pass"),
}


def cached(answer: httpx.Response) -> int:
    count: int = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def put_to_sleep(service: RunningService, model: str) -> None:
    httpx.post(f"{service.url}/admin/models/{model}/sleep", headers=AS_ADMIN, timeout=30).raise_for_status()
    wait_until(lambda: state_of(service, model) == "sleeping", 20, f"{model} sleeps")


def state_of(service: RunningService, model: str) -> Any:
    return next(entry["state"] for entry in service.admin()["models"] if entry["model"] == model)


def test_R56_a_session_s_kv_comes_back_when_its_model_was_put_to_sleep(fake_service: RunningService) -> None:
    headers = {"X-Session-ID": uuid.uuid4().hex}
    text = f"{uuid.uuid4().hex} " + "a long history " * 20
    first = ask(fake_service, "quick", text, headers)
    assert cached(first) < 64
    put_to_sleep(fake_service, "quick")
    assert cached(ask(fake_service, "quick", "go on", headers)) > len(text) - 64


def test_deleting_a_session_drops_its_kv_from_every_host(fake_service: RunningService) -> None:
    name = uuid.uuid4().hex
    text = f"{uuid.uuid4().hex} " + "a long history " * 20
    ask(fake_service, "quick", text, {"X-Session-ID": name})
    put_to_sleep(fake_service, "quick")
    gone = httpx.delete(f"{fake_service.url}/admin/sessions/acme/{name}", headers=AS_ADMIN, timeout=30)
    assert gone.raise_for_status().json()["kv_blocks_dropped"] > len(text) // 16 - 4
    assert gone.json()["hosts_not_reached"] == []
    assert cached(ask(fake_service, "quick", text)) < 64
