"""Three client stacks hold conversations with a service, unmodified: they get its base URL and a key, nothing else.

    python -m tests.acceptance.sdk_clients            a real model and a fake one
    python -m tests.acceptance.sdk_clients --quick    the fake one alone

What it proves. The OpenAI Python client, the OpenAI Agents SDK and LangChain's ChatOpenAI hold conversations of several
turns: in conversations, in chains of previous_response_id, in sessions of the Agents SDK, with the history passed back,
streamed and whole. After every turn
- the prompt has as many tokens as all that was said before, counted without the service,
- the answer is the one that the model gives to exactly that prompt,
and at the end the items that the conversations API lists, and those that lie in Redis, are what was said: nothing is
lost, nothing is there twice. Function calls are scripted, so they are asked of the fake model alone.

Prints a table, one row for each check; progress goes to stderr. Exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orchestrator.config import load_config
from tests.acceptance import sdk_agents, sdk_langchain, sdk_openai
from tests.acceptance.client import say
from tests.acceptance.program import add_state_dir, run_in
from tests.acceptance.sdk_talk import Check, Target
from tests.service import RunningService

CONFIG = Path(__file__).parents[1] / "data" / "sdk_clients.yaml"
FAKE, REAL = "scripted", "smollm2-135m-instruct"
CHECKS: tuple[Check, ...] = (*sdk_openai.CHECKS, *sdk_agents.CHECKS, *sdk_langchain.CHECKS)


@dataclass(frozen=True)
class Row:
    """One check on one model: what was seen, or why it failed."""

    check: Check
    target: Target
    seen: str
    failed: bool
    seconds: float


def run_check(check: Check, target: Target) -> Row:
    """Whatever a client library raises is its check's failure, not the program's end."""
    begin = time.monotonic()
    try:
        seen, failed = check.run(target), False
    except Exception as error:  # noqa: BLE001 — boundary: one check that fails must not hide the others
        seen, failed = f"{type(error).__name__}: {error}", True
        say("".join(traceback.format_exception(error)))
    row = Row(check, target, seen, failed, time.monotonic() - begin)
    say(f"{check.client}, {target.kind} model: {check.what}: {'FAILED' if failed else 'ok'}, {row.seconds:.1f} s")
    return row


def run(state_dir: Path, *, quick: bool) -> list[Row]:
    """Every check on every model that can do it."""
    service = RunningService(CONFIG, state_dir)
    try:
        service.start()
        fake = Target(service.url, state_dir, FAKE)
        real = Target(service.url, state_dir, REAL, load_config(CONFIG).cache_dir / "models" / REAL)
        plan = [(check, real) for check in CHECKS if not (quick or check.fake_only)]
        plan += [(check, fake) for check in CHECKS]
        return [run_check(check, target) for check, target in plan]
    finally:
        service.stop()


def show(rows: list[Row]) -> None:
    table = Table(title=f"unmodified clients on {CONFIG.name}")
    for name in ("client", "version", "model", "what was done", "what was seen", "result"):
        table.add_column(name, overflow="fold")
    for row in sorted(rows, key=lambda row: [check.client for check in CHECKS].index(row.check.client)):
        model = f"{row.target.model} ({row.target.kind})"
        result = "FAILED" if row.failed else "ok"
        table.add_row(row.check.client, version(row.check.client), model, row.check.what, row.seen[:300], result)
    Console(width=200).print(table)


def verdict(rows: list[Row]) -> int:
    """The exit code, once the table has been shown."""
    show(rows)
    failed = sum(row.failed for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} checks held")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the fake model alone")
    add_state_dir(parser)
    options = parser.parse_args()
    return run_in(options.state_dir, "sdk-clients-", lambda state_dir: verdict(run(state_dir, quick=options.quick)))


if __name__ == "__main__":
    sys.exit(main())
