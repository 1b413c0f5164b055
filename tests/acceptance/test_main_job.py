"""The main job in its quick form, and that its counter would see a lost and a doubled turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.client import Turn
from tests.acceptance.reader import count_turns

ROOT = Path(__file__).parents[2]


@pytest.mark.service
@pytest.mark.models
@pytest.mark.timeout(600)
def test_the_main_job_loses_and_doubles_nothing() -> None:
    command = [sys.executable, "-m", "tests.acceptance.main_job", "--quick"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "turns lost 0, doubled 0"
    for fault in ("host", "controller", "gateway"):
        assert f"{fault} killed" in ended.stdout


def acknowledged(number: int) -> Turn:
    turn = Turn(number, "m", f"nonce{number}", f"(nonce{number}) hello", 8)
    turn.text = f"answer {number}"
    return turn


def stored(turn: Turn, turn_id: str) -> list[dict[str, Any]]:
    common = {"turn_id": turn_id}
    return [
        {"item_id": f"{turn_id}-0", "role": "user", "content": turn.prompt, **common},
        {"item_id": f"{turn_id}-a", "role": "assistant", "content": turn.text, "model": "m", **common},
    ]


def test_the_counter_accepts_what_was_acknowledged() -> None:
    turns = [acknowledged(1), acknowledged(2)]
    count = count_turns(turns, [*stored(turns[0], "a"), *stored(turns[1], "b")])
    assert (count.lost, count.doubled, count.strange) == ((), (), ())


def test_the_counter_sees_a_lost_and_a_doubled_turn() -> None:
    turns = [acknowledged(1), acknowledged(2), acknowledged(3)]
    items = [*stored(turns[0], "a"), *stored(turns[0], "b"), *stored(turns[2], "c")]
    count = count_turns(turns, items)
    assert (count.lost, count.doubled) == ((2,), (1,))


def test_the_counter_sees_another_answer_another_order_and_a_stranger() -> None:
    turns = [acknowledged(1), acknowledged(2)]
    changed = stored(turns[0], "a")
    changed[1]["content"] = "answer 1, cut sho"
    assert count_turns(turns, [*changed, *stored(turns[1], "b")]).lost == (1,)
    swapped = count_turns(turns, [*stored(turns[1], "b"), *stored(turns[0], "a")])
    assert not swapped.lost and "order" in swapped.strange[0]
    stranger = count_turns(turns[:1], [*stored(turns[0], "a"), *stored(turns[1], "b")])
    assert len(stranger.strange) == 2
