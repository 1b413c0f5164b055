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


def start_detached(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task in an empty context: no child of the running call. The caller keeps the reference."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())
