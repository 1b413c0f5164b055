"""A storm of requests over three models with room for one real one, while processes are killed: nothing is lost.

    python -m tests.acceptance.swap_storm            500 requests of 20 clients; 3 hosts and the controller killed
    python -m tests.acceptance.swap_storm --quick     28 requests of 6 clients; 1 host and the controller killed
    python -m tests.acceptance.swap_storm --json      one object instead of the table

Two real models and a tiny one of random weights, tenants of three tiers, some requests turns of a session, some clients
go away. No client sends anything twice. Each request is counted once: answered (whole, with its finish_reason and a
usage that adds up), refused (one error with a code), cancelled by its client, or lost, which is all else. What is said
to a known prompt must be what was said before the storm; the last turns of sessions are computed again afterwards,
without a session, and an independent reader holds what was acknowledged against what lies in Redis.

Prints a row per model, the kills and the verdict; progress goes to stderr. Exit code 1 when a request or an
acknowledged turn is lost, an answer is wrong, more than a tenth was refused, the books of hosts, device and gateway do
not balance at the end, a host died that nobody killed, or the service logged an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from orchestrator.cluster import require_token
from orchestrator.contexts import HostContexts, parse
from orchestrator.diagnosis import conclude
from tests.acceptance.client import say
from tests.acceptance.main_job import QUESTIONS
from tests.acceptance.program import add_state_dir, run_in
from tests.acceptance.reader import Reader, count_turns
from tests.acceptance.storm_clients import (
    MODELS,
    PATIENCE_SECONDS,
    TENANTS,
    TINY,
    Call,
    Clients,
    Messages,
    Outcome,
    Reference,
    Said,
    Size,
    asking,
    plan,
)
from tests.engine_helpers import MARGIN, tiny_llama
from tests.service import ADMIN, RunningService, kill_hard, wait_until

CONFIG = Path(__file__).parents[1] / "data" / "swap_storm.yaml"
PASSAGE = (
    "A lighthouse keeper lived alone on a small island with his old dog. Every evening he climbed the stairs, lit the "
    "lamp and wrote one line into his book. In winter the boat with bread and letters came only once a month. "
)
SHORTEST, LONGEST = 4, 12  # tokens of an answer
AIM_SECONDS, QUIET_SECONDS = 60.0, 60.0
ANSWERED_SHARE = 0.9
BUGS = ("internal_error", "illegal_transition")  # codes that no client should ever see
DEFECTS = ("no_answer", "unfreed", "disk")  # of orchestrator.diagnosis; the others are advice
UP = ("ready", "draining", "sleeping", "deep_sleep", "waking")
AT_REST = ("ready", "sleeping", "deep_sleep", "cold")
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}
PROBE = """
import json, sys, ray
ray.init(address=sys.argv[1], namespace="orchestrator", log_to_driver=False, logging_level="ERROR")
answers = ray.get([ray.get_actor(name).check.remote() for name in sys.argv[2:]], timeout=30)
print(json.dumps([None if answer is None else answer.message for answer in answers]))
"""


FULL = Size(500, 20, 8, 8, ((0.15, "host"), (0.35, "host"), (0.5, "controller"), (0.7, "host")))
# a host that dies while it loads is a failed load, and all who wait for it are refused: too many of a few requests
QUICK = Size(28, 6, 3, 1, ((0.25, "host that is up"), (0.6, "controller")))


# -- undisturbed answers ---------------------------------------------------------------------------


def undisturbed(service: RunningService, model: str, messages: Messages, max_tokens: int) -> tuple[Said, float]:
    """What a model says, and the gap between the best two of its least clear choice."""
    body = asking(model, messages, max_tokens) | {"logprobs": True, "top_logprobs": 2}
    headers = {"Authorization": f"Bearer sk-demo-{TENANTS[0]}"}
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS)
    found = answer.raise_for_status().json()
    (choice,), usage = found["choices"], found["usage"]
    best = [[other["logprob"] for other in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
    said = (choice["message"]["content"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])
    return said, min((first - second for first, second in best), default=0.0)


def references_of(service: RunningService, model: str, count: int, draw: random.Random) -> list[Reference]:
    """Prompts whose answers rounding cannot change; every other one begins with the same long passage."""
    found: list[Reference] = []
    for question in draw.sample(QUESTIONS, len(QUESTIONS)):
        prompt = PASSAGE * (len(found) % 2) + question
        max_tokens = draw.randint(SHORTEST, LONGEST)
        said, gap = undisturbed(service, model, [{"role": "user", "content": prompt}], max_tokens)
        if gap >= MARGIN:
            found.append(Reference(prompt, max_tokens, said))
        if len(found) == count:
            return found
    raise RuntimeError(f"{model}: {len(found)} of {len(QUESTIONS)} prompts have clear answers, {count} are wanted")


# -- the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One process killed with SIGKILL, and seen dead."""

    what: str
    pid: int
    state: str  # of the host, as the pool last knew it
    seconds: float  # since the storm began
    ended: int  # requests
    open: int  # requests on their way


