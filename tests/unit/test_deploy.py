"""What is in deploy/: generated files are fresh, hand-written ones parse and name things that exist."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from orchestrator.config import load_config
from orchestrator.schema import example_text, schema_text

DEPLOY = Path(__file__).parents[2] / "deploy"
ROOT = DEPLOY.parent


def test_the_schema_is_fresh() -> None:
    committed = (DEPLOY / "config.schema.json").read_text()
    assert committed == schema_text(), "run: python -m orchestrator.schema"
    Draft202012Validator.check_schema(json.loads(committed))


def test_the_example_is_fresh_and_means_the_defaults() -> None:
    path = DEPLOY / "config.example.yaml"
    assert path.read_text() == example_text(), "run: python -m orchestrator.schema"
    config = load_config(path)
    assert config.state_dir.is_absolute()
    assert config.http == type(config.http)()
    assert config.sessions == type(config.sessions)() and config.pool == type(config.pool)()


def test_every_key_of_the_example_is_explained() -> None:
    lines = (DEPLOY / "config.example.yaml").read_text().splitlines()
    bare = [line for line in lines if ": " in line and "#" not in line]
    assert bare == []


@pytest.mark.parametrize("name", ["compose.yaml", "rayservice.yaml"])
def test_yaml_parses(name: str) -> None:
    assert isinstance(yaml.safe_load((DEPLOY / name).read_text()), dict)


def test_the_ray_service_names_our_application_and_ray() -> None:
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    serve: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    module, _, name = serve["applications"][0]["import_path"].partition(":")
    # in a process of its own: importing Ray Serve warns, and warnings are errors here
    subprocess.run([sys.executable, "-c", f"from {module} import {name}; assert callable({name})"], check=True)
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == importlib.metadata.version("ray")


def test_the_dockerfile_copies_every_package_and_does_not_run_as_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for package in ("orchestrator", "model_pool", "engine", "session_store", "policies"):
        assert f"COPY {package} {package}" in text
        assert (ROOT / package).is_dir()
    assert "USER orchestrator" in text and "AS cpu" in text and "AS cuda" in text


def test_compose_keeps_redis_private_and_durable() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert "ports" not in services["redis"]
    assert "--requirepass" in services["redis"]["command"] and "--appendonly" in services["redis"]["command"]
    assert all(port.startswith("127.0.0.1:") for port in services["orchestrator"]["ports"])
