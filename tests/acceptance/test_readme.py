"""The README's commands, copied literally (but for the port), against a service with the demo config."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service import ADMIN, RunningService

pytestmark = [pytest.mark.service, pytest.mark.models, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    section = README.split("## First five minutes")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    service = RunningService(ROOT / "orchestrator" / "demo.yaml", tmp_path_factory.mktemp("readme"))
    service.start()
    yield service
    service.stop()


def run(command: list[str] | str, service: RunningService) -> str:
    environment = os.environ | {"ORCHESTRATOR_URL": service.url, "ORCHESTRATOR_ADMIN_KEY": ADMIN}
    ended = subprocess.run(
        command, shell=isinstance(command, str), cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return ended.stdout


def test_the_first_five_minutes(demo: RunningService) -> None:
    answers = []
    for block in blocks("sh"):
        # the tests may run in another environment than .venv
        command = block.replace("http://127.0.0.1:8000", demo.url)
        command = command.replace(".venv/bin/orchestrator", f"{sys.executable} -m orchestrator.cli")
        answers.append(run(command, demo))
    models, completion, tour, operations = answers
    listed = {model["id"]: model for model in json.loads(models)["data"]}
    assert set(listed) == {"smollm2-135m-instruct", "gemma-3-270m"}
    assert listed["gemma-3-270m"]["chat_template"] == "fallback"
    assert json.loads(completion)["choices"][0]["message"]["content"]
    first, _, streamed = tour.partition("\n" if tour.startswith("{") and "}\n" in tour else "}data:")
    assert "chat.completion" in first
    assert streamed.rstrip().endswith("[DONE]") and '"finish_reason":"' in streamed
    assert "gemma-3-270m" in operations and "draining" in operations


def test_the_openai_client(demo: RunningService) -> None:
    (script,) = blocks("python")
    assert run([sys.executable, "-c", script.replace("http://127.0.0.1:8000", demo.url)], demo).strip()
