"""Owns the rule for work that must outlive the request that happened to start it.

Ray cancels what a cancelled call has called in turn, and it knows the caller by a context variable, which asyncio tasks
inherit. Serve cancels a request when its client leaves: a load begun by that request failed with "task was cancelled",
and the stream that a gateway shares with a host broke for everybody.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

_running: set[asyncio.Task[Any]] = set()  # asyncio itself keeps no task alive


def start_detached(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task in an empty context: no child of the running call. It runs to its end, held by anybody or not."""
    task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task
