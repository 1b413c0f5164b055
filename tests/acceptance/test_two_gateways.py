"""Two gateways in the quick form, and that its judge would see a session moved without a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.placement import GatewayLoad, Seen, risen

ROOT = Path(__file__).parents[2]


@pytest.mark.service
@pytest.mark.timeout(300)
def test_two_gateways_lose_and_double_nothing_and_move_nobody_without_a_reason() -> None:
    command = [sys.executable, "-m", "tests.acceptance.two_gateways", "--quick"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "turns lost 0, doubled 0"
    for shown in ("spilled", "home again", "gateway killed after the first token", "counted by the gateways"):
        assert shown in ended.stdout


def test_the_rule_is_that_of_the_design() -> None:
    load = GatewayLoad()
    assert load.must_spill("A", 0, 3) == ""  # 1 of 1 on three hosts: at most 1
    load.add("A", 0)
    assert "host 0 has 1 of the 1 generations of gateway A, at most 1" in load.must_spill("A", 0, 3)
    assert load.must_spill("A", 1, 3) == load.must_spill("B", 0, 3) == ""  # another host; another gateway
    load.add("A", 1)
    assert load.must_spill("A", 0, 3) == ""  # 3 on three hosts: at most 2


def test_the_judge_sees_a_move_without_a_reason_and_a_reason_without_a_move() -> None:
    assert Seen("s", 2, "A", 1, "").problem(1) == Seen("s", 2, "A", 2, "hot").problem(1) == ""
    assert "moved from host 1 to 2 without a reason" in Seen("s", 2, "A", 2, "").problem(1)
    assert "stayed on its hot host" in Seen("s", 2, "A", 1, "hot").problem(1)


def test_a_place_is_seen_only_when_it_is_plain() -> None:
    assert risen([0, 2, 0], [0, 3, 0]) == 1
    assert risen([0, 2, 0], [0, 2, 0]) is None  # too late: it is over
    assert risen([0, 2, 0], [1, 3, 0]) is None
