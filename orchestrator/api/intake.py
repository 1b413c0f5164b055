"""Owns what all routes that begin a turn do with a request: its body, the model it names, how a retry is known."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError

from orchestrator.api.wire import explain_invalid
from orchestrator.config import Config, ModelConfig, TenantConfig
from policies.errors import BadRequest, BodyTooLarge, ModelNotFound, UnsupportedField

REQUEST_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")
PIN_SECONDS = 86_400.0  # of prompt_cache_retention "24h"
MOST_LEVELS = 64
MOST_CALLS = 128  # of one answer
NOT_ASKED = ("stream", "stream_options")  # fields that say how to deliver, not what is asked

Body = TypeVar("Body", bound=BaseModel)


class Models:
    """The models by all their names."""

    def __init__(self, config: Config) -> None:
        self._models = {name: model for model in config.models for name in (model.name, *model.aliases)}

    def find(self, name: str, limit: int | None, param: str = "max_tokens") -> ModelConfig:
        """ModelNotFound; BadRequest where so long an answer leaves no room for a prompt."""
        model = self._models.get(name)
        if model is None:
            near = difflib.get_close_matches(name, self._models, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self._models)}"
            raise ModelNotFound(f"the model {name!r} does not exist; {hint}", param="model")
        if limit is not None and limit >= model.max_model_len:
            raise BadRequest(
                f"{param} {limit} leaves no room for a prompt in a window of {model.max_model_len} tokens", param=param
            )
        return model


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The body, as long as it is no longer than ``most_bytes``. BodyTooLarge."""
    raw = bytearray()
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most_bytes:  # before it is sent, by who waits for "100 Continue"
        raise BodyTooLarge(f"the body has {said} bytes; the limit of this service is {most_bytes}")
    async for piece in request.stream():
        raw += piece
        if len(raw) > most_bytes:
            raise BodyTooLarge(f"the body is larger than {most_bytes} bytes, the limit of this service")
    return bytes(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """BadRequest unless it is a JSON object."""
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    _check_depth(body)
    return body


def _check_depth(body: dict[str, Any]) -> None:
    """BadRequest for what could be read and not be written again inside something else."""
    level: list[Any] = [body]
    for _ in range(MOST_LEVELS):
        inside = [value for one in level for value in (one.values() if isinstance(one, dict) else one)]
        level = [value for value in inside if isinstance(value, dict | list)]
        if not level:
            return
    raise BadRequest(f"the body is nested deeper than {MOST_LEVELS} levels")


def validate(kind: type[Body], body: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> Body:
    """The body as this wire model; UnsupportedField for a known field we do not support and that is not switched off.

    ``null`` means "as if left out": OpenAI's clients send it so.
    """
    for name, off in unsupported.items():
        if name in body and body[name] is not None and not _is_one_of(body[name], off):
            raise UnsupportedField(f"{name!r} is not supported by this service; leave it out", param=name)
    said = {
        name: value
        for name, value in body.items()
        if name not in unsupported and (value is not None or name not in kind.model_fields)
    }
    try:
        return kind.model_validate(said)
    except ValidationError as error:
        raise explain_invalid(error.errors()) from error


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """As JSON has it: 0 is not false."""
    return any(type(value) is type(one) and value == one for one in known)


def fingerprint(body: Mapping[str, Any]) -> str:
    """Of what the request asks, however it is to be delivered."""
    asked = {name: value for name, value in body.items() if name not in NOT_ASKED}
    return hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()


def pin_seconds(retention: str, place: object, tenant: TenantConfig) -> float:
    """How long the session's KV is to be evicted last; BadRequest where nothing could be kept."""
    if retention == "in_memory":
        return 0.0
    name = "prompt_cache_retention"
    if place is None:
        raise BadRequest(f"{name} {retention!r} needs a session: send X-Session-ID too", param=name)
    if not tenant.kv_pin:
        raise BadRequest(f"{name} {retention!r}: tenant {tenant.name} has no kv_pin in the config", param=name)
    return PIN_SECONDS


def most_calls(tools: object, choice: object, model: ModelConfig, *, parallel: bool) -> int:
    """How many functions an answer may call; UnsupportedField where the model cannot, or cannot be made to."""
    if choice not in ("auto", "none"):
        raise UnsupportedField(f"tool_choice {choice!r} is not supported: auto or none", param="tool_choice")
    if not tools:
        return 0
    if model.source != "fake":  # there is no template and no parser for its calls
        raise UnsupportedField("'tools' is not supported by this model yet; leave it out", param="tools")
    return 0 if choice == "none" else MOST_CALLS if parallel else 1


def request_id_of(request: Request, fallback: str) -> str:
    """The client's X-Request-ID if it is a plain one."""
    offered = request.headers.get("x-request-id", "")
    return offered if REQUEST_ID.match(offered) else fallback
