"""Two gateways before three hosts of one (fake) model: every turn is kept once, and no session moves without a reason.

    python -m tests.acceptance.two_gateways           6 sessions, 11 rounds
    python -m tests.acceptance.two_gateways --quick    4 sessions, 5 rounds

What it proves. Turns of a session arrive at either gateway, as the shared port chooses; which one it was is read from
the session's lease in Redis, which host answered from the hosts themselves.
- Calm: whichever gateway a turn comes through, its session's host is the same.
- Hot: long generations are pinned to one host through both gateways. The sessions of that host spill to the others, all
  other sessions stay, and when the host cools down everybody is back home.
- A gateway is killed while answers stream through both. The other one's streams do not notice; the killed one's turns
  are sent again under their keys; its successor sends every session to the host it had.
- At the end an independent reader holds what the clients saw acknowledged against what lies in Redis.

Prints a table of placements and ``turns lost 0, doubled 0``; progress goes to stderr. Exit code 1 when a turn is lost
or doubled, a session moved without a reason or did not move with one, or the kill did not happen where it should.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from policies.routing import pick
from tests.acceptance.client import Conversation, Turn, say
from tests.acceptance.faults import Fault, Window
from tests.acceptance.placement import GatewayLoad, Hog, Hosts, Seen, risen
from tests.acceptance.program import add_state_dir, run_in
from tests.acceptance.reader import Reader, count_turns
from tests.service import RunningService, wait_until

CONFIG = Path(__file__).parents[1] / "data" / "gateways.yaml"
TENANT, KEY, MODEL, HOSTS = "acme", "sk-demo-acme", "wide", 3
TURN_TOKENS, LONG_TOKENS = 40, 150  # of an answer; 20 ms each
CALM, HOT, COOL, KILL, AFTER = "calm", "hot", "cool", "kill", "after"
ROUNDS = (*[CALM] * 3, *[HOT] * 3, COOL, KILL, *[AFTER] * 3)
QUICK_ROUNDS = (CALM, HOT, COOL, KILL, AFTER)


class TwoGateways:
    """One run."""

    def __init__(self, sessions: int, rounds: tuple[str, ...], state_dir: Path) -> None:
        self._service = RunningService(CONFIG, state_dir)
        self._rounds = rounds
        self._names = [f"session-{number}" for number in range(1, sessions + 1)]
        self._talks: dict[str, Conversation] = {}
        self._load = GatewayLoad()
        self._home: dict[str, int] = {}
        self._seen: list[Seen] = []
        self._cells: dict[tuple[str, int], str] = {}  # session, round → what the table shows
        self._letters: dict[str, str] = {}  # gateway → how it is called here
        self._hogs: list[Hog] = []
        self._hog_spills = 0
        self._retried = 0
        self._kill = ""
        self._problems: list[str] = []

    def run(self) -> int:
        """0 if every check held."""
        try:
            self._service.start()
            self._reader = Reader(self._service.state_dir)
            wait_until(lambda: len(self._service.gateways()) == 2, 30, "two gateways answer")
            wait_until(lambda: self._ready_hosts() == HOSTS, 30, "all hosts are ready")
            self._hosts = Hosts(self._service, [f"host:{MODEL}:{number}" for number in range(HOSTS)])
            try:
                for number, kind in enumerate(self._rounds):
                    self._round(number, kind)
            finally:
                self._hosts.close()
            self._judge()
            self._print()
        finally:
            for hog in self._hogs:
                hog.stop()
            self._service.stop()
        for problem in self._problems:
            say(f"FAILED: {problem}")
        return 1 if self._problems else 0

    def _round(self, number: int, kind: str) -> None:
        say(f"round {number + 1}: {kind}")
        if kind == HOT and not self._hogs:
            self._heat(Counter(self._home.values()).most_common(1)[0][0])
        if kind == COOL:
            self._cool()
        done = self._kill_round(number) if kind == KILL else set()
        for name in self._names:
            if name not in done:
                self._turn(name, number)

    # -- one turn ----------------------------------------------------------------------

    def _turn(self, name: str, number: int, max_tokens: int = TURN_TOKENS, seen: threading.Event | None = None) -> Turn:
        """One turn of a session, and where it ran; ``seen`` is set once that is known."""
        talk = self._talks.setdefault(name, Conversation(self._service.url, KEY, name))
        turn_number = len(talk.log) + 1
        nonce = f"{name}.{turn_number}."
        turn = Turn(turn_number, MODEL, nonce, f"({nonce}) go on", max_tokens)
        before = self._hosts.in_flight()

        def look() -> None:
            host, gateway = risen(before, self._hosts.in_flight()), self._reader.owner(TENANT, name)
            self._place(turn, name, number, gateway, host)
            if seen is not None:
                seen.set()

        talk.take(turn, lambda: None, look)
        if turn.attempts > 1:
            self._retried += 1
            self._cells.setdefault((name, number), f"? attempt {turn.attempts}")  # only first attempts are looked at
        return turn

    def _place(self, turn: Turn, name: str, number: int, gateway: str, host: int | None) -> None:
        self._check(host is not None and bool(gateway), f"{name} turn {turn.number}: nobody saw where it ran")
        if host is None or not gateway:
            return
        letter = self._letters.setdefault(gateway, "ABCDEF"[len(self._letters)])
        home = self._home.setdefault(name, host)
        seen = Seen(name, turn.number, gateway, host, self._load.must_spill(gateway, home, HOSTS))
        self._seen.append(seen)
        self._cells[name, number] = f"{host} {letter}{' spilled' if host != home else ''}"
        if problem := seen.problem(home):
            self._check(False, problem)

    # -- heat --------------------------------------------------------------------------

    def _heat(self, host: int) -> None:
        """Long generations on this host, one through each gateway."""
        before = self._hosts.in_flight()
        for number in count():
            name = f"hog-{number}"
            if pick(self._hosts.names, f"{MODEL}/{TENANT}/{name}") != self._hosts.names[host]:
                continue
            hog = Hog(self._service, MODEL, KEY, name)
            self._hogs.append(hog)
            gateway, landed = self._reader.owner(TENANT, name), risen(before, self._hosts.in_flight())
            self._hog_spills += landed != host
            if landed == host and gateway not in self._load.running:
                self._load.add(gateway, host)
                before = self._hosts.in_flight()
            else:  # a second one through the same gateway: it has spilled, as it must
                hog.stop()
                wait_until(lambda before=before: self._hosts.in_flight() == before, 10, f"{name} has gone")
            if len(self._load.running) == 2:
                break
        say(f"  host {host} is hot: {before} generations in flight, one through each gateway")

    def _cool(self) -> None:
        for hog in self._hogs:
            hog.stop()
        self._load.running.clear()
        wait_until(lambda: not any(self._hosts.in_flight()), 10, "the hosts are idle")

    # -- the kill ----------------------------------------------------------------------

    def _kill_round(self, number: int) -> set[str]:
        """Kill the gateway of the first turn while streams go through both; the sessions that had their turn."""
        pids = self._service.gateways()
        try:  # what a killed gateway has not pushed is lost
            wait_until(
                lambda: self._spills_counted() >= self._spills_seen(), 10, "both gateways have told their spills"
            )
        except AssertionError as late:
            self._check(False, str(late))
        turns = {}
        with ThreadPoolExecutor(16) as pool:
            for name in (*self._names, *(f"extra-{n}" for n in range(1, 11))):
                seen = threading.Event()
                turns[name] = pool.submit(self._turn, name, number, LONG_TOKENS, seen)
                assert seen.wait(30), f"{name} does not stream"
                self._load.add(self._seen[-1].gateway, self._seen[-1].host)
                if len(self._load.running) == 2:
                    break
            gateways = {seen.session: seen.gateway for seen in self._seen[-len(turns) :]}
            fault = Fault("gateway", Window.STREAMING, [pids[next(iter(gateways.values()))]])
            fault.strike(self._service)
            self._load.running.clear()
            for name, running in turns.items():
                self._check_killed(name, number, running.result(), fault, pids[gateways[name]] in fault.pids)
        self._check(len(set(gateways.values())) == 2, "all streams went through the gateway that was killed")
        return set(turns)

    def _check_killed(self, name: str, number: int, turn: Turn, fault: Fault, victim: bool) -> None:
        if victim:
            held, proof = fault.proof(turn, 0.0)
            self._kill = self._kill or f"{name} {proof}; acknowledged at attempt {turn.attempts}"
            self._check(held, f"died outside its window: {proof}")
            self._check(turn.attempts > 1, f"{name}: its gateway was killed, and its client noticed nothing")
            self._cells[name, number] = f"{self._cells.get((name, number), '?')} killed, again"
        else:
            self._check(turn.attempts == 1, f"{name}: streamed through the other gateway and broke: {turn.refusals}")

    # -- the end -----------------------------------------------------------------------

    def _judge(self) -> None:
        moved = [seen for seen in self._seen if seen.host != self._home[seen.session]]
        self._check(bool(moved), "nothing spilled: this run shows nothing")
        self._check(self._changes() > 0, "no session changed its gateway: this run shows nothing")
        seen, counted = self._spills_seen(), self._spills_counted()
        self._check(seen <= counted <= seen + self._retried, f"spills: {seen} seen, {counted} counted by the gateways")
        for hog in self._hogs:
            self._check(not self._reader.items(TENANT, hog.session), f"{hog.session} was given up, and is stored")
        self._lost, self._doubled = 0, 0
        for name, talk in self._talks.items():
            found = count_turns(talk.log, self._reader.items(TENANT, name))
            committed = self._reader.version(TENANT, name)
            self._check(not found.lost, f"{name} lost: {found.lost}")
            self._check(not found.doubled, f"{name} doubled: {found.doubled}")
            self._check(not found.strange, f"{name}: {'; '.join(found.strange)}")
            self._check(committed == len(talk.log), f"{name}: {committed} committed, {len(talk.log)} acknowledged")
            self._lost += len(found.lost)
            self._doubled += len(found.doubled)

    def _print(self) -> None:
        table = Table(
            title=f"fake model on {CONFIG.name}: host and gateway of each turn, read with {self._reader.name}"
        )
        for column in ("session", *(f"{n} {kind}" for n, kind in enumerate(self._rounds, 1))):
            table.add_column(column)
        for name in self._talks:
            table.add_row(name, *(self._cells.get((name, number), "") for number in range(len(self._rounds))))
        moves = Table(title="moves")
        for column in ("session", "turn", "host", "why"):
            moves.add_column(column)
        for name in self._talks:
            for before, after in pairwise(seen for seen in self._seen if seen.session == name):
                if before.host != after.host:
                    why = after.reason or "home again: it is not hot any more"
                    moves.add_row(name, str(after.turn), f"{before.host} → {after.host}", self._lettered(why))
        console = Console(width=200)
        console.print(table, moves)
        through = Counter(self._letters[seen.gateway] for seen in self._seen)
        shares = ", ".join(f"{letter} {turns}" for letter, turns in sorted(through.items()))
        print(f"turns through gateway {shares}; gateway changed between turns of a session: {self._changes()}")
        spilled = f"{self._spills_seen()} seen on the hosts ({self._hog_spills} of them hogs)"
        print(f"spills: {spilled}, {self._spills_counted()} counted by the gateways")
        print(f"kill: {self._kill}")
        turns = sum(len(talk.log) for talk in self._talks.values())
        print(f"{turns} turns acknowledged, {self._retried} of them at a second attempt or later")
        print(f"turns lost {self._lost}, doubled {self._doubled}")

    def _changes(self) -> int:
        by_name = [[seen.gateway for seen in self._seen if seen.session == name] for name in self._talks]
        return sum(before != after for gateways in by_name for before, after in pairwise(gateways))

    def _spills_seen(self) -> int:
        spilled = [seen for seen in self._seen if seen.reason and seen.host != self._home[seen.session]]
        return self._hog_spills + len(spilled)

    def _spills_counted(self) -> int:
        families = text_string_to_metric_families(httpx.get(f"{self._service.url}/metrics", timeout=30).text)
        samples = [sample for family in families for sample in family.samples]
        return int(sum(s.value for s in samples if s.name == "orchestrator_routing_spills_total"))

    def _ready_hosts(self) -> int:
        return sum(host["state"] == "ready" for host in self._service.hosts(MODEL))

    def _lettered(self, text: str) -> str:
        for gateway, letter in self._letters.items():
            text = text.replace(gateway, letter)
        return text

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            say(f"  FAILED: {what}")
            self._problems.append(what)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 sessions, 5 rounds")
    add_state_dir(parser)
    options = parser.parse_args()
    return run_in(
        options.state_dir,
        "two-gateways-",
        lambda state_dir: TwoGateways(*((4, QUICK_ROUNDS) if options.quick else (6, ROUNDS)), state_dir).run(),
    )


if __name__ == "__main__":
    sys.exit(main())
