"""Owns what a request for a response may say."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.api.wire import KeepAlive
from session_store.files import Pairs

# Fields of the OpenAI API that are known and not built, with the only values that mean "off".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "image": (),
    "context_management": ([],),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "multi_agent": (),
    "prompt": (),
    "prompt_cache_options": (),
    "reasoning": ({}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "text": (
        {},
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "top_logprobs": (0,),
}
READING_UNSUPPORTED = {"stream": ("false",), "starting_after": (), "include": (), "include[]": ()}


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ConversationParam(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    id: str


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_obfuscation: Literal[False] = False


class ResponseRequest(KeepAlive):
    """Body of POST /v1/responses. The README's table says what each field means; a test compares the two."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    input: str | list[Any] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationParam | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    truncation: Literal["auto", "disabled"] = "disabled"
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    prompt_cache_key: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    metadata: Pairs = Field(default_factory=dict)
    user: str | None = Field(None, max_length=512)
    prompt_cache_retention: Literal["in_memory", "24h"] = "in_memory"

    @model_validator(mode="after")
    def _one_history(self) -> ResponseRequest:
        if self.previous_response_id is not None and self.conversation is not None:
            raise ValueError("previous_response_id and conversation: send one of the two")
        return self

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation


class Reading(BaseModel):
    """The query of a read."""

    model_config = ConfigDict(extra="forbid")
