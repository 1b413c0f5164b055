"""Two gateways before the same hosts: one history, one set of metrics, and a death that costs neither."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service import RunningService, kill_hard, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]
CONFIG = Path(__file__).parents[1] / "data" / "fake.yaml"
ACME = {"Authorization": "Bearer sk-demo-acme"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    service = RunningService(CONFIG, tmp_path_factory.mktemp("pair"), {"ORCHESTRATOR_HTTP__GATEWAYS": "2"})
    service.start()
    yield service
    service.stop()


def gateways(service: RunningService) -> dict[str, int]:
    """The gateways that answer now, by name."""
    found = (httpx.get(f"{service.url}/health", timeout=30).json() for _ in range(20))
    return {health["gateway"]: health["pid"] for health in found}


def ask(service: RunningService, model: str, text: str, session: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    headers = ACME | {"X-Session-ID": session}
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def scrape(service: RunningService) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(httpx.get(f"{service.url}/metrics", timeout=30).text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def counters(seen: dict[Any, float]) -> dict[Any, float]:
    return {key: value for key, value in seen.items() if key[0].endswith(("_total", "_count", "_bucket", "_sum"))}


def test_turns_of_one_session_go_on_over_both_gateways(pair: RunningService) -> None:
    wait_until(lambda: len(gateways(pair)) == 2, 30, "two gateways answer")
    session = f"s-{uuid.uuid4().hex}"
    history = 0
    for turn in range(10):
        answer = ask(pair, "quick", f"turn {turn}", session).json()
        history += len(f"User: turn {turn}\nAssistant:")
        assert answer["usage"]["prompt_tokens"] == history
        history += len(answer["choices"][0]["message"]["content"] + "\n")


def hosts(service: RunningService, model: str) -> list[dict[str, Any]]:
    return [host for host in service.admin()["models"] if host["model"] == model]


def test_S52_S53_sessions_stick_to_their_host_over_both_gateways_and_spread_over_all(pair: RunningService) -> None:
    wait_until(lambda: [h["state"] for h in hosts(pair, "wide")] == ["ready"] * 3, 60, "three hosts are ready")
    sessions = [f"s-{uuid.uuid4().hex}" for _ in range(40)]  # that one host owns none of them: 3 * (2/3)**40
    for session in sessions:
        ask(pair, "wide", "a first message of a length that fills some blocks of KV", session).raise_for_status()
    for session in sessions[:10]:  # 20 turns over two gateways: had one gone elsewhere, nothing would be cached there
        for turn in range(2):
            usage = ask(pair, "wide", f"turn {turn}", session).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 48
    wait_until(
        lambda: all(host["stats"]["generated_tokens"] > 0 for host in hosts(pair, "wide")), 10, "all hosts have worked"
    )


def test_a_session_of_a_killed_host_goes_on_at_its_siblings(pair: RunningService) -> None:
    sessions = [f"s-{uuid.uuid4().hex}" for _ in range(6)]
    for session in sessions:
        ask(pair, "wide", "hello", session).raise_for_status()
    kill_hard(hosts(pair, "wide")[1]["pid"])
    for session in sessions:
        answer = ask(pair, "wide", "again", session)
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] > 2 * len("User: hello")
    wait_until(lambda: [h["state"] for h in hosts(pair, "wide")] == ["ready"] * 3, 60, "the third host is back")


def test_every_replica_serves_the_same_monotone_metrics_and_wakes_nothing(pair: RunningService) -> None:
    before = pair.admin()["models"]
    wait_until(lambda: counters(scrape(pair)) == counters(scrape(pair)), 10, "both gateways have pushed")
    last = counters(scrape(pair))
    total = ("orchestrator_completion_tokens_total", (("model", "quick"), ("tenant", "acme")))
    assert last[total] >= 80
    for _ in range(20):
        now = counters(scrape(pair))
        assert all(now[key] >= value for key, value in last.items())
        last = now
    assert [model["state"] for model in pair.admin()["models"]] == [model["state"] for model in before]
    names = {name for name, _ in scrape(pair)}
    assert all(name.startswith("orchestrator_") for name in names)
    assert not any("s-" in value for _, labels in last for _, value in labels)


def test_counters_do_not_fall_when_a_gateway_dies(pair: RunningService) -> None:
    session = f"s-{uuid.uuid4().hex}"
    for turn in range(6):
        ask(pair, "quick", f"turn {turn}", session)
    wait_until(lambda: counters(scrape(pair)) == counters(scrape(pair)), 10, "both gateways have pushed")
    before = counters(scrape(pair))
    killed = next(iter(gateways(pair).values()))
    kill_hard(killed)
    wait_until(lambda: killed not in gateways(pair).values(), 30, "the dead gateway is not asked any more")
    after = counters(scrape(pair))
    assert all(after[key] >= value for key, value in before.items())
    assert ask(pair, "quick", "and now", session).status_code == 200
