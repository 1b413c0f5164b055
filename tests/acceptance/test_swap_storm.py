"""The swap storm in its quick form, and that its judge would see what is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.storm_clients import MODELS, Call, Garbage, Outcome, Reference, code_of, judge

ROOT = Path(__file__).parents[2]
USAGE = {
    "prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28, "prompt_tokens_details": {"cached_tokens": 16}
}  # fmt: skip


@pytest.mark.service
@pytest.mark.models
@pytest.mark.timeout(400)
def test_the_swap_storm_loses_nothing_and_says_nothing_wrong() -> None:
    command = [sys.executable, "-m", "tests.acceptance.swap_storm", "--quick"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("lost 0, wrong 0, answered ")
    for shown in (*MODELS, "random weights", "killed host:", "killed controller"):
        assert shown in ended.stdout


def heard(**fields: Any) -> Call:
    """A call that was answered in full, but for ``fields``."""
    whole: dict[str, Any] = {"finished": ["length"], "dones": 1, "usage": USAGE, "text": "eight tokens"}
    return Call(1, "m", "", "hello", 8, **whole | fields)


def test_the_judge_tells_answers_from_refusals() -> None:
    assert judge(heard()) == (Outcome.ANSWERED, "")
    assert judge(heard(refusals=["model_loading"], finished=[], dones=0)) == (Outcome.REFUSED, "model_loading")


@pytest.mark.parametrize(
    "fields",
    [
        {"finished": [], "dones": 0},  # the stream broke off
        {"finished": []},
        {"dones": 0},
        {"finished": ["length", "length"]},
        {"refusals": ["host_lost"]},  # an error, and an end that looks like success
        {"refusals": ["host_lost", "host_lost"], "finished": [], "dones": 0},
        {"usage": None},
        {"usage": USAGE | {"completion_tokens": 9, "total_tokens": 29}},  # more than was asked for
        {"usage": USAGE | {"completion_tokens": 7, "total_tokens": 27}},  # "length", and shorter
        {"usage": USAGE | {"total_tokens": 27}},
        {"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 21}}},
    ],
)
def test_the_judge_sees_what_is_lost(fields: dict[str, Any]) -> None:
    assert judge(heard(**fields))[0] is Outcome.LOST


def test_an_answer_that_differs_from_the_reference_is_wrong() -> None:
    for expected, wrong in (("eight tokens", False), ("eight tokns", True)):
        call = heard(expected=Reference("hello", 8, (expected, "length", 20, 8)))
        call.settle(*judge(call))
        assert bool(call.wrong) is wrong


def test_an_error_without_a_code_is_no_refusal() -> None:
    error = {"message": "m", "type": "t", "param": None, "code": "c"}
    assert code_of({"error": error}) == "c"
    for body in ("Internal Server Error", {"detail": "x"}, {"error": error | {"code": None}}, {"error": "no"}):
        with pytest.raises(Garbage):
            code_of(body)
