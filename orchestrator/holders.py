"""Owns what is concluded from the machine's processes: who holds memory that is ours by now, or that we count on.

``look`` reads /proc; ``conclude`` is pure. A process is known as ours by the token of its private Ray cluster, or, a
Redis, by the directory it runs in: both name the state directory of the service that started it. That service lives
while it holds its ``serve.lock``; its hosts and its Redis have sessions of their own and outlive it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from session_store.embedded import SERVER_NAMES

SHARE_OF_BUDGET = 0.1  # a foreign process that holds less is not worth a name
MOST_FOREIGN = 3
SETTLE_SECONDS = 1.5  # a process that is ending, or not yet reaped, is no finding
NVIDIA_SMI = ("nvidia-smi", "--query-compute-apps=pid,used_memory,process_name", "--format=csv,noheader,nounits")
NVIDIA_SECONDS = 10.0
PROGRAMS = ("python", "orchestrator", "pytest")  # that start a private Redis or cluster, with or without a service
TEMP_DIR = re.compile(r"/orc-[0-9a-f]{8}(/|$)")  # of a private cluster: on the command line of all it starts
TOKEN_FILE = "ray.token"  # in the state directory; the environment of the cluster's processes names it

Kind = Literal["orphan", "zombie", "leftover", "foreign", "cuda"]


@dataclass(frozen=True, slots=True)
class Process:
    """One process, as far as it matters here."""

    pid: int
    parent: int
    name: str  # the kernel's, 15 characters
    title: str  # its command line; Ray's workers write what they are there
    zombie: bool = False
    held_bytes: int = 0  # RssAnon + shared memory
    state_dir: str = ""  # of the service that started it, where it says so itself

    @property
    def is_host(self) -> bool:
        """``ray::host:MODEL:0:EngineHost.__init__`` at first, then ``ray::EngineHost.watch``; a zombie has no title."""
        said = self.title or self.name
        return said.startswith("ray::") and ("EngineHost" in said or said.startswith("ray::host:"))

    @property
    def word(self) -> str:
        """A name for people."""
        return self.title.split()[0] if self.title.startswith("ray::") else self.name


@dataclass(frozen=True, slots=True)
class ComputeProcess:
    """What a CUDA device's driver says of one process on it."""

    pid: int
    held_bytes: int | None  # None: the driver does not say
    name: str


