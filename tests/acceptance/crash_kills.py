"""Owns the kills of the crash test: when something is killed, the proof that it died, and where that fell in each turn.

A strike is one piece of synchronous work in the clients' event loop: no client sees or sends anything between the look
into Redis before it and the kernel's word that the process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import httpx
import psutil
import redis

from tests.acceptance.client import say
from tests.acceptance.crash_clients import Attempt, NotAcknowledged
from tests.acceptance.crash_reader import CrashReader, Look
from tests.service import RunningService, kill_hard

GATEWAY, HOST, REDIS = "gateway", "engine host", "redis-server"
VICTIMS = (GATEWAY, HOST, REDIS)
BACK_SECONDS, AIM_SECONDS, COMMIT_SECONDS = 120.0, 20.0, 15.0
NEAR_MS = 2.0  # Redis writes a commit's time in ms


class Aim(StrEnum):
    """What a kill waits for."""

    SENT = "a request was sent"
    STREAMING = "text has come"
    COMMITTED = "a turn is recorded, its client has not read on"
    RANDOM = "nothing"


class Moment(StrEnum):
    """Where a kill fell in a turn that was on its way."""

    BEFORE = "before begin"  # no lease under its key
    BEGUN = "begun, no text seen"
    STREAMING = "between first token and commit"
    COMMITTED = "after commit, no acknowledgement"
    UNSURE = "unsure"


REQUIRED = (Moment.BEFORE, Moment.STREAMING, Moment.COMMITTED)


@dataclass
class Struck:
    """An attempt that was on its way when something was killed."""

    attempt: Attempt
    pieces: int  # of text that its client had
    before: Look
    known: frozenset[str]  # turn ids that earlier attempts of this turn had
    certain: bool  # those are all
    moment: Moment = Moment.UNSURE


@dataclass
class Kill:
    """One process killed with SIGKILL and seen dead."""

    victim: str
    aim: Aim
    pid: int = 0
    at_ms: float = 0.0  # epoch
    dead_ms: float = 0.0
    target_piece: int = 1
    struck: list[Struck] = field(default_factory=list)


def plan(kills: int, latest_piece: int, draw: random.Random) -> list[Kill]:
    """Victims in turn, each with every aim in turn. ``latest_piece``: of an answer, in whose middle a strike comes."""
    aims = (Aim.COMMITTED, Aim.STREAMING, Aim.SENT, Aim.RANDOM)
    planned = []
    for number in range(kills):
        row, column = divmod(number, len(VICTIMS))
        planned.append(Kill(VICTIMS[column], aims[(row + column) % len(aims)]))
    for kill in planned:
        kill.target_piece = draw.randint(1, latest_piece)
    return planned


class Killer:
    """Watches the attempts of the clients and kills by a plan."""

    def __init__(self, service: RunningService, reader: CrashReader, model: str, seed: int) -> None:
        self._service, self._reader, self._model = service, reader, model
        self._draw = random.Random(seed)
        self._open: Mapping[int, Attempt] = {}
        self._wanted: Kill | None = None
        self._holder: Attempt | None = None
        self._strike_done = asyncio.Event()
        self._dead: set[int] = set()
        self._turn_ids: dict[str, dict[str, int]] = {}  # key → turn ids seen under it, and the attempt
        self._certain: set[int] = set()  # attempts that were sent when their key's lease had been looked at
        self.kills: list[Kill] = []
        self.done = False
        self.problems: list[str] = []

    async def run(self, planned: Sequence[Kill], opened: Mapping[int, Attempt], share: Callable[[], float]) -> None:
        """Kill all of the plan; ``share``: of the turns that are acknowledged. ``done`` is set at the end."""
        self._open = opened
        try:
            for number, kill in enumerate(planned):
                await self._until(partial(_reached, share, number / (len(planned) + 1)), "its turns are acknowledged")
                kill.pid = await self._find(kill.victim)
                await self._aim(kill)
                await self._judge(kill)
                self.kills.append(kill)
                _tell(number + 1, kill)
            await self._find(GATEWAY)
        finally:
            self.done = True

    # -- what the clients tell -----------------------------------------------------------

    def sent(self, attempt: Attempt) -> None:
        """It cannot have begun yet: a lease under its key is an earlier attempt's."""
        if attempt.number > 1:
            with contextlib.suppress(redis.RedisError):
                (look,) = self._reader.look([attempt.turn])
                self._turn_ids.setdefault(attempt.turn.key, {}).setdefault(look.lease_turn, attempt.number - 1)
                self._certain.add(id(attempt))
        if self._wanted is not None and self._wanted.aim is Aim.SENT:
            self._strike()

    async def piece(self, attempt: Attempt) -> None:
        kill = self._wanted
        if kill is None:
            return
        if kill.aim is Aim.STREAMING and attempt.pieces >= kill.target_piece:
            self._strike()
        if kill.aim is Aim.COMMITTED and self._holder is None:
            await self._hold(attempt, kill)

    async def _hold(self, attempt: Attempt, kill: Kill) -> None:
        """Read no further, strike when the turn is recorded, and go away."""
        self._holder = attempt
        until = time.monotonic() + COMMIT_SECONDS
        try:
            while self._wanted is kill and time.monotonic() < until:
                if self._reader.committed(attempt.turn):
                    self._strike()
                    raise NotAcknowledged("its client went away at the kill")
                await asyncio.sleep(0.001)
        finally:
            self._holder = None

    # -- the kill ------------------------------------------------------------------------

    async def _aim(self, kill: Kill) -> None:
        self._strike_done.clear()
        self._wanted = kill
        if kill.aim is Aim.RANDOM:
            await asyncio.sleep(self._draw.uniform(0, 1.5))
            self._strike()
        try:
            await asyncio.wait_for(self._strike_done.wait(), AIM_SECONDS)
        except TimeoutError:
            if self._wanted is not None:
                kill.aim = Aim.RANDOM
                self._strike()

    def _strike(self) -> None:
        """Look, kill, and see it dead; nothing else runs in this loop meanwhile."""
        kill, self._wanted = self._wanted, None
        assert kill is not None
        on_their_way = [attempt for attempt in self._open.values() if attempt.sent]
        looks = self._reader.look([attempt.turn for attempt in on_their_way])
        kill.at_ms = time.time() * 1000
        kill_hard(kill.pid)
        kill.dead_ms = time.time() * 1000
        self._dead.add(kill.pid)
        for attempt, look in zip(on_their_way, looks, strict=True):
            ids = self._turn_ids.setdefault(attempt.turn.key, {})
            known = frozenset(turn for turn, number in ids.items() if number < attempt.number)
            certain = attempt.number == 1 or id(attempt) in self._certain
            kill.struck.append(Struck(attempt, attempt.pieces, look, known, certain))
        if kill.victim != REDIS:
            self._classify(kill)
        self._strike_done.set()

    async def _judge(self, kill: Kill) -> None:
        """A dead Redis is looked into when it is back: what it had on disk, and since when."""
        if kill.victim == REDIS:
            await self._until(self._reader.answers, "Redis answers again")
            self._classify(kill)

    def _classify(self, kill: Kill) -> None:
        for struck, after in zip(kill.struck, self._reader.look([s.attempt.turn for s in kill.struck]), strict=True):
            struck.moment = moment_of(kill, struck, after)
            if struck.before.turn and struck.before.turn != after.turn:
                self.problems.append(f"{struck.attempt.turn.nonce} was recorded before {kill.victim} died, then not")
            for look in (struck.before, after):
                if look.lease_turn:
                    self._turn_ids[struck.attempt.turn.key].setdefault(look.lease_turn, struck.attempt.number)

    # -- who is alive --------------------------------------------------------------------

    async def _find(self, victim: str) -> int:
        """The pid of a living one, as soon as it works."""
        return await self._until(partial(self._pid, victim), f"{victim} is up")

    async def _until(self, found: Callable[[], int], what: str) -> int:
        until = time.monotonic() + BACK_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError, redis.RedisError, psutil.Error, LookupError, OSError, ValueError):
                if value := await asyncio.to_thread(found):
                    return value
            if time.monotonic() > until:
                raise RuntimeError(f"not within {BACK_SECONDS:.0f} s: {what}")
            await asyncio.sleep(0.1)

    def _pid(self, victim: str) -> int:
        """0 when there is none, or only one that was killed already."""
        if victim == GATEWAY:
            pid = self._service.gateway_pid()
        elif victim == REDIS:
            pid = self._service.redis_pid() if self._reader.answers() else 0
        else:
            host = self._service.model(self._model)
            pid = host["pid"] if host["state"] == "ready" else 0
        return pid if pid not in self._dead and pid and psutil.pid_exists(pid) else 0


