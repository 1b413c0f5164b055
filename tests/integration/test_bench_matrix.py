"""``bench matrix`` against real services with fake models, as a user types it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.service import ADMIN, RunningService

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]
CONFIG = Path(__file__).parents[1] / "data" / "fake.yaml"
OWN = """
devices: [{name: cpu0, memory: 400MiB}]
models: [{name: one, source: fake, memory: 160MiB, preload: true}, {name: two, source: fake, memory: 160MiB}]
tenants: [{name: acme, demo_key: sk-demo-acme}, {name: operator, demo_key: sk-demo-admin, admin: true}]
"""


def start(place: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", "bench", "matrix", *words],
        cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip


def matrix(place: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """What it said on stdout and stderr."""
    started = start(place, *words)
    said, errors = started.communicate()
    assert started.returncode == code, errors
    return said, errors


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that starts a service of its own. Begun early, looked at last: it takes its time beside the other tests."""
    place = tmp_path_factory.mktemp("own")
    (place / "own.yaml").write_text(OWN)
    started = start(
        place, "--config", "own.yaml", "--concurrency", "2", "--lengths", "64", "--turns", "2",
        "--max-tokens", "4", "--cell-seconds", "0",
    )  # fmt: skip
    yield started, place
    if started.poll() is None:
        started.terminate()
        started.communicate()


def running(service: RunningService, key: str = "sk-demo-acme") -> list[str]:
    return ["--url", service.url, "--key", key, "--config", str(CONFIG)]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def left_sessions(service: RunningService, tenant: str) -> list[str]:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    page = httpx.get(f"{service.url}/admin/sessions?tenant={tenant}&limit=1000", headers=headers, timeout=30).json()
    return [each["session_id"] for each in page["sessions"] if each["session_id"].startswith("bench-")]


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.mark.usefixtures("own_run")
def test_a_grid_and_what_it_says(fake_service: RunningService, tmp_path: Path) -> None:
    words = [*running(fake_service), "--quick", "--model", "quick", "--cell-seconds", "0", "--save", "new.json"]
    said, errors = matrix(tmp_path, *words)
    saved = read(tmp_path / "new.json")
    assert saved["bench"] == "matrix" and {"commit", "machine", "versions"} <= set(saved)
    cells = saved["cells"]
    assert len(cells) == 27 and errors.count("tokens/s") == 27 and "TOKENS/S" in said
    for cell in cells:
        turns, length, concurrency = cell["turns"], cell["length_tokens"], cell["concurrency"]
        assert cell["requests"] == turns * concurrency and not cell["refusals"] and not cell["errors"]
        assert cell["completion_tokens"] == 8 * cell["requests"]
        assert 0 < cell["ttft_p50_seconds"] <= cell["ttft_p95_seconds"] < cell["seconds"]
        assert cell["tokens_per_second"] == pytest.approx(cell["completion_tokens"] / cell["seconds"])
        if turns == 1:  # cells and sessions share no prefix
            assert cell["cached_tokens"] == 0
            assert cell["prompt_tokens"] == pytest.approx(length * concurrency, abs=6 * concurrency)
        else:  # all whole blocks of the first turn's prompt, at least
            assert cell["cached_tokens"] >= (turns - 1) * concurrency * (length // 16 * 16 - 16)
            assert cell["reuse_ratio"] > 0
    width, height = png_size(tmp_path / "matrix.png")
    assert 600 < width < 3000 and 600 < height < 3000
    assert left_sessions(fake_service, "acme") == []


def test_against_a_baseline(fake_service: RunningService, tmp_path: Path) -> None:
    words = [
        *running(fake_service), "--model", "slow", "--concurrency", "1", "--lengths", "32", "--turns", "1,2",
        "--max-tokens", "4", "--cell-seconds", "0",
    ]  # fmt: skip
    shown = json.loads(matrix(tmp_path, *words, "--save", "base.json", "--json")[0])
    assert shown == read(tmp_path / "base.json") and shown["changes"] == []

    better = shown | {"cells": [cell | {"tokens_per_second": 1e5} for cell in shown["cells"]]}
    (tmp_path / "better.json").write_text(json.dumps(better))
    said, errors = matrix(tmp_path, *words, "--compare", "better.json", "--fail-above", "2", code=1)
    assert "new ÷ saved" in said and said.count("worse") == 3  # two cells, and the title
    assert "times worse, --fail-above 2" in errors


def test_refusals_are_counted_and_kv_use_is_seen(fake_service: RunningService, tmp_path: Path) -> None:
    """The tenant may have one request at a time."""
    matrix(
        tmp_path, *running(fake_service, "sk-demo-limited"), "--model", "slow", "--concurrency", "1,3",
        "--lengths", "128", "--turns", "2", "--max-tokens", "16", "--cell-seconds", "1.8", "--save", "limited.json",
    )  # fmt: skip
    alone, crowded = read(tmp_path / "limited.json")["cells"]
    assert alone["refusals"] == {} and alone["requests"] >= 4
    assert alone["kv_use_ratio"] > 0
    assert set(crowded["refusals"]) == {"tenant_limit"} and crowded["errors"] == {}
    # in each round one session goes on and the others end with their first turn, or so
    assert crowded["refusals"]["tenant_limit"] >= crowded["requests"] / 3
    assert crowded["completion_tokens"] > 0
    assert left_sessions(fake_service, "limited") == []


def test_what_does_not_fit_is_too_long(fake_service: RunningService, tmp_path: Path) -> None:
    small = ["--concurrency", "1", "--turns", "1", "--max-tokens", "4", "--cell-seconds", "0", "--save", "it.json"]
    # a window of 256 tokens, known beforehand; a KV pool of 512 tokens, known from the answer
    for model, lengths in (("small", "32,400"), ("tight", "32,900")):
        said, _ = matrix(tmp_path, *running(fake_service), "--model", model, "--lengths", lengths, *small)
        assert [cell["status"] for cell in read(tmp_path / "it.json")["cells"]] == ["measured", "too long"]
        assert "too long" in said
    _, errors = matrix(tmp_path, *running(fake_service), "--model", "broken", *small, code=1)
    assert "not measured: broken" in errors


def test_a_service_of_its_own_is_stopped(own_run: tuple[subprocess.Popen[str], Path]) -> None:
    run, place = own_run
    said, errors = run.communicate()
    assert run.returncode == 0, errors
    assert "could not be removed" not in errors
    for model in ("one", "two"):  # a grid each
        assert f"{model}: TTFT" in said
        png_size(place / f"matrix-{model}.png")
    words = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in words if "orchestrator-bench-" in line]
