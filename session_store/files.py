"""Owns the lines of an exported session: what each may hold. Somebody else may have written them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from policies.errors import BadRequest

EXPORT_VERSION = 1
LATEST = 1e11  # seconds since the epoch
_Line = TypeVar("_Line", bound=BaseModel)
Pairs = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class FileHead(BaseModel):
    """The first line."""

    model_config = ConfigDict(strict=True)
    export: Literal[1]  # EXPORT_VERSION
    session_id: str
    kind: Literal["session", "conversation", "chain"] = "session"
    metadata: Pairs = Field(default_factory=dict)
    created: float | None = Field(None, ge=0, le=LATEST)


class FileItem(BaseModel):
    """Each line after it."""

    model_config = ConfigDict(strict=True)
    v: Literal[2]  # session_store.items.SCHEMA_VERSION
    id: str = Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    turn: str | None = Field(None, max_length=200)
    at: float = Field(ge=0, le=LATEST)
    item: dict[str, Any]
    model: str | None = Field(None, max_length=200)
    pinned: bool = False
    ids: str | None = None
    gone: None = None


def parse_line(number: int, line: bytes, kind: type[_Line]) -> _Line:
    """BadRequest with the line's number and the field at fault."""
    try:
        return kind.model_validate(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"line {number}: not JSON: {error}", param="file") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadRequest(f"line {number}: {where}: {first['msg']}" if where else f"line {number}: {first['msg']}",
                         param="file") from error  # fmt: skip