class Storm:
    """One run."""

    def __init__(self, size: Size, directory: Path, seed: int) -> None:
        self._size, self._seed = size, seed
        self._draw = random.Random(seed)
        self._service = RunningService(_config(directory), directory / "state")
        self._calls: list[Call] = []
        self._over = threading.Event()
        self._kills: list[Kill] = []
        self._most_held = (0, 0)  # bytes of hosts: by the ledger, by the kernel
        self._replayed: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()  # of sessions: acknowledged, lost, doubled
        self._problems: list[str] = []

    def run(self, as_json: bool) -> int:
        """0 if every check held."""
        service = self._service
        try:
            service.start()
            say("asking undisturbed")
            references = {m: references_of(service, m, self._size.prompts, self._draw) for m in MODELS}
            clients = plan(self._size, references, self._seed)
            self._calls = [call for calls in clients for call in calls]
            self._begun, self._begun_wall = time.monotonic(), time.time()
            asyncio.run(self._rage(clients))
            switches = self._switches()
            self._check_sessions(Reader(service.state_dir))
            self._check_books()
            self._check_log()
        finally:
            service.stop()
            self._keep_calls()
        left = service.sweep()
        self._check(not left, f"processes outlived the service: {left}")
        self._judge()
        self._print([self._row(model, switches) for model in MODELS], as_json)
        return 1 if self._problems else 0

    async def _rage(self, clients: Sequence[Sequence[Call]]) -> None:
        sender = Clients(self._service)
        beside = [asyncio.create_task(asyncio.to_thread(work)) for work in (self._watch, self._kill_all)]
        try:
            await asyncio.gather(*(sender.run(calls) for calls in clients))
        finally:
            self._over.set()
            await asyncio.gather(*beside)
        self._progress()

    # -- beside the clients --------------------------------------------------------------

    def _kill_all(self) -> None:
        for share, what in self._size.kills:
            while self._ended() < share * self._size.requests and not self._over.wait(0.05):
                pass
            name, pid, state = self._aim(what)
            kill = Kill(name, pid, state, self._seconds(), self._ended(), self._open())
            kill_hard(pid)
            self._kills.append(kill)
            say(f"  killed {name} {state}, pid {pid}: {kill.ended} have ended, {kill.open} are on their way")
        self._check(all(kill.open for kill in self._kills), "something was killed while nobody asked for anything")

    def _aim(self, what: str) -> tuple[str, int, str]:
        """(name, pid, state) of something alive; of hosts, one whose name had no death yet comes first."""
        struck = {kill.what for kill in self._kills}
        until = time.monotonic() + AIM_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):  # the controller is away
                pool = self._service.admin()
                if what == "controller":
                    return what, pool["controller_pid"], ""
                living = self._service.engine_pids()
                hosts = [host for host in pool["models"] if host.get("pid") in living]
                hosts = [host for host in hosts if what == "host" or host["state"] in UP]
                hosts = [host for host in hosts if host["host"] not in struck] or hosts
                if hosts:
                    host = self._draw.choice(hosts)
                    return host["host"], host["pid"], host["state"]
            time.sleep(0.2)
        raise RuntimeError(f"no {what} to kill within {AIM_SECONDS:.0f} s")

    def _watch(self) -> None:
        """The ledger must hold at every look."""
        looks = 0
        while not self._over.wait(1.0):
            self._look()
            looks += 1
            if looks % 5 == 0:
                self._progress()

    def _look(self) -> None:
        kernel, ledger = sum(map(_held_bytes, self._service.engine_pids())), 0
        with contextlib.suppress(httpx.HTTPError):  # the controller is away
            (device,) = self._service.admin()["devices"]
            ledger, budget = device["held_bytes"], device["budget_bytes"]
            self._check(ledger <= budget, f"the ledger holds {ledger} bytes, the budget is {budget}")
            counted = sum(entry["held_bytes"] for entry in device["entries"])
            self._check(counted == ledger, f"the ledger's entries hold {counted} bytes, it says {ledger}")
        self._most_held = (max(ledger, self._most_held[0]), max(kernel, self._most_held[1]))

    def _progress(self) -> None:
        counts = Counter(call.outcome for call in self._calls)
        said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome)
        say(f"{self._seconds():.0f} s: {self._ended()} of {len(self._calls)}: {said}; {self._open()} on their way")

    # -- sessions ------------------------------------------------------------------------

    def _check_sessions(self, reader: Reader) -> None:
        """What was acknowledged is in the history once and in order; what was refused is not in it."""
        say("reading the sessions")
        replays: dict[str, list[tuple[Messages, Call]]] = {model: [] for model in MODELS}
        for session in sorted({call.session for call in self._calls if call.session}):
            calls = [call for call in self._calls if call.session == session]
            items = reader.items(calls[0].tenant, session)
            acknowledged = [call for call in calls if call.acknowledged]
            unsure = [c.nonce for c in calls if not c.acknowledged and c.outcome in (Outcome.CANCELLED, Outcome.LOST)]
            kept = {i["turn_id"] for i in items if i["role"] == "user" and any(n in i["content"] for n in unsure)}
            found = count_turns(acknowledged, [item for item in items if item["turn_id"] not in kept])
            self._check(not found.lost, f"{session} lost turns {found.lost}")
            self._check(not found.doubled and len(kept) <= len(unsure), f"{session} doubled turns {found.doubled}")
            self._check(not found.strange, f"{session}: {'; '.join(found.strange)}")
            self._turns.update(acknowledged=len(acknowledged), lost=len(found.lost), doubled=len(found.doubled))
            if acknowledged and not found.lost:
                replays[acknowledged[-1].model].append((_messages(acknowledged[-1], items), acknowledged[-1]))
        for asked in replays.values():
            for messages, call in sorted(asked, key=lambda one: -len(one[0]))[: self._size.replays]:
                self._replay(messages, call)

    def _replay(self, messages: Messages, call: Call) -> None:
        """Compute a session's last answer again from its text."""
        said, gap = undisturbed(self._service, call.model, messages, call.max_tokens)
        if said[0] == call.text:
            self._replayed["the same"] += 1
        elif said[2] != call.usage["prompt_tokens"] or gap < MARGIN:
            self._replayed["not to be compared"] += 1  # a text that becomes other tokens than were said; a close choice
        else:
            call.wrong = f"{call.session} said {call.text!r}, undisturbed {said[0]!r}"

    # -- books ---------------------------------------------------------------------------

    def _check_books(self) -> None:
        say("checking the books")
        service = self._service
        try:
            wait_until(lambda: not self._unquiet(), QUIET_SECONDS, "nothing is on its way")
        except AssertionError as late:
            self._check(False, f"{late}: {'; '.join(self._unquiet())}")
        self._look()
        for said in conclude(self._contexts()):
            self._check(said.kind not in DEFECTS, f"{said.host}: {said.said}")
        actors = [host["actor"] for host in service.admin()["models"] if host.get("pid")]
        command = [sys.executable, "-c", PROBE, service.ray_address, *actors]
        environment = os.environ | require_token(service.state_dir)
        told = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=90, check=True)
        for actor, problem in zip(actors, json.loads(told.stdout.splitlines()[-1]), strict=True):
            self._check(problem is None, f"{actor}: its books do not balance: {problem}")

    def _check_log(self) -> None:
        """No host died but by our hand, which clients would not notice, and nothing went wrong inside."""
        log = self._log()
        moves = [line for line in log if line["event"] == "transition"]
        died = Counter(m["host"] for m in moves if m["new"] == "lost" or (m["old"], m["new"]) == ("loading", "failed"))
        killed = Counter(kill.what for kill in self._kills)
        for host, times in died.items():
            self._check(times <= killed[host], f"{host} died {times} times, and was killed {killed[host]} times")
        for line in log:
            self._check(line["level"] != "error", f"the service logged {line['event']}: {line.get('error')}")

    def _unquiet(self) -> list[str]:
        """Who still has something on its way, or a process that is nobody's."""
        pool, living = self._service.admin(), self._service.engine_pids()
        known = {host["pid"] for host in pool["models"] if host.get("pid")}
        booked = [entry["host"] for device in pool["devices"] for entry in device["entries"]]  # prepared processes too
        found = []
        if not known <= living or len(living) != len(booked):
            found.append(f"host processes {living}, known {known}, booked {booked}")
        for host in self._contexts():
            if host.snapshot is not None and (host.snapshot.contexts or host.snapshot.pool.held):
                found.append(f"{host.host} has {len(host.snapshot.contexts)} contexts, {host.snapshot.pool}")
        for host in pool["models"]:
            if host["in_flight"] or host["waiting"] or host["state"] not in AT_REST:
                found.append(
                    f"{host['host']} is {host['state']}: {host['in_flight']} in flight, {host['waiting']} wait"
                )
        families = text_string_to_metric_families(httpx.get(f"{self._service.url}/metrics", timeout=30).text)
        running = sum(s.value for f in families for s in f.samples if s.name == "orchestrator_turns_running")
        return [*found, f"{running:.0f} turns run in the gateway"] if running else found

    def _contexts(self) -> list[HostContexts]:
        answer = httpx.get(f"{self._service.url}/admin/contexts", headers=AS_ADMIN, timeout=30)
        return parse(answer.raise_for_status().json())

    # -- the end -------------------------------------------------------------------------

    def _judge(self) -> None:
        for call in self._calls:
            name = f"request {call.number} to {call.model}"
            self._check(call.outcome is not Outcome.LOST, f"{name} lost: {call.why}")
            self._check(not call.wrong, f"{name} wrong: {call.wrong}")
            self._check(call.outcome is not Outcome.REFUSED or call.why not in BUGS, f"{name} refused: {call.why}")
        share = self._answered_share()
        self._check(share >= ANSWERED_SHARE, f"{share:.1%} of the requests not cancelled were answered")

    def _log(self) -> list[dict[str, Any]]:
        """What the service logged in the storm. Of the file, because it outlives the controller."""
        lines = (self._service.state_dir / "orchestrator.log").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["at"] >= self._begun_wall]

    def _switches(self) -> Counter[tuple[str, str]]:
        """How often each model was begun to be loaded and woken; one that is loaded asleep is woken too."""
        moves = [line for line in self._log() if line["event"] == "transition"]
        return Counter((move["model"], move["new"]) for move in moves if move["new"] in ("waking", "loading"))

    def _row(self, model: str, switches: Counter[tuple[str, str]]) -> dict[str, Any]:
        calls = [call for call in self._calls if call.model == model]
        counts = Counter(str(call.outcome) for call in calls)
        waits = sorted(c.first_token - c.begun for c in calls if c.stream and c.outcome is Outcome.ANSWERED)
        return {
            "model": model, "weights": MODELS[model], "asked": len(calls),
            **{str(outcome): counts[outcome] for outcome in Outcome},
            "wrong": sum(bool(call.wrong) for call in calls),
            "wakes": switches[model, "waking"], "loads": switches[model, "loading"],
            "TTFT p50 s": _quantile(waits, 0.5), "p95 s": _quantile(waits, 0.95),
        }  # fmt: skip

    def _print(self, rows: Sequence[dict[str, Any]], as_json: bool) -> None:
        if as_json:
            kills = [asdict(kill) for kill in self._kills]
            print(json.dumps({"models": rows, "kills": kills, "turns": self._turns, "problems": self._problems}))
            return
        size = self._size
        table = Table(title=f"swap storm, seed {self._seed}: {size.requests} requests of {size.clients} clients")
        for name in rows[0]:
            table.add_column(name, justify="left" if name in ("model", "weights") else "right")
        for row in rows:
            table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
        Console(width=160).print(table)
        for kill in self._kills:
            after = f"after {kill.seconds:.0f} s, {kill.ended} requests ended, {kill.open} on their way"
            print(f"killed {kill.what}{kill.state and f' ({kill.state})'} {after}")
        self._print_sums(sum(row["wrong"] for row in rows))

    def _print_sums(self, wrong: int) -> None:
        codes = Counter(call.why for call in self._calls if call.outcome is Outcome.REFUSED)
        print(f"refused with: {', '.join(f'{code} {times}' for code, times in codes.most_common()) or 'nothing'}")
        ledger, kernel = (held / 2**20 for held in self._most_held)
        print(f"hosts held at most {ledger:,.0f} MiB by the ledger, {kernel:,.0f} by the kernel")
        replayed = ", ".join(f"{times} {what}" for what, times in self._replayed.items())
        turns = ", ".join(f"{self._turns[what]} {what}" for what in ("acknowledged", "lost", "doubled"))
        print(f"turns of sessions: {turns}; last ones computed again: {replayed or 'none'}")
        for problem in self._problems:
            print(f"FAILED: {problem}")
        lost = sum(call.outcome is Outcome.LOST for call in self._calls)
        said = f"lost {lost}, wrong {wrong}, answered {self._answered_share():.1%} of those not cancelled"
        print(f"{said}: {'FAILED' if self._problems else 'all checks held'}")

    def _keep_calls(self) -> None:
        """For those who look for what happened."""
        names = ("number", "model", "tenant", "session", "stream", "begun_wall", "seconds", "outcome", "why", "wrong")
        lines = (json.dumps({name: getattr(call, name) for name in names}) for call in self._calls)
        (self._service.state_dir / "calls.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def _answered_share(self) -> float:
        stayed = [call for call in self._calls if call.outcome is not Outcome.CANCELLED]
        return sum(call.outcome is Outcome.ANSWERED for call in stayed) / max(1, len(stayed))

    def _ended(self) -> int:
        return sum(call.outcome is not None for call in self._calls)

    def _open(self) -> int:
        return sum(call.begun > 0 and call.outcome is None for call in self._calls)

    def _seconds(self) -> float:
        return time.monotonic() - self._begun

    def _check(self, holds: bool, what: str) -> None:
        if not holds and what not in self._problems:
            say(f"  FAILED: {what}")
            self._problems.append(what)


def _config(directory: Path) -> Path:
    """The config with the tiny model in its place."""
    config = yaml.safe_load(CONFIG.read_text())
    (tiny,) = (model for model in config["models"] if model["name"] == TINY)
    tiny["source"] = str(tiny_llama(directory / TINY, window=tiny["max_model_len"]))
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _messages(call: Call, items: Sequence[dict[str, Any]]) -> Messages:
    """The stored conversation up to this turn's question."""
    at = next(n for n, item in enumerate(items) if item["role"] == "user" and call.nonce in item["content"])
    return [{"role": item["role"], "content": item["content"]} for item in items[: at + 1]]


def _held_bytes(pid: int) -> int:
    """What a process holds besides pages of mapped files; 0 when it is gone."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    held: int = memory.rss - memory.shared
    return held


def _quantile(values: Sequence[float], share: float) -> float | None:
    """``values`` are sorted."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="28 requests of 6 clients, 2 kills")
    parser.add_argument("--seed", type=int, default=3, help="of requests, cancels and victims")
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    add_state_dir(parser)
    options = parser.parse_args()
    return run_in(
        options.state_dir,
        "swap-storm-",
        lambda directory: Storm(QUICK if options.quick else FULL, directory, options.seed).run(options.json),
    )


if __name__ == "__main__":
    sys.exit(main())
