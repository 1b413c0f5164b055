"""Owns structured logs: one JSON object a line, in a file; the console stays clean. Never prompts, never keys."""

from __future__ import annotations

import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import orjson


class EventLogger:
    """Appends one line per event. Several processes share the file: each line is one write of an O_APPEND file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.Lock()

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        record = {"at": round(time.time(), 3), "level": level, "event": event, "pid": os.getpid(), **fields}
        line = orjson.dumps(record, default=str, option=orjson.OPT_APPEND_NEWLINE)
        with self._lock:
            os.write(self._fd, line)


# Of the gateway in this process. Here, and not beside it: Serve pickles the gateway's class by value, with its globals.
of_process: list[EventLogger] = []


def note_bug(error: BaseException, **where: Any) -> None:
    """With its traceback, in the log of this process's gateway."""
    for log in of_process:
        log.error("bug", cause="".join(traceback.format_exception(error)), **where)


def event_logger(path: str) -> EventLogger:
    return EventLogger(Path(path))
