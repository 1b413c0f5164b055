"""``bench swap``'s groups on made-up models: they measure what they say, and stop when something hangs or changes."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.fake import FakeSettings
from orchestrator.bench import asking, cold, cold_process, cycles, engines, hosting, neighbours, swap, switching, waking
from policies.errors import OrchestratorError
from tests.engine_helpers import tiny_llama

TARGETS = {
    "wake_vs_memcpy": "<=1.2",
    "wake_vs_huge_memcpy": "",
    "sleep_vs_wake": "<=0.3",
    "memory_returned": "<=1.05",
    "park_vs_memcpy": "<=2",
    "switch_with_session": "<=0.2",
    "switch_ttft": "<=1.5",
    "switch_ttft_to_one": "<=1.5",
    "switch_ttft_to_two": "<=1.5",
    "cold_vs_floor": "<=1.5",
    "cold_first_load": "",
    "cold_prepared": "<=0.6",
    "neighbour_ttft": "<=1.5",
    "cycles_memory": "<=1.02",
    "cycles_fake": "",
}
COLD = {"first": cold_process.first, "known": cold_process.known, "floor": cold_process.floor}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("models")
    return tiny_llama(place / "one"), tiny_llama(place / "two")


class InThisProcess:
    """A prepared process that is none."""

    def __init__(self, module: str, *args: str) -> None:
        self._path, self._recipes = map(Path, args[1:])

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, word: str) -> cold_process.Moments | None:
        return cold_process.known(self._path, self._recipes) if word == "load" else None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of the made-up models' vocabulary, and a few samples of everything."""
    real = engines.tokens
    monkeypatch.setattr(engines, "tokens", lambda seed, count: [token % 250 for token in real(seed, count)])
    for module, name, value in (
        (waking, "CYCLES", 2), (waking, "SESSION_SAMPLES", 1), (waking, "HISTORY_TOKENS", 100),
        (switching, "ROUND_TRIPS", 1), (neighbours, "ROUNDS", 1), (neighbours, "LEAST", 3),
        (cold, "SAMPLES", 1), (cold, "FIRST_SAMPLES", 1), (cold, "Asked", InThisProcess),
        (cycles, "CYCLES", 12), (cycles, "SETTLED_CYCLES", 2), (cycles, "CLEAR_MARGIN", 1e-6),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def test_every_section_is_there_with_its_target(
    models: tuple[Path, Path], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups as they run, but in a thread of this process, where ``small`` counts."""
    one, two = models
    monkeypatch.setattr(neighbours.random, "randrange", lambda low, high: 5)
    monkeypatch.setattr(neighbours, "loader", lambda path: ["sleep", "0.2"])

    def here(module: str, what: str, *args: str) -> Any:
        work: dict[str, Callable[[], object]] = {
            "cycles": lambda: waking._cycles(one),
            "sessions": lambda: waking._sessions(one),
            str(one): lambda: asyncio.run(switching._switches([one, two])),
            "resident": lambda: neighbours._resident(one, two),
            "real": lambda: cycles._real([one, two]),
            "fake": lambda: asyncio.run(cycles._fake(10)),
            **{name: lambda load=load: load(*map(Path, args)) for name, load in COLD.items()},
        }
        return json.loads(json.dumps(engines.in_thread(work[what])))

    for module in (waking, switching, cold, neighbours, cycles):
        monkeypatch.setattr(module, "measured", here)
    said: list[str] = []
    sections = swap.run(one, two, said.append)
    assert {section.name: section.target for section in sections} == TARGETS
    assert all(section.ours > 0 and section.baseline > 0 and section.limit for section in sections)
    assert len(said) == 5


async def test_a_cycle_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "HANGING_SECONDS", 0.05)
    real = hosting.new_host
    monkeypatch.setattr(hosting, "new_host", lambda path, fake: real(path, fake=FakeSettings(wake_seconds=0.2)))
    with pytest.raises(OrchestratorError, match=r"cycle 0 hangs"):
        await cycles._fake(3)


async def test_a_generation_left_in_flight_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hosting.Stream.answer

    async def leaky(self: hosting.Stream, prompt: list[int], new: int) -> tuple[float, list[int]]:
        answered = await real(self, prompt, new)
        self._host._channels.own(self._gateway, ("ghost", 0))
        return answered

    monkeypatch.setattr(hosting.Stream, "answer", leaky)
    with pytest.raises(OrchestratorError, match=r"1 generations are in flight after cycle 0"):
        await cycles._fake(3)


def test_an_answer_that_changes_is_an_error(models: tuple[Path, Path], small: None) -> None:
    sleeper = cycles._sleeper(models[0])
    sleeper.check(0)
    sleeper.said[-1] += 1
    with pytest.raises(OrchestratorError, match=r"one answers .* after 7 cycles"):
        sleeper.check(7)


def test_creeping_memory_misses_its_target() -> None:
    flat, creeping = [100] * 300, [100 + cycle // 20 for cycle in range(300)]
    assert cycles.memory_section(flat).met is True
    assert cycles.memory_section(creeping).met is False
    assert cycles.memory_section([500] * 30 + flat).met is True  # it had not settled


def test_ttft_is_compared_at_its_90th_percentile() -> None:
    alone, beside = [0.1] * 89 + [0.2] * 11, [0.1] * 100 + [0.9] * 20
    found = neighbours.ttft_section(beside, alone, [8.0])
    assert (found.baseline, found.ours, found.samples, found.met) == (0.2, 0.9, 100, False)


def test_the_neighbour_loads_as_hosts_do_and_fails_aloud(models: tuple[Path, Path]) -> None:
    assert subprocess.run(neighbours.loader(models[0]), check=False, timeout=60).returncode == 0
    broken = subprocess.run(neighbours.loader(models[0] / "none"), capture_output=True, check=False, timeout=60)
    assert broken.returncode == 1 and b"no config.json" in broken.stderr


def test_a_process_that_dies_says_why() -> None:
    with asking.Asked("orchestrator.bench.engines", huge_pages=False) as process:
        process.ask(asking.READY)
        with pytest.raises(OrchestratorError, match=r"asked to nonsense: KeyError: 'nonsense'"):
            process.ask("nonsense")