@dataclass(frozen=True, slots=True)
class Picture:
    """The machine at one moment."""

    processes: tuple[Process, ...]
    services: Mapping[str, int]  # state directories whose service lives → its pid; 0: not known
    home: str  # the state directory that is looked from
    own_pid: int
    available_bytes: int  # for the CPU devices, with what the service of ``home`` holds
    budget_bytes: int  # that the CPU devices may hold
    compute: tuple[ComputeProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Somebody holds what he should not, or what we count on."""

    kind: Kind
    pids: tuple[int, ...]
    said: str
    fix: str
    warning: bool  # it is not of the state directory that was looked from, or harms nobody


def conclude(picture: Picture) -> list[Conclusion]:
    """All findings, ours first; nothing when all is well."""
    family = _Family(picture)
    return [*_orphans(family), *_leftovers(family), *_zombies(family), *_foreign(family), *_compute(family)]


def settled(
    take: Callable[[], Picture], sleep: Callable[[float], None] = time.sleep
) -> tuple[Picture, list[Conclusion]]:
    """The conclusions that still hold after a moment: a process that was just ending is none."""
    picture = take()
    found = conclude(picture)
    if any(one.kind in ("orphan", "leftover", "zombie") for one in found):
        sleep(SETTLE_SECONDS)
        before = {(one.kind, pid) for one in found for pid in one.pids}
        picture = take()
        found = [one for one in conclude(picture) if any((one.kind, pid) in before for pid in one.pids)]
    return picture, found


def summary(picture: Picture) -> str:
    """One line for when all is well."""
    family = _Family(picture)
    hosts = [p for p in picture.processes if p.is_host and not p.zombie]
    ours = sum(process.held_bytes for process in hosts if family.state_dir(process) == picture.home)
    others = sum(process.held_bytes for process in hosts) - ours
    elsewhere = f", {_mib(others)} in those of other services" if others else ""
    return f"no orphans and no leftovers; {_mib(ours)} in our engine hosts{elsewhere}"


class _Family:
    """Who descends from whom, and which service a process belongs to."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self._by_pid = {process.pid: process for process in picture.processes}

    def ancestors(self, process: Process) -> Iterator[Process]:
        seen = {process.pid}
        while (parent := self._by_pid.get(process.parent)) is not None and parent.pid not in seen:
            seen.add(parent.pid)
            process = parent
            yield process

    def state_dir(self, process: Process) -> str:
        """Its own word, or its parents': Ray's agents overwrite their environment."""
        return next((p.state_dir for p in (process, *self.ancestors(process)) if p.state_dir), "")

    def of_service(self, state_dir: str) -> list[Process]:
        return [p for p in self.picture.processes if not p.zombie and self.state_dir(p) == state_dir]

    def deserted(self) -> list[str]:
        """State directories that processes name as theirs and nobody serves from."""
        named = {process.state_dir for process in self.picture.processes if process.state_dir and not process.zombie}
        return sorted(name for name in named if name not in self.picture.services and not self._held_by_a_program(name))

    def _held_by_a_program(self, state_dir: str) -> bool:
        """Tests and tools start a Redis or a cluster without a service; when they die, pid 1 or its like takes over."""
        inside = self.of_service(state_dir)
        pids = {process.pid for process in inside}
        above = (self._by_pid.get(process.parent) for process in inside if process.parent not in pids)
        return any(one is not None and one.pid != 1 and one.name.startswith(PROGRAMS) for one in above)


def _orphans(family: _Family) -> Iterator[Conclusion]:
    """Engine hosts that no service knows of: theirs is gone, or only their Ray node is."""
    home, deserted = family.picture.home, family.deserted()
    for state_dir in deserted:
        hosts = [process for process in family.of_service(state_dir) if process.is_host]
        if hosts:
            said = f"{_hosts(hosts)} of {state_dir}, and nobody serves from there"
            yield Conclusion("orphan", _pids(hosts), said, _ended_by_serve(state_dir, hosts), state_dir != home)
    for process in family.picture.processes:
        if not process.is_host or process.zombie or family.state_dir(process) in deserted:
            continue
        if not any(parent.name == "raylet" for parent in family.ancestors(process)):
            of = family.state_dir(process)
            said = f"{_hosts([process])}{f' of {of}' if of else ''}, and the Ray node that started it is gone"
            yield Conclusion("orphan", (process.pid,), said, _kill([process]), of != home)


def _leftovers(family: _Family) -> Iterator[Conclusion]:
    """The private Redis and Ray of a service that is gone."""
    for state_dir in family.deserted():
        left = [process for process in family.of_service(state_dir) if not process.is_host]
        if left:
            held = _mib(sum(process.held_bytes for process in left))
            names = ", ".join(f"{process.word} {process.pid}" for process in left)
            said = f"{len(left)} processes hold {held} for {state_dir}, and nobody serves from there: {names}"
            yield Conclusion(
                "leftover", _pids(left), said, _ended_by_serve(state_dir, left), state_dir != family.picture.home
            )


def _zombies(family: _Family) -> Iterator[Conclusion]:
    for process in family.picture.processes:
        if process.zombie and process.is_host:
            parent = next(family.ancestors(process), None)
            by = f"{parent.word} {parent.pid}" if parent is not None else str(process.parent)
            said = f"the engine host {process.pid} has ended, and its parent {by} takes no note of it: a zombie"
            yield Conclusion("zombie", (process.pid,), said, f"end {by} if it stays so", True)


def _foreign(family: _Family) -> Iterator[Conclusion]:
    """Who else has the memory, where there is less of it than the devices may come to hold."""
    picture = family.picture
    if picture.available_bytes >= picture.budget_bytes:
        return
    ours = {picture.own_pid, picture.services.get(picture.home, 0)}
    others = [p for p in picture.processes if p.pid not in ours and family.state_dir(p) != picture.home]
    large = [p for p in others if p.held_bytes > SHARE_OF_BUDGET * picture.budget_bytes]
    large = sorted(large, key=lambda process: -process.held_bytes)[:MOST_FOREIGN]
    if large:
        names = ", ".join(f"{_named(process, family)} {_mib(process.held_bytes)}" for process in large)
        lacking = _mib(picture.budget_bytes - picture.available_bytes)
        said = f"{lacking} less are available than our CPU devices may hold; others hold much: {names}"
        yield Conclusion("foreign", _pids(large), said, "end them, or lower devices[].memory", True)


def _compute(family: _Family) -> Iterator[Conclusion]:
    """Processes on a CUDA device that are no hosts of a living service."""
    deserted = family.deserted()
    hosts = {p.pid for p in family.picture.processes if p.is_host and family.state_dir(p) not in deserted}
    foreign = [process for process in family.picture.compute if process.pid not in hosts]
    if foreign:
        names = ", ".join(
            f"{one.name} {one.pid} {'an unknown size' if one.held_bytes is None else _mib(one.held_bytes)}"
            for one in sorted(foreign, key=lambda one: -(one.held_bytes or 0))
        )
        said = f"{len(foreign)} processes that are not ours hold memory of a CUDA device: {names}"
        yield Conclusion("cuda", tuple(one.pid for one in foreign), said, "end them, or lower devices[].memory", True)


def _named(process: Process, family: _Family) -> str:
    of = family.state_dir(process)
    return f"{process.word} {process.pid}{f' (the service of {of})' if of else ''}"


def _hosts(hosts: Sequence[Process]) -> str:
    held = _mib(sum(process.held_bytes for process in hosts))
    hold = "engine host holds" if len(hosts) == 1 else "engine hosts hold"
    return f"{len(hosts)} {hold} {held} ({', '.join(str(process.pid) for process in hosts)})"


def _ended_by_serve(state_dir: str, processes: Sequence[Process]) -> str:
    return f"'orchestrator serve --state-dir {state_dir}' ends them when it starts; or {_kill(processes)}"


def _kill(processes: Sequence[Process]) -> str:
    return f"kill -9 {' '.join(str(process.pid) for process in processes)}"


def _pids(processes: Sequence[Process]) -> tuple[int, ...]:
    return tuple(process.pid for process in processes)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


# -- texts of the system -----------------------------------------------------------------------


def lock_holders(text: str) -> dict[int, int]:
    """Inode → pid of every exclusive flock in the text of /proc/locks.

    By inode alone: the device that stands there is not the one that stat tells on some file systems. Who waits for a
    lock has an arrow before its kind.
    """
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE":
            found[int(words[5].rpartition(":")[2])] = max(0, int(words[4]))  # 0 or -1: of another pid namespace
    return found


def compute_processes(text: str) -> tuple[ComputeProcess, ...]:
    """What ``NVIDIA_SMI`` printed: pid, MiB or ``[N/A]``, name (which may hold commas); a line for each device."""
    found = []
    for line in text.splitlines():
        pid, _, rest = line.partition(",")
        held, _, name = rest.partition(",")
        if pid.strip().isdigit():
            number = held.strip()
            held_bytes = int(number) * 2**20 if number.isdigit() else None
            found.append(ComputeProcess(int(pid), held_bytes, name.strip().rpartition("/")[2]))
    return tuple(found)


# -- reading -------------------------------------------------------------------------------------


def look(home: Path, available_bytes: int, budget_bytes: int) -> Picture:
    """Take the picture; what cannot be read (another user's, gone meanwhile) is left out."""
    processes = tuple(filter(None, map(_read, psutil.process_iter())))
    home_name = str(home.resolve())
    state_dirs = {process.state_dir for process in processes if process.state_dir} | {home_name}
    return Picture(
        processes, _services(state_dirs), home_name, psutil.Process().pid, available_bytes, budget_bytes, _on_cuda()
    )


def _read(process: psutil.Process) -> Process | None:
    try:
        with process.oneshot():
            name, zombie = process.name(), process.status() == psutil.STATUS_ZOMBIE
            words = [] if zombie else [word for word in process.cmdline() if word]
            held, state_dir = (0, "") if zombie else (_held(process.pid), _state_dir(process, name, words))
            return Process(process.pid, process.ppid(), name, " ".join(words), zombie, held, state_dir)
    except (psutil.Error, OSError):
        return None


def _held(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _state_dir(process: psutil.Process, name: str, words: Sequence[str]) -> str:
    """That a private server or a process of a private cluster belongs to; "": it is neither, or not ours to look at."""
    with contextlib.suppress(psutil.Error, OSError):
        if name.startswith(SERVER_NAMES):
            place = Path(process.cwd())
            return str(place.parent) if (place.parent / "redis.secret").exists() else ""
        if words and (words[0].startswith("ray::") or any(map(TEMP_DIR.search, words))):
            token = Path(process.environ().get("RAY_AUTH_TOKEN_PATH", ""))
            return str(token.parent.resolve()) if token.name == TOKEN_FILE else ""
    return ""


def _services(state_dirs: set[str]) -> dict[str, int]:
    try:
        holders = lock_holders(Path("/proc/locks").read_text())
    except OSError:  # some sandboxes have none: believe the run file
        pids = {name: _running(Path(name) / "run.json") for name in state_dirs}
        return {name: pid for name, pid in pids.items() if pid}
    inodes = {}
    for name in state_dirs:
        with contextlib.suppress(OSError):
            inodes[name] = (Path(name) / "serve.lock").stat().st_ino
    return {name: holders[inode] for name, inode in inodes.items() if inode in holders}


def _running(run_file: Path) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError):
        pid = int(json.loads(run_file.read_text())["pid"])
        return pid if psutil.pid_exists(pid) else 0
    return 0


def _on_cuda() -> tuple[ComputeProcess, ...]:
    if shutil.which(NVIDIA_SMI[0]) is None:
        return ()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SECONDS, check=False)
        return compute_processes(ended.stdout) if ended.returncode == 0 else ()
    return ()
