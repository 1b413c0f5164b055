"""The config file: precedence, and what a bad one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config import Config, hash_key, load_config
from policies.errors import ConfigError
from policies.types import Tier

GOOD = """
http: {port: 9000}
devices: [{name: d, memory: 1GiB}]
models: [{name: m, source: fake, memory: 512MiB}]
tenants: [{name: t, tier: batch, demo_key: sk-x}]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_values_and_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert (config.http.port, config.http.host) == (9000, "127.0.0.1")
    assert config.models[0].memory == 512 * 2**20
    assert config.tenants[0].tier is Tier.BATCH
    assert config.tenants[0].key_hashes == (hash_key("sk-x"),)


def test_flag_beats_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, GOOD)
    monkeypatch.setenv("ORCHESTRATOR_HTTP__PORT", "9001")
    monkeypatch.setenv("ORCHESTRATOR_HTTP__STREAM_HOLD_SECONDS", "2")
    assert load_config(path).http.port == 9001
    merged = load_config(path, {"http": {"port": 9002}})
    assert (merged.http.port, merged.http.stream_hold_seconds) == (9002, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("http: {port", "htp: {port"), "htp: unknown key; did you mean 'http'?"),
        (("memory: 512MiB", "memory: 512MiB, max_len: 3"), "did you mean 'max_model_len'?"),
        (("{port: 9000}", "{prt: 9000}"), "http.prt: unknown key; did you mean 'port'?"),
        (("tier: batch", "tier: gold"), "one of interactive, standard, batch"),
        (("port: 9000", "port: 90000"), "http.port"),
        (("port: 9000", "port: 9000, host: 0.0.0.0"), "loopback"),
        (("memory: 512MiB", "memory: lots"), "models.0.memory"),
        (("source: fake", "source: dir, fake: {}"), "source: fake"),
        (("memory: 512MiB", "memory: 512MiB, kv_host: 1GiB"), "kv_host: 1073741824 bytes are part of memory"),
        (("memory: 512MiB", "memory: 512MiB, ordering: lifo"), "'lifo' is not one of fcfs, priority, sjf"),
        (("memory: 1GiB}", "memory: 1GiB, kind: cuda}"), "not built yet"),
        (("http: {port", "pool: {policy: lfu}\nhttp: {port"), "'lfu' is not one of lru"),
        (("demo_key: sk-x}", "demo_key: sk-x}, {name: t}"), "twice: t"),
        (("demo_key: sk-x}", "demo_key: sk-x}, {name: u, demo_key: sk-x}"), "share an API key"),
    ],
)
def test_a_bad_file_says_what_and_where(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, GOOD.replace(*change)))
    assert said in caught.value.message
    assert "should have at least" not in caught.value.message  # what only follows from it is not said
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["- 1", "a: [", ""])
def test_no_mapping_at_all(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(write(tmp_path, text))


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(Path("/nonexistent.yaml"))


def test_a_config_survives_the_way_to_a_gateway(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "state_dir: ~/state\n" + GOOD))
    assert config.state_dir == Path.home() / "state"
    assert Config.model_validate_json(config.model_dump_json()) == config
