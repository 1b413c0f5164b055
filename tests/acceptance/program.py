"""Owns what the programs do around their work: the state directory, the time it took, the exit code."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.acceptance.client import say


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", type=Path, help="kept; none: a temporary one, kept only after a failure")


def run_in(given: Path | None, prefix: str, work: Callable[[Path], int]) -> int:
    """The exit code of ``work``, done in the directory that was given or in a temporary one."""
    begin = time.monotonic()
    state_dir = given or Path(tempfile.mkdtemp(prefix=prefix))
    code = 1
    try:
        code = work(state_dir)
    finally:
        if code:
            say(f"logs are kept in {state_dir}")
        elif given is None:
            shutil.rmtree(state_dir)
    say(f"{time.monotonic() - begin:.0f} s")
    return code
