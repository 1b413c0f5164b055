"""The main job on the real service: one session, two models, memory for one, and everything killed once.

    python -m tests.acceptance.main_job           12 turns
    python -m tests.acceptance.main_job --quick    6 turns

Prints a table of the turns and ``turns lost 0, doubled 0``; progress and proofs go to stderr. Exit code 0 only if every
check holds.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

import orchestrator
from orchestrator.config import load_config
from orchestrator.tokens import FALLBACK_TEMPLATE
from tests.acceptance.client import Conversation, Turn, say
from tests.acceptance.faults import Fault, Window
from tests.acceptance.program import add_state_dir, run_in
from tests.acceptance.reader import Count, Reader, count_turns, oracle_tokens, turn_id_of
from tests.service import ADMIN, RunningService

CONFIG = Path(orchestrator.__file__).with_name("demo.yaml")
TENANT, KEY, SESSION = "acme", "sk-demo-acme", "main-job"
SMOL, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
SHORT_TOKENS, LONG_TOKENS = 32, 96  # of an answer; a long one lasts long enough to be killed in the middle
LONG_QUESTION = "Tell me a long story about a lighthouse keeper and his dog. Begin with: Once upon a time"
QUESTIONS = (
    "Name one thing that floats.", "What is the capital of France?", "Write a sentence about rain.",
    "Which animals can fly?", "What is bread made of?", "Describe a forest in one sentence.",
    "What does a carpenter do?", "Why is the sky blue?", "Name three colours.",
    "What is the opposite of cold?", "How many days has a week?", "Say goodbye in one sentence.",
)  # fmt: skip
ORACLE_TURNS = (2, 3)  # one per model, and the second and third see what came before


@dataclass(frozen=True)
class Step:
    """One turn of the plan."""

    model: str
    fault: Fault | None = None
    long: bool = False


def plan(quick: bool) -> list[Step]:
    """The turns, models alternating, so that every turn is a switch."""
    streaming_host = Step(SMOL, Fault("host", Window.STREAMING), long=True)
    controller = Step(GEMMA, Fault("controller", Window.SWITCHING))
    gateway = Step(SMOL, Fault("gateway", Window.STREAMING))
    if quick:
        return [Step(SMOL), controller, streaming_host, Step(GEMMA), gateway, Step(GEMMA)]
    return [
        Step(SMOL),
        Step(GEMMA),
        Step(SMOL),
        Step(GEMMA, Fault("host", Window.BETWEEN)),  # asleep: must come back cold
        Step(SMOL),
        Step(GEMMA),
        streaming_host,
        controller,
        gateway,
        Step(GEMMA, Fault("resident host", Window.BETWEEN)),
        Step(SMOL, Fault("service", Window.BETWEEN)),
        Step(GEMMA),
    ]


class MainJob:
    """One run."""

    def __init__(self, steps: list[Step], state_dir: Path, seed: int) -> None:
        self._service = RunningService(CONFIG, state_dir)
        self._talk = Conversation(self._service.url, KEY, SESSION)
        draw = random.Random(seed)
        self._plan = [(step, _turn(number, step, draw)) for number, step in enumerate(steps, 1)]
        self._problems: list[str] = []
        self._pool_events: dict[tuple[str, float], dict[str, Any]] = {}  # kept here: a killed controller forgets them

    def run(self) -> int:
        """0 if every check held."""
        try:
            self._service.start()
            for step, turn in self._plan:
                self._take(step, turn)
            reader = Reader(self._service.state_dir)
            items = reader.items(TENANT, SESSION)
            count = self._count(reader, items)
            self._print(reader, items, count)
        finally:
            self._service.stop()
        for problem in self._problems:
            say(f"FAILED: {problem}")
        return 1 if self._problems else 0

    # -- one turn --------------------------------------------------------------------

    def _take(self, step: Step, turn: Turn) -> None:
        fault, service = step.fault, self._service
        if fault is not None:
            fault.aim(service, turn)
            if fault.window is Window.BETWEEN:
                fault.strike(service)
        turn.state_before = service.model(turn.model)["state"]
        say(f"turn {turn.number}: {turn.model} ({turn.state_before}){f', {fault}' if fault else ''}")
        before = self._talk.log[-1].acknowledged if self._talk.log else 0.0
        self._talk.take(
            turn,
            lambda: fault.strike_later(service) if fault and fault.window is Window.SWITCHING else None,
            lambda: fault.strike(service) if fault and fault.window is Window.STREAMING else None,
        )
        say(f"  acknowledged after {turn.acknowledged - turn.begun:.1f} s, attempt {turn.attempts}: {turn.text!r:.70}")
        self._remember_events()
        self._check_usage(turn)
        if fault is not None:
            self._check_fault(fault, turn, before)

    def _check_usage(self, turn: Turn) -> None:
        self._check(turn.usage is not None, f"turn {turn.number} has no usage")
        self._check(len(turn.answer_ids) == 1, f"turn {turn.number} is one answer: {turn.answer_ids}")
        if turn.number in ORACLE_TURNS:
            model_dir = load_config(CONFIG).cache_dir / "models" / turn.model
            oracle = oracle_tokens(model_dir, self._talk.messages_before(turn), FALLBACK_TEMPLATE)
            said = (
                f"turn {turn.number}: {turn.usage.prompt_tokens} prompt tokens of {turn.number} turns, oracle {oracle}"
            )
            say(f"  {said}")
            self._check(turn.usage.prompt_tokens == oracle, said)

    def _check_fault(self, fault: Fault, turn: Turn, before: float) -> None:
        held, proof = fault.proof(turn, before)
        say(f"  proof: {proof}")
        self._check(held, f"died outside its window: {proof}")
        if fault.window is not Window.STREAMING:
            return
        if fault.victim == "gateway":
            self._check(turn.attempts > 1, f"turn {turn.number}: the killed gateway's client noticed nothing")
            return
        said = len("".join(text for at, text in turn.pieces if at <= fault.killed_at))
        rest = len(turn.text) - said
        say(f"  continued in the same stream: {said} characters before the death, {rest} after it")
        self._check(turn.attempts == 1 and said > 0 and rest > 0, f"turn {turn.number} did not continue: {said}+{rest}")
        text, prompt_tokens = self._talk.undisturbed(turn)
        self._check(prompt_tokens == turn.usage.prompt_tokens, f"the undisturbed prompt has {prompt_tokens} tokens")
        self._check(text == turn.text, f"undisturbed {text!r}, continued {turn.text!r}")
        say(f"  undisturbed run of the same prompt: {'the same' if text == turn.text else 'ANOTHER'} text")

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            say(f"  FAILED: {what}")
            self._problems.append(what)

    # -- the end ---------------------------------------------------------------------

    def _count(self, reader: Reader, items: list[dict[str, Any]]) -> Count:
        count = count_turns(self._talk.log, items)
        committed = reader.version(TENANT, SESSION)
        self._check(not count.lost, f"lost: {count.lost}")
        self._check(not count.doubled, f"doubled: {count.doubled}")
        self._check(not count.strange, "; ".join(count.strange))
        self._check(committed == len(self._plan), f"{committed} turns committed, {len(self._plan)} acknowledged")
        return count

    def _print(self, reader: Reader, items: list[dict[str, Any]], count: Count) -> None:
        table = Table(title=f"main job: real models on {self._service.config.name}, counted with {reader.name}")
        for name in ("turn", "model", "state before"):
            table.add_column(name)
        for name in ("queue ms", "load ms", "TTFT ms", "prompt tokens", "cached tokens", "cut"):
            table.add_column(name, justify="right")
        table.add_column("fault injected")
        table.add_column("attempts", justify="right")
        for step, turn in self._plan:
            lost = turn.number in count.lost
            cut = "?" if lost else str(reader.cut(TENANT, SESSION, turn_id_of(turn, items)))
            cached = turn.usage.prompt_tokens_details.cached_tokens
            table.add_row(
                str(turn.number), f"{turn.model} (real)", turn.state_before, _ms(turn.timing_ms("queue")),
                _ms(self._load_ms(turn)), _ms(turn.ttft_ms), str(turn.usage.prompt_tokens), str(cached), cut,
                str(step.fault or ""), str(turn.attempts),
            )  # fmt: skip
        Console(width=200).print(table)
        print(f"turns lost {len(count.lost)}, doubled {len(count.doubled)}")

    def _load_ms(self, turn: Turn) -> float | None:
        """From Server-Timing; where the headers left before the first token, from the pool's own events."""
        if (told := turn.timing_ms("load")) is not None:
            return told
        end = turn.begun_wall + turn.first_token - turn.begun
        ready = [
            event["at"] for event in self._pool_events.values()
            if event["model"] == turn.model and event["new"] == "ready" and turn.begun_wall < event["at"] < end
        ]  # fmt: skip
        return (ready[-1] - turn.begun_wall) * 1000 if ready else None

    def _remember_events(self) -> None:
        url = f"{self._service.url}/admin/events?limit=1000"
        answer = httpx.get(url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30).raise_for_status()
        self._pool_events.update({(event["model"], event["at"]): event for event in answer.json()["events"]})


def _turn(number: int, step: Step, draw: random.Random) -> Turn:
    nonce = f"n{draw.getrandbits(32):08x}"
    ask = LONG_QUESTION if step.long else QUESTIONS[number - 1]
    return Turn(number, step.model, nonce, f"({nonce}) {ask}", LONG_TOKENS if step.long else SHORT_TOKENS)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="6 turns and the three faults that hurt most")
    parser.add_argument("--seed", type=int, default=1, help="of the nonces")
    add_state_dir(parser)
    options = parser.parse_args()
    return run_in(
        options.state_dir, "main-job-", lambda state_dir: MainJob(plan(options.quick), state_dir, options.seed).run()
    )


if __name__ == "__main__":
    sys.exit(main())
