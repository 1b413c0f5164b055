"""Crashing turns in the quick form; that its judge sees what is lost, doubled or half, and when a kill fell."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.crash_clients import Api, Attempt, CrashTurn, Talk, session_of
from tests.acceptance.crash_kills import GATEWAY, HOST, VICTIMS, Aim, Kill, Moment, Struck, moment_of, plan
from tests.acceptance.crash_reader import Count, History, Look, count_sessions, count_talk, is_kept

ROOT = Path(__file__).parents[2]
NOTHING = Look()


@pytest.mark.service
@pytest.mark.timeout(300)
def test_no_turn_is_lost_doubled_or_half_whatever_dies_under_it() -> None:
    command = [sys.executable, "-m", "tests.acceptance.crash_turns", "--quick"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].endswith("under 6 kills: lost 0, doubled 0, half 0, strange 0")
    for shown in (*(f"{victim} (2 killed)" for victim in VICTIMS), "(fake)"):
        assert shown in ended.stdout


def asked(talk: Talk, number: int, *, acknowledged: bool = True) -> CrashTurn:
    text = f"t{number}"
    turn = CrashTurn(talk, number, text, f"say {text}", text, True, (talk.session,))
    turn.acknowledged, turn.gave_up, turn.text = acknowledged, not acknowledged, text if acknowledged else ""
    talk.turns.append(turn)
    return turn


def kept(turn: CrashTurn, turn_id: str, answer: str | None = None) -> list[dict[str, Any]]:
    """As it is stored: the turn is named by the items' ids, the content is plain text."""
    said = (("user", turn.prompt), ("assistant", turn.expected if answer is None else answer))
    bodies = [{"type": "message", "role": role, "content": text} for role, text in said]
    return [{"v": 2, "id": f"msg_{turn_id}_{n}", "at": 1.0, "item": body} for n, body in enumerate(bodies)]


def history(*turns: list[dict[str, Any]]) -> History:
    items = [item for turn in turns for item in turn]
    ids = [item["id"].split("_")[1] for item in items]
    return History(items, {turn_id: f"7 1 0 {ids.count(turn_id)}\n{{}}" for turn_id in ids})


def counted(talk: Talk, **histories: History) -> tuple[Count, Count]:
    return count_talk(talk, histories), count_sessions(histories, talk.turns)


@pytest.fixture
def talk() -> Talk:
    return Talk("s", Api.CHAT, "echo", "fake", "s")


def test_what_was_given_up_may_be_kept_whole(talk: Talk) -> None:
    one, two, three = asked(talk, 1), asked(talk, 2, acknowledged=False), asked(talk, 3)
    count, everywhere = counted(talk, s=history(kept(one, "a"), kept(two, "b"), kept(three, "c")))
    assert (count.acknowledged, count.given_up, count.kept) == (2, 1, 1)
    assert count.problems == everywhere.problems == []
    count, everywhere = counted(talk, s=history(kept(one, "a"), kept(three, "c")))
    assert (count.kept, count.problems, everywhere.problems) == (0, [], [])


def test_the_counter_sees_a_lost_a_changed_and_a_doubled_turn(talk: Talk) -> None:
    one, two, three = asked(talk, 1), asked(talk, 2), asked(talk, 3)
    stored = history(kept(two, "b", "anoth"), kept(three, "c"), kept(three, "d"))
    count, everywhere = counted(talk, s=stored)
    assert (count.lost, count.doubled) == (["t1", "t2"], ["t3"])
    assert len(everywhere.doubled) == 2 and len(everywhere.half) == 1  # a prompt twice, a prompt of two turns
    assert not is_kept(one, {"s": stored})


def test_the_counter_sees_a_turn_doubled_in_a_fork(talk: Talk) -> None:
    one = asked(talk, 1)
    _, everywhere = counted(talk, s=history(kept(one, "a")), fork=history(kept(one, "b")))
    assert len(everywhere.doubled) == 1
    _, everywhere = counted(talk, s=history(kept(one, "a")), fork=History(kept(one, "a"), {}))
    assert everywhere.problems == []  # a fork has its turns from where it came from


def test_the_counter_sees_half_turns_another_order_and_strangers(talk: Talk) -> None:
    one, two = asked(talk, 1), asked(talk, 2)
    stored = kept(one, "a"), kept(two, "b")
    for items in ([*stored[0], stored[1][0]], [*stored[0], stored[1][1]]):
        assert counted(talk, s=history(items))[1].half
    assert counted(talk, s=History([*stored[0], *stored[1]], {"a": "7 1 0 2\n{}"}))[1].half  # no record
    assert counted(talk, s=History(stored[0], {"a": "7 1 0 2\n{}", "b": "7 2 2 2\n{}"}))[1].half  # no items
    assert counted(talk, s=history(*reversed(stored)))[0].strange
    talk.turns.remove(two)
    assert counted(talk, s=history(*stored))[1].strange


def struck(talk: Talk, number: int = 1, pieces: int = 0, before: Look = NOTHING) -> Struck:
    return Struck(Attempt(asked(talk, 1), number, True), pieces, before, frozenset({"old"}), number == 1)


def test_the_moment_of_a_kill(talk: Talk) -> None:
    kill = Kill(GATEWAY, Aim.SENT, 1, at_ms=1000, dead_ms=1100)
    leased, recorded = Look(lease_turn="a"), Look(turn="a", committed_ms=990)
    assert moment_of(kill, struck(talk), NOTHING) is Moment.BEFORE
    assert moment_of(kill, struck(talk, before=leased), leased) is Moment.BEGUN
    assert moment_of(kill, struck(talk), leased) is Moment.BEGUN  # of the dead gateway
    assert moment_of(Kill(HOST, Aim.SENT, 1, 1000, 1100), struck(talk), leased) is Moment.BEFORE  # begun since
    assert moment_of(kill, struck(talk, pieces=3, before=leased), leased) is Moment.STREAMING
    assert moment_of(kill, struck(talk, pieces=3, before=recorded), recorded) is Moment.COMMITTED
    assert moment_of(kill, struck(talk, pieces=3), recorded) is Moment.COMMITTED  # by Redis's clock


def test_what_is_not_certain_has_no_moment(talk: Talk) -> None:
    kill = Kill(GATEWAY, Aim.SENT, 1, at_ms=1000, dead_ms=1100)
    for committed_ms in (None, 999, 1001, 1050):  # hidden by a later turn; too near; while it died
        assert moment_of(kill, struck(talk, pieces=3), Look(turn="a", committed_ms=committed_ms)) is Moment.UNSURE
    assert moment_of(kill, struck(talk, pieces=3), Look(turn="a", committed_ms=2000)) is Moment.STREAMING
    later = struck(talk, number=2, before=Look(lease_turn="b"))
    assert moment_of(kill, later, NOTHING) is Moment.UNSURE  # perhaps the first attempt's
    assert moment_of(kill, struck(talk, number=2, before=Look(lease_turn="old")), NOTHING) is Moment.BEFORE


def test_the_plan_has_every_victim_and_aim_as_often() -> None:
    planned = plan(24, 8, random.Random(1))
    assert sorted({(kill.victim, str(kill.aim)) for kill in planned}) == sorted(
        (victim, str(aim)) for victim in VICTIMS for aim in Aim
    )
    assert all(1 <= kill.target_piece <= 8 for kill in planned)


def test_a_response_names_its_session() -> None:
    assert session_of(f"resp_{'c' * 32}_{'d' * 32}") == "c" * 32
    assert session_of(f"resp_{'d' * 32}") == "d" * 32
