"""Turns under kill -9: gateway, engine host and Redis die at every moment of a turn: none is lost, doubled or half.

    python -m tests.acceptance.crash_turns           1,000 turns of a fake model, 50 of a real one, 200 kills
    python -m tests.acceptance.crash_turns --quick    60 turns of a fake model, 6 kills
    python -m tests.acceptance.crash_turns --kills N  another number of kills

Clients talk over three APIs, streamed and whole, under Idempotency-Keys, and send again what was not acknowledged; a
fifth of those disturbed give up instead. Kills are aimed: just after a request was sent, in the middle of a stream, the
instant a turn's record appears in Redis while its client has not read on; and some are not. Where a kill fell in each
turn on its way is proven by what the client had, by Redis just before the strike, and by Redis after the death.

An independent reader counts. Turns that were given up may be in the history, whole and once. Prints a table of turns,
one of moments and processes, and the verdict; progress goes to stderr. Exit code 1 when an acknowledged turn is lost,
anything is doubled or half, or the full run has fewer than 20 of a moment.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from tests.acceptance.client import say
from tests.acceptance.crash_clients import Api, CrashClients, Questions, Talk
from tests.acceptance.crash_kills import REQUIRED, VICTIMS, Kill, Killer, Moment, plan
from tests.acceptance.crash_reader import Count, CrashReader, History, count_sessions, count_talk, is_kept
from tests.acceptance.main_job import QUESTIONS, SMOL
from tests.acceptance.program import add_state_dir, run_in
from tests.service import RunningService

CONFIG = Path(__file__).parents[1] / "data" / "crash_turns.yaml"
ECHO = "echo"
WORDS = ("lighthouse", "keeper", "island", "winter", "letter", "lamp", "bread", "boat", "evening", "stairs")
LEAST_OF_A_MOMENT = 20  # in the full run
WRONGS = ("lost", "doubled", "half", "strange")


def _say(nonce: str, draw: random.Random) -> tuple[str, str | None]:
    answer = f"{nonce} {' '.join(draw.choices(WORDS, k=4))}"
    return f"say {answer}", answer


def _ask(nonce: str, draw: random.Random) -> tuple[str, str | None]:
    return f"({nonce}) {draw.choice(QUESTIONS)}", None


FAKE = Questions("fake", ECHO, 96, 20, _say)
REAL = Questions("real", SMOL, 16, 5, _ask)


@dataclass(frozen=True)
class Phase:
    """So many turns of one model are acknowledged at least, under so many kills."""

    questions: Questions
    turns: int
    clients: int
    kills: int
    latest_piece: int  # of an answer, at which a kill in the middle of a stream comes


FULL = (Phase(FAKE, 1000, 8, 182, 24), Phase(REAL, 50, 4, 18, 8))
QUICK = (Phase(FAKE, 60, 6, 6, 24),)


class CrashTurns:
    """One run."""

    def __init__(self, phases: tuple[Phase, ...], directory: Path, seed: int, least: int) -> None:
        self._phases, self._seed, self._least = phases, seed, least
        self._service = RunningService(_config(phases, directory), directory / "state")
        self._talks: list[Talk] = []
        self._kills: dict[str, list[Kill]] = {}  # by the model's kind
        self._problems: list[str] = []

    def run(self) -> int:
        """0 if every check held."""
        try:
            self._service.start()
            reader = CrashReader(self._service.state_dir)
            for phase in self._phases:
                asyncio.run(self._phase(phase, reader))
            histories = reader.histories()
            reader.close()
        finally:
            self._service.stop()
        left = self._service.sweep()
        self._check(not left, f"processes outlived the service: {left}")
        self._judge(histories)
        for problem in self._problems:
            say(f"FAILED: {problem}")
        return 1 if self._problems else 0

    async def _phase(self, phase: Phase, reader: CrashReader) -> None:
        say(f"{phase.questions.kind}: {phase.turns} turns of {phase.clients} clients, {phase.kills} kills")
        killer = Killer(self._service, reader, phase.questions.model, self._seed)
        clients = CrashClients(self._service.url, phase.questions, killer, self._seed)
        planned = plan(phase.kills, phase.latest_piece, random.Random(self._seed))
        begin = time.monotonic()
        async with asyncio.TaskGroup() as both:
            both.create_task(clients.run(phase.clients, lambda: killer.done and clients.acknowledged >= phase.turns))
            both.create_task(killer.run(planned, clients.open, lambda: clients.acknowledged / phase.turns))
        done = f"{clients.acknowledged} turns acknowledged, {len(killer.kills)} kills"
        say(f"{phase.questions.kind}: {done}, {time.monotonic() - begin:.0f} s")
        self._talks += clients.talks
        self._kills[phase.questions.kind] = killer.kills
        self._problems += [*clients.problems, *killer.problems]

    # -- the end ---------------------------------------------------------------------------

    def _judge(self, histories: Mapping[str, History]) -> None:
        counts = {talk.name: count_talk(talk, histories) for talk in self._talks}
        everywhere = count_sessions(histories, [turn for talk in self._talks for turn in talk.turns])
        for count in (*counts.values(), everywhere):
            self._problems += count.problems
        for struck in (one for kills in self._kills.values() for kill in kills for one in kill.struck):
            if struck.moment is Moment.COMMITTED:
                turn = struck.attempt.turn
                self._check(is_kept(turn, histories), f"{turn.nonce} was committed, and is gone")
        console = Console(width=180)
        console.print(self._turn_table(counts))
        for kind, kills in self._kills.items():
            console.print(_moment_table(kind, kills))
        found = Counter(struck.moment for kills in self._kills.values() for kill in kills for struck in kill.struck)
        for moment in REQUIRED:
            self._check(found[moment] >= self._least, f"only {found[moment]} kills fell {moment}, not {self._least}")
        all_counts = (*counts.values(), everywhere)
        wrongs = ", ".join(f"{name} {sum(len(getattr(count, name)) for count in all_counts)}" for name in WRONGS)
        total = sum(map(len, self._kills.values()))
        acknowledged = sum(count.acknowledged for count in counts.values())
        print(f"{acknowledged} turns acknowledged under {total} kills: {wrongs}")

    def _turn_table(self, counts: Mapping[str, Count]) -> Table:
        table = Table(title=f"turns under kill -9 on {CONFIG.name}, counted by a bare Redis client")
        table.add_column("model, API")
        names = ("acknowledged", "at a later attempt", "attempts not acknowledged", "given up", "of them kept, whole")
        for name in (*names, *WRONGS):
            table.add_column(name, justify="right")
        for phase in self._phases:
            for api in Api:
                talks = [talk for talk in self._talks if talk.kind == phase.questions.kind and talk.api is api]
                turns = [turn for talk in talks for turn in talk.turns]
                found = [counts[talk.name] for talk in talks]
                late = sum(turn.acknowledged and len(turn.attempts) > 1 for turn in turns)
                failed = sum(attempt.ended != "acknowledged" for turn in turns for attempt in turn.attempts)
                cells = [sum(c.acknowledged for c in found), late, failed]
                cells += [sum(c.given_up for c in found), sum(c.kept for c in found)]
                cells += [sum(len(getattr(c, name)) for c in found) for name in WRONGS]
                table.add_row(f"{phase.questions.model} ({phase.questions.kind}), {api}", *map(str, cells))
        return table

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            say(f"  FAILED: {what}")
            self._problems.append(what)


def _moment_table(kind: str, kills: list[Kill]) -> Table:
    """Turns on their way at a kill, by moment and what was killed; of each, how many were answered."""
    table = Table(
        title=f"{kind} model: turns on their way when a process was killed (those that were answered all the same)"
    )
    table.add_column("moment")
    for victim in VICTIMS:
        count = sum(kill.victim == victim for kill in kills)
        table.add_column(f"{victim} ({count} killed)", justify="right")
    table.add_column("together", justify="right")
    for moment in Moment:
        cells = []
        for victims in (*((victim,) for victim in VICTIMS), VICTIMS):
            struck = [s for kill in kills if kill.victim in victims for s in kill.struck if s.moment is moment]
            cells.append(f"{len(struck)} ({sum(s.attempt.ended == 'acknowledged' for s in struck)})")
        table.add_row(f"{moment}", *cells)
    return table


def _config(phases: tuple[Phase, ...], directory: Path) -> Path:
    """The config with the models that are asked, and no other: a real one takes long to fetch."""
    config = yaml.safe_load(CONFIG.read_text())
    asked = [phase.questions.model for phase in phases]
    config["models"] = [model for model in config["models"] if model["name"] in asked]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="60 turns of a fake model, 6 kills")
    parser.add_argument("--kills", type=int, help="of the fake model's turns; none: as the size has it")
    parser.add_argument("--seed", type=int, default=7, help="of turns, aims and who gives up")
    add_state_dir(parser)
    options = parser.parse_args()
    first, *others = QUICK if options.quick else FULL
    if options.kills is not None:
        first = replace(first, kills=options.kills)
    least = LEAST_OF_A_MOMENT if not options.quick and options.kills is None else 0
    return run_in(
        options.state_dir,
        "crash-turns-",
        lambda directory: CrashTurns((first, *others), directory, options.seed, least).run(),
    )


if __name__ == "__main__":
    sys.exit(main())