def moment_of(kill: Kill, struck: Struck, after: Look) -> Moment:
    """Where a kill fell in an attempt. Only what is certain has a name."""
    if struck.before.turn:
        return Moment.COMMITTED
    if after.turn and (late := _recorded_meanwhile(kill, after)) is not None:
        return late
    if struck.pieces:
        return Moment.STREAMING
    leases = [struck.before.lease_turn]
    if kill.victim == GATEWAY:  # nobody else can have begun it meanwhile
        leases.append(after.lease_turn)
    if all(turn in struck.known for turn in leases if turn):
        return Moment.BEFORE
    return Moment.BEGUN if struck.certain else Moment.UNSURE  # or an earlier attempt's lease


def _recorded_meanwhile(kill: Kill, after: Look) -> Moment | None:
    """By the time that Redis wrote; None: surely recorded later than the death."""
    if after.committed_ms is None or abs(after.committed_ms - kill.at_ms) <= NEAR_MS:
        return Moment.UNSURE
    if after.committed_ms < kill.at_ms:
        return Moment.COMMITTED
    # a dying process's last word; a continued turn is recorded long after its host's death
    return Moment.UNSURE if after.committed_ms <= kill.dead_ms + NEAR_MS else None


def _reached(share: Callable[[], float], wanted: float) -> bool:
    return share() >= wanted


def _tell(number: int, kill: Kill) -> None:
    moments = [str(struck.moment) for struck in kill.struck]
    said = ", ".join(f"{moments.count(moment)} {moment}" for moment in Moment if moment in moments)
    died = f"{kill.victim} {kill.pid} dead after {kill.dead_ms - kill.at_ms:.0f} ms"
    say(f"  kill {number}: {died}, aim: {kill.aim}; {said or 'nobody there'}")
