"""``bench matrix`` without a service: the grid, the sums, the comparison, the picture."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import orchestrator.cli
from orchestrator.bench import drive, heatmap, matrix
from orchestrator.bench.matrix import Cell, CellResult, Failure, Turn
from policies.errors import ConfigError

CELL = Cell(concurrency=2, length_tokens=128, turns=2)
REFUSED = Turn(failure=Failure(429, "tenant_limit", "too many"))


def result(ttft: float | None, speed: float | None, **changed: object) -> CellResult:
    base = CellResult(
        model="m", concurrency=2, length_tokens=128, turns=2, status=matrix.MEASURED, requests=10,
        ttft_p50_seconds=ttft, tokens_per_second=speed,
    )  # fmt: skip
    return replace(base, **changed)


def exit_code(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["orchestrator", "bench", "matrix", *words])
    with pytest.raises(SystemExit) as ended:
        orchestrator.cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 95, 100]))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    assert matrix.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_nothing_has_no_percentile() -> None:
    assert matrix.percentile([], 50) is None


def test_numbers_are_sorted_and_each_once() -> None:
    assert matrix.numbers(" 8,1, 4,1", "--turns") == (1, 4, 8)


def test_the_grid_has_every_combination_once() -> None:
    cells = list(matrix.QUICK.cells())
    assert len(cells) == len(set(cells)) == 27


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--concurrency", "0,x,4"],
            "--concurrency '0,x,4': whole numbers of at least 1, separated by commas, are wanted; not one: '0', 'x'",
        ),
        (["--turns", ""], "not one: ''"),
        (["--lengths", "1.5"], "'1.5'"),
        (["--fail-above", "2"], "--fail-above 2 needs --compare"),
        (["--save", "/nowhere/at/all.json"], "there is no directory /nowhere/at"),
        (["--compare", "/nowhere/at/all.json"], "cannot read /nowhere/at/all.json"),
        (["--model", "nope"], "model 'nope' is not one of"),
        (["--key", "sk-nobody"], "the key is of no tenant of the config"),
    ],
)
def test_bad_input_is_said_before_anything_starts(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_without_matplotlib_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    monkeypatch.setattr(drive, "run", None)
    assert exit_code(monkeypatch, "--url", "http://127.0.0.1:1") == 2
    assert "pip install 'context-orchestrator[bench]'" in capsys.readouterr().err


def test_a_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    picture = str(tmp_path / "matrix.png")
    assert exit_code(monkeypatch, "--url", "http://127.0.0.1:1", "--picture", picture) == 3


@pytest.mark.parametrize(
    ("saved", "words", "code", "said"),
    [
        (result(1.0, 50.0), [], 0, "new ÷ saved"),
        (result(0.5, 50.0), [], 0, "worse"),
        (result(0.5, 50.0), ["--fail-above", "2"], 0, "worse"),
        (result(0.4, 50.0), ["--fail-above", "2"], 1, "2.50 times worse, --fail-above 2"),
        (result(1.0, 50.0, model="other"), [], 1, "nothing was compared"),
        (result(1.0, 50.0, turns=9), [], 2, "no cell of this grid"),
    ],
)
def test_the_exit_code_of_a_comparison(
    saved: CellResult,
    words: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    async def run(*_: object) -> drive.Outcome:
        return drive.Outcome([result(1.0, 50.0)], {}, 0)

    monkeypatch.setattr(drive, "run", run)
    monkeypatch.chdir(tmp_path)
    Path("saved.json").write_text(json.dumps({"bench": "matrix", "grid": {"max_tokens": 32}, "cells": [asdict(saved)]}))
    grid = ["--concurrency", "2", "--lengths", "128", "--turns", "2", "--url", "http://127.0.0.1:1"]
    assert exit_code(monkeypatch, *grid, "--compare", "saved.json", *words) == code
    printed = capsys.readouterr()
    assert said in " ".join((printed.out + printed.err).split())


def test_the_ruler_turns_tokens_into_words() -> None:
    ruler = matrix.ruler([(8, 36), (40, 100)], window_tokens=200, system=True)
    assert (ruler.template_tokens, ruler.word_tokens) == (20, 2)
    assert ruler.words(120) == 50
    assert ruler.words(3) == 1
    # 128, then a template and 8 words, and two answers of 10
    assert ruler.fits(CELL, max_tokens=10)
    assert not ruler.fits(CELL, max_tokens=19)
    assert replace(ruler, window_tokens=None).fits(CELL, max_tokens=1000)


def test_texts_are_drawn_from_their_seed_and_differ_at_once() -> None:
    first, again, other = (matrix.opening(seed, 50, True) for seed in ("a/0", "a/0", "a/1"))
    assert first == again
    assert first[0]["role"] == "system" and first[0]["content"] != other[0]["content"]
    assert first[1]["content"] != other[1]["content"]
    assert len(first[1]["content"].split()) == 50
    assert [message["role"] for message in matrix.opening("a/0", 5, system=False)] == ["user"]


def test_turns_add_up() -> None:
    turns = [
        Turn(1.0, (0.1, 0.3), prompt_tokens=100, cached_tokens=0, completion_tokens=3),
        Turn(3.0, (0.2, 0.2), prompt_tokens=300, cached_tokens=100, completion_tokens=3),
        REFUSED,
        Turn(failure=Failure(0, "engine_error", "broke")),
    ]
    found = matrix.summed("m", CELL, turns, seconds=2.0, kv_use_ratio=0.25)
    assert (found.cell, found.status, found.requests) == (CELL, matrix.MEASURED, 4)
    assert (found.ttft_p50_seconds, found.gap_p50_seconds) == (2.0, pytest.approx(0.2))
    assert found.ttft_p95_seconds == pytest.approx(2.9)
    assert (found.tokens_per_second, found.reuse_ratio, found.kv_use_ratio) == (3.0, 0.25, 0.25)
    assert (found.refusals, found.errors) == ({"tenant_limit": 1}, {"engine_error": 1})
    assert (found.refused, found.failed_ratio) == (1, 0.5)


def test_a_cell_of_refusals_has_no_figures() -> None:
    found = matrix.summed("m", CELL, [REFUSED, REFUSED], seconds=0.1, kv_use_ratio=None)
    assert found.ttft_p50_seconds is found.tokens_per_second is found.reuse_ratio is None
    assert found.refused == 2


@pytest.mark.parametrize(
    "turn", [Turn(failure=Failure(400, "context_length_exceeded", "")), Turn(1.0, cut=True, prompt_tokens=9)]
)
def test_what_does_not_fit_is_too_long_and_no_error(turn: Turn) -> None:
    found = matrix.summed("m", CELL, [Turn(1.0, prompt_tokens=9), turn], seconds=1.0, kv_use_ratio=None)
    assert found == matrix.too_long("m", CELL)


def test_another_400_is_an_error() -> None:
    found = matrix.summed("m", CELL, [Turn(failure=Failure(400, "invalid_request", ""))], 1.0, None)
    assert found.errors == {"invalid_request": 1}


@pytest.mark.parametrize(
    ("new", "worse"),
    [
        (result(2.0, 50.0), 1.0),
        (result(1.0, 100.0), 0.5),
        (result(3.0, 50.0), 1.5),
        (result(2.0, 25.0), 2.0),
        (result(None, None, refusals={"tenant_limit": 10}), math.inf),
        (result(0.1, 500.0, errors={"engine_error": 5}), math.inf),
        (result(2.0, 50.0, refusals={"tenant_limit": 1}), 1.0),  # one in ten is chance
        (matrix.too_long("m", CELL), math.inf),
    ],
)
def test_how_many_times_worse(new: CellResult, worse: float) -> None:
    (change,) = matrix.compare([new], [result(2.0, 50.0)])
    assert change.worse == pytest.approx(worse)


def test_only_cells_of_both_runs_are_compared() -> None:
    saved = [result(2.0, 50.0), replace(matrix.too_long("m", CELL), turns=9)]
    new = [result(1.0, 50.0, model="other"), result(1.0, 50.0, turns=7), result(1.0, 50.0, turns=9)]
    assert matrix.compare(new, saved) == []


def test_a_saved_run_reads_back_and_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    cells = [result(2.0, 50.0, refusals={"tenant_limit": 2}), matrix.too_long("m", CELL)]
    body = {"bench": "matrix", "grid": {"max_tokens": 8}, "cells": [asdict(cell) for cell in cells]}
    path.write_text(json.dumps(body))
    assert matrix.read_saved(path, 8) == cells
    with pytest.raises(ConfigError, match="max_tokens 8, not 32"):
        matrix.read_saved(path, 32)
    for wrong in ("[]", "{", json.dumps(body | {"bench": "swap"}), json.dumps(body | {"cells": [{"model": "m"}]})):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"saved\.json"):
            matrix.read_saved(path, 8)


def test_the_picture_takes_cells_without_figures(tmp_path: Path) -> None:
    results = [
        result(0.5, 50.0),
        matrix.too_long("m", replace(CELL, concurrency=4)),
        matrix.summed("m", replace(CELL, turns=1), [REFUSED], 0.1, None),
    ]
    heatmap.draw(tmp_path / "m.png", results, "2026-11-29")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
