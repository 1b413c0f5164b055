"""Owns the one error envelope of every route."""

from __future__ import annotations

import math

import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from policies.errors import MethodNotAllowed, NotFound, OrchestratorError


def error_headers(error: OrchestratorError) -> dict[str, str]:
    """Retry-After in whole seconds for everybody, in milliseconds for the OpenAI client."""
    if error.retry_after_seconds is None:
        return {}
    return {
        "Retry-After": str(max(1, math.ceil(error.retry_after_seconds))),
        "retry-after-ms": str(max(1, round(error.retry_after_seconds * 1000))),
    }


def error_response(error: OrchestratorError) -> Response:
    return Response(
        orjson.dumps(error.envelope()),
        status_code=error.http_status,
        media_type="application/json",
        headers=error_headers(error),
    )


def from_http_exception(request: Request, error: HTTPException) -> OrchestratorError:
    """Starlette's own 404 and 405 in our words."""
    if error.status_code == 404:
        return NotFound(f"there is no {request.method} {request.url.path}")
    if error.status_code == 405:
        return MethodNotAllowed(f"{request.method} is not allowed on {request.url.path}")
    wrapped = OrchestratorError(str(error.detail))
    wrapped.http_status = error.status_code  # type: ignore[misc]
    return wrapped
