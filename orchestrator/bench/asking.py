"""Owns a benchmark's process that stays up and does something each time it is asked, so that sides can take turns.

It speaks in lines: a word and a number come in, ``= `` and JSON go out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from engine.memory import PROCESS_ENVIRONMENT
from policies.errors import OrchestratorError

ANSWER = "= "
READY = "ready"


class Asked:
    """``python -m module``, which calls ``obey``. ``huge_pages``: with the environment that engine hosts have."""

    def __init__(self, module: str, *args: str, huge_pages: bool = True) -> None:
        self._what = " ".join([module, *args])
        inherited = {name: value for name, value in os.environ.items() if name not in PROCESS_ENVIRONMENT}
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 — a pipe that nobody reads would stop the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            env={**inherited, **(PROCESS_ENVIRONMENT if huge_pages else {})},
        )

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._words.close()

    def ask(self, word: str, number: int = 0) -> Any:
        """Its answer; OrchestratorError with its last words when it dies. ``READY`` waits until it has started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{word} {number}\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
        except BrokenPipeError:
            pass
        self._words.seek(0)
        last = " ".join(self._words.read().strip().splitlines()[-1:])
        raise OrchestratorError(f"bench process {self._what} failed when asked to {word}: {last}")


def obey(work: Mapping[str, Callable[[int], object]]) -> None:
    """In the process: do what is asked until nobody asks any more."""
    for line in sys.stdin:
        word, _, number = line.partition(" ")
        answer = None if word == READY else work[word](int(number))
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)
