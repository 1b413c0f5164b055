"""Owns what is said of Ray's errors."""

from __future__ import annotations

from ray.exceptions import RayTaskError


def said(error: BaseException) -> str:
    """One line: of an exception inside an actor what it was, not Ray's traceback of it."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
