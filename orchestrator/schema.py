"""Owns what is generated from the config's models: the JSON schema and the example file in ``deploy/``.

``python -m orchestrator.schema`` writes both; a test compares them with what is committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator.config import Config, section_of
from policies.types import Tier

DEPLOY = Path(__file__).parents[1] / "deploy"
EXAMPLES: dict[str, Any] = {  # for fields without a default
    "devices.name": "cpu0",
    "devices.memory": "8GiB",
    "models.name": "my-model",
    "models.source": "demo:smollm2-135m-instruct",
    "models.memory": "2GiB",
    "tenants.name": "acme",
    "state_dir": "~/.local/state/context-orchestrator",
    "cache_dir": "~/.cache/context-orchestrator",
}


def schema_text() -> str:
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"


def example_text() -> str:
    """Every key with its default, or an example where there is none, and its meaning."""
    head = "# Every key there is. Precedence: flag > environment (ORCHESTRATOR_HTTP__PORT) > this file > default.\n"
    return head + "\n".join(_lines(Config, "", "")) + "\n"


def _lines(model: type[BaseModel], path: str, indent: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        where = f"{path}{name}"
        inner = section_of(field.annotation)
        if inner is None:
            yield f"{indent}{name}: {_value(field, where)}{_comment(field)}"
        elif _is_list(field):
            yield f"{indent}{name}:"
            first, *rest = _lines(inner, f"{where}.", f"{indent}    ")
            yield f"{indent}  - {first.strip()}"
            yield from rest
        elif field.default is None:
            yield f"{indent}# {name}: only with source fake; see engine.fake.FakeSettings"
        else:
            yield f"{indent}{name}:"
            yield from _lines(inner, f"{where}.", f"{indent}  ")


def _is_list(field: FieldInfo) -> bool:
    return getattr(field.annotation, "__origin__", None) is tuple


def _value(field: FieldInfo, where: str) -> str:
    if where in EXAMPLES:
        return str(EXAMPLES[where])
    value = field.get_default(call_default_factory=False)
    assert value is not PydanticUndefined, f"{where} has neither default nor example"
    if isinstance(value, Tier):
        return value.name.lower()
    return json.dumps(value)


def _comment(field: FieldInfo) -> str:
    return f"  # {field.description}" if field.description else ""


def main() -> None:
    DEPLOY.mkdir(exist_ok=True)
    (DEPLOY / "config.schema.json").write_text(schema_text())
    (DEPLOY / "config.example.yaml").write_text(example_text())


if __name__ == "__main__":
    main()
