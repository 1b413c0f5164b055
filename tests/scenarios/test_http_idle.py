"""Scenario entries about models that nobody uses for a while, through HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.scenarios.calls import ACME, ask
from tests.service import RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(120)]

BREAKS = {
    "test_R50": ("model_pool/host.py", "self._keep_alive_seconds = request.keep_alive_seconds", "pass"),
    "test_an_alias": (
        "orchestrator/api/intake.py",
        "for name in (model.name, *model.aliases)}",
        "for name in (model.name,)}",
    ),
}


def test_R50_keep_alive_of_a_request_is_honoured_and_nonsense_is_refused(fake_service: RunningService) -> None:
    assert ask(fake_service, "small", keep_alive="1s", max_tokens=4).status_code == 200
    wait_until(lambda: fake_service.model("small")["state"] == "sleeping", 20, "small sleeps after a second")
    assert ask(fake_service, "small", keep_alive=-1, max_tokens=4).status_code == 200
    wait_until(lambda: fake_service.model("small")["state"] == "ready", 20, "small is up")
    for value in ("soon", [], {}, "5 parsecs"):
        error = ask(fake_service, "small", keep_alive=value, max_tokens=4)
        assert (error.status_code, error.json()["error"]["param"]) == (400, "keep_alive"), error.text


def test_an_alias_is_another_name_of_the_model(fake_service: RunningService) -> None:
    answer = ask(fake_service, "gpt-quick", "hello", max_tokens=4)
    assert answer.status_code == 200
    assert answer.json()["choices"] == ask(fake_service, "quick", "hello", max_tokens=4).json()["choices"]
    shown: dict[str, Any] = httpx.get(f"{fake_service.url}/v1/models/gpt-quick", headers=ACME, timeout=30).json()
    assert (shown["id"], shown["aliases"]) == ("quick", ["gpt-quick"])


def test_R46_requests_that_differ_in_their_limits_cause_no_reload(fake_service: RunningService) -> None:
    ask(fake_service, "small", "x", max_tokens=4)
    epoch = fake_service.model("small")["epoch"]
    for fields in ({}, {"max_tokens": 5}, {"max_completion_tokens": 6}, {"temperature": 0.1}):
        assert ask(fake_service, "small", "x", **fields).status_code == 200
    assert fake_service.model("small")["epoch"] == epoch
