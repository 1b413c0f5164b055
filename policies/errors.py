"""Owns the one exception tree of the project.

    OrchestratorError (500 internal_error)
    ├── BadRequest (400)
    │   ├── UnsupportedField        a field we know of but do not support
    │   ├── ContextLengthExceeded   the prompt (+ answer) does not fit the model's window
    │   ├── RequestTooLarge         could never fit the KV pool, however long it waited
    │   └── BodyTooLarge (413)      more bytes than http.max_body
    ├── Unauthorized (401)
    ├── PermissionDenied (403)
    ├── NotFound (404)
    │   ├── ModelNotFound
    │   ├── SessionNotFound
    │   ├── ItemNotFound
    │   └── ResponseNotFound
    ├── MethodNotAllowed (405)
    ├── Conflict (409)
    │   ├── SessionBusy             another turn holds the session's lease
    │   ├── LeaseLost               our fencing token is stale; nothing was written
    │   ├── TurnCancelled           its client has ended it
    │   ├── SessionExists           there is one of that name
    │   └── IdempotencyMismatch     same key, different request
    ├── RateLimited (429)
    │   ├── TenantLimit             the tenant's own limit
    │   └── QueueFull               a bounded queue is full
    ├── Unavailable (503)
    │   ├── ModelLoading            not ready before the deadline; the load goes on
    │   ├── SwapBudgetExceeded      it will not be ready before the deadline; the load goes on
    │   ├── LoadFailed              the load failed; one cached cause during the cooldown
    │   │   └── NotKnownYet         what the load would go by has not been found out
    │   ├── CapacityPinned          every resident model is pinned
    │   ├── ModelDoesNotFit         larger than any device's whole budget
    │   ├── HostUnavailable         this host is draining, asleep or not ready: ask again elsewhere
    │   │   └── OutOfMemory         the device has less memory than the books say
    │   ├── HostLost                the host's process died
    │   └── StoreUnavailable        Redis is unreachable, full or read-only
    ├── DeadlineExceeded (504)
    ├── EngineError (500)           one generation failed inside the engine
    │   └── CheckpointRefused       a file that is not whole, or not of these weights and this tenant
    ├── IllegalTransition (500)     a state machine was asked for an edge it does not have
    ├── ConfigError                 exit code 2
    ├── NotReachable                exit code 3
    └── DoesNotFit                  exit code 4

Every error carries what a client needs (status, type, param, code, Retry-After) and what an operator needs (a hint with
the numbers). Errors travel between processes, so each one survives a pickle round trip.
"""

from __future__ import annotations

from typing import Any, ClassVar

MOST_SAID, MOST_PARAM = 2_000, 200  # characters of an answer's message and param


class OrchestratorError(Exception):
    """Base of all errors we raise on purpose.

    Args:
        message: one sentence with the numbers: which thing, which limit, which value, what to do.
        param: the request field at fault, if one is.
        retry_after_seconds: when asking again could help; None when it cannot.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, param: str | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.param, self.retry_after_seconds)

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The OpenAI error body."""
        return {
            "error": {
                "message": _short(self.message, MOST_SAID),
                "type": self.error_type,
                "param": None if self.param is None else _short(self.param, MOST_PARAM),
                "code": self.code,
            }
        }


def _short(text: str, most: int) -> str:
    """What a client sent may be in it, of any length."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _rebuild(
    kind: type[OrchestratorError], message: str, param: str | None, retry_after_seconds: float | None
) -> OrchestratorError:
    return kind(message, param=param, retry_after_seconds=retry_after_seconds)


class BadRequest(OrchestratorError):
    code = "invalid_request"
    http_status = 400
    error_type = "invalid_request_error"


class UnsupportedField(BadRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"  # LangChain matches this string literally


class RequestTooLarge(BadRequest):
    code = "request_too_large"


class BodyTooLarge(BadRequest):
    code = "body_too_large"
    http_status = 413


class Unauthorized(OrchestratorError):
    code = "invalid_api_key"
    http_status = 401
    error_type = "authentication_error"


class PermissionDenied(OrchestratorError):
    code = "permission_denied"
    http_status = 403
    error_type = "permission_error"


class NotFound(OrchestratorError):
    code = "not_found"
    http_status = 404
    error_type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class SessionNotFound(NotFound):
    code = "session_not_found"


class ItemNotFound(NotFound):
    code = "item_not_found"


class ResponseNotFound(NotFound):
    code = "response_not_found"


class MethodNotAllowed(OrchestratorError):
    code = "method_not_allowed"
    http_status = 405
    error_type = "invalid_request_error"


class Conflict(OrchestratorError):
    code = "conflict"
    http_status = 409
    error_type = "conflict_error"


class SessionBusy(Conflict):
    code = "session_busy"


class LeaseLost(Conflict):
    code = "lease_lost"


class TurnCancelled(Conflict):
    code = "cancelled"


class SessionExists(Conflict):
    code = "session_exists"


class IdempotencyMismatch(Conflict):
    code = "idempotency_mismatch"


class RateLimited(OrchestratorError):
    code = "rate_limit_exceeded"
    http_status = 429
    error_type = "rate_limit_error"


class TenantLimit(RateLimited):
    code = "tenant_limit"


class QueueFull(RateLimited):
    code = "queue_full"


class Unavailable(OrchestratorError):
    code = "unavailable"
    http_status = 503
    error_type = "service_unavailable_error"


class ModelLoading(Unavailable):
    code = "model_loading"


class SwapBudgetExceeded(Unavailable):
    code = "swap_budget_exceeded"


class LoadFailed(Unavailable):
    code = "load_failed"


class NotKnownYet(LoadFailed):
    """What a load would need to have found out before, it has not."""


class CapacityPinned(Unavailable):
    code = "capacity_pinned"


class ModelDoesNotFit(Unavailable):
    code = "does_not_fit"


class HostUnavailable(Unavailable):
    code = "host_unavailable"


class OutOfMemory(HostUnavailable):
    code = "out_of_memory"


class HostLost(Unavailable):
    code = "host_lost"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class DeadlineExceeded(OrchestratorError):
    code = "deadline_exceeded"
    http_status = 504
    error_type = "timeout_error"


class EngineError(OrchestratorError):
    code = "engine_error"


class CheckpointRefused(EngineError):
    """A checkpoint is damaged, of a newer version, or not of these weights and this tenant; nothing of it was used."""

    code = "checkpoint_refused"


class IllegalTransition(OrchestratorError):
    code = "illegal_transition"


class ConfigError(OrchestratorError):
    code = "config_error"
    exit_code = 2


class NotReachable(OrchestratorError):
    code = "not_reachable"
    exit_code = 3


class DoesNotFit(OrchestratorError):
    code = "does_not_fit"
    exit_code = 4
