"""Owns what is said of Ray's errors."""

from __future__ import annotations

from ray.exceptions import RayTaskError, TaskCancelledError
from starlette.requests import ClientDisconnect


def said(error: BaseException) -> str:
    """One line: of an exception inside an actor what it was, not Ray's traceback of it."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def client_left(error: BaseException) -> bool:
    """Is it nothing but Ray's word for that, or Starlette's? Serve cancels the call; waiters may be in task groups."""
    if isinstance(error, BaseExceptionGroup):
        return all(client_left(each) for each in error.exceptions)
    return isinstance(error, (TaskCancelledError, ClientDisconnect))
