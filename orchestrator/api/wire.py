"""Owns the OpenAI wire models of chat completions: what is accepted, and what is said back.

Known fields that are not supported yet are refused by name (400 ``unsupported_parameter``); a field nobody knows is
refused too: an option is never ignored silently.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from policies.errors import BadRequest, UnsupportedField

# Fields of the OpenAI API that are known and not built, with the only values that mean "off".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "web_search_options": (),
    "store": (False,),
    "verbosity": (),
    "prompt_cache_options": (),
    "moderation": (),
}


MOST_BIASES = 1024
KIND = re.compile(r"str|float|(list|dict)\[.*\]|ConversationParam")  # between fields: of a union, what was tried
DURATION = re.compile(r"(-?\d+(?:\.\d+)?)([smh]?)")
DURATION_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(min_length=1, max_length=1024)
    arguments: str


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    id: str = Field(min_length=1, max_length=1024)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(None, min_length=1, max_length=1024)
    refusal: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a {self.role} message needs content")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool message needs tool_call_id: the call that it answers")
        return self

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: Function


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class KeepAlive(BaseModel):
    """``keep_alive``: how long the model stays awake after the request."""

    keep_alive: float | str | None = None

    @property
    def keep_alive_seconds(self) -> float | None:
        assert not isinstance(self.keep_alive, str)  # the validator has read it
        return self.keep_alive

    @field_validator("keep_alive")
    @classmethod
    def _duration(cls, value: float | str | None) -> float | None:
        """Seconds, or a text such as "30s", "5m", "1h"; negative: for ever (as ollama has it)."""
        if isinstance(value, str):
            found = DURATION.fullmatch(value)
            if found is None:
                raise ValueError(f"{value!r} is no duration: seconds, or a number with s, m or h")
            value = float(found[1]) * DURATION_SECONDS[found[2] or "s"]
        if value is not None and not math.isfinite(value):
            raise ValueError("must be finite; a negative number means for ever")
        return math.inf if value is not None and value < 0 else value


class ChatRequest(KeepAlive):
    """Body of POST /v1/chat/completions. The README's table says what each field means; a test compares the two."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    min_tokens: int = Field(0, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    n: int = Field(1, ge=1, le=8)
    user: str | None = Field(None, max_length=512)  # carried by clients for their own records
    metadata: dict[str, str] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    prompt_cache_key: str | None = Field(None, max_length=512)  # a hint for OpenAI: KV is found by what prompts say
    safety_identifier: str | None = Field(None, max_length=512)
    session_id: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] = "in_memory"

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("is only for stream: true")
        return value

    @field_validator("max_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        newer = info.data.get("max_completion_tokens")
        if value is not None and newer is not None and value != newer:
            raise ValueError(f"{value} is not max_completion_tokens {newer}: give one of the two")
        return value

    @field_validator("stop")
    @classmethod
    def _some_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > 4:
            raise ValueError(f"at most 4 stop strings, got {len(stops)}")
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids(cls, value: Any) -> Any:
        """Ids come as strings, JSON has no other keys. Whether the vocabulary has them, the engine's door knows."""
        if not isinstance(value, dict):
            return value
        if len(value) > MOST_BIASES:
            raise ValueError(f"at most {MOST_BIASES} tokens, got {len(value)}")
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit() and len(token) < 19):
                raise ValueError(f"{token!r} is not a token id")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token} must be a number from -100 to 100, not {bias!r}")
        return {int(token): bias for token, bias in value.items()}

    @field_validator("min_tokens")
    @classmethod
    def _below_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            limit = info.data.get(name)
            if limit is not None:
                if value > limit:
                    raise ValueError(f"{value} is above {name} {limit}")
                break
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @property
    def alternatives(self) -> int | None:
        """How many alternatives beside each token's log probability; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def answer_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def explain_invalid(errors: list[Any], within: str = "") -> BadRequest:
    """The first problem of a pydantic ValidationError as an OpenAI error naming the field."""
    first = errors[-1] if errors[0]["loc"][-1:] == ("str",) else errors[0]  # of a text or parts: what parts lack
    names = [str(part) for part in first["loc"] if not KIND.fullmatch(str(part))]
    param = ".".join([*([within] if within else []), *names]) or None
    if first["type"] == "extra_forbidden":
        return UnsupportedField(f"unknown field {param!r}", param=param)
    return BadRequest(f"{param}: {first['msg']}" if param else first["msg"], param=param)
