"""Owns the independent views: a reader of Redis that shares no code with the session store, and a token oracle.

The reader is redis-cli where there is one, else a bare client. It knows the documented keys and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import redis

from tests.acceptance.client import Turn


class Reader:
    """What lies in the Redis of a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._password = (state_dir / "redis.secret").read_text().strip()
        self._port = int((state_dir / "redis.port").read_text())
        self._cli = shutil.which("redis-cli")
        self.name = "redis-cli" if self._cli else "a bare redis client"

    def items(self, tenant: str, session_id: str) -> list[dict[str, Any]]:
        """The session's messages, oldest first: item_id, turn_id, role, content, model."""
        return [_message(record) for record in self.records(tenant, session_id)]

    def records(self, tenant: str, session_id: str) -> list[dict[str, Any]]:
        """All that lies in the session's list, as it is."""
        lines = self._lines("LRANGE", f"co:{{{tenant}/{session_id}}}:items", "0", "-1")
        return [json.loads(line) for line in lines if line]

    def owner(self, tenant: str, session_id: str) -> str:
        """The gateway whose turn this session runs now; "" when none does."""
        return self._lines("HGET", f"co:{{{tenant}/{session_id}}}:lease", "owner")[0]

    def version(self, tenant: str, session_id: str) -> int:
        """How many turns were committed."""
        return int(self._lines("HGET", f"co:{{{tenant}/{session_id}}}:meta", "version")[0])

    def cut(self, tenant: str, session_id: str, turn_id: str) -> int:
        """How many turns the prompt of this turn had to leave out."""
        place_and_record = self._lines("HGET", f"co:{{{tenant}/{session_id}}}:turns", turn_id)
        return json.loads(place_and_record[1])["truncation"].get("dropped_turns", 0)

    def _lines(self, *command: str) -> list[str]:
        if self._cli:
            ended = subprocess.run(
                [self._cli, "-p", str(self._port), "--raw", *command],
                env={**os.environ, "REDISCLI_AUTH": self._password}, capture_output=True, text=True, check=True,
            )  # fmt: skip
            return ended.stdout.strip("\n").split("\n")
        with redis.Redis(port=self._port, password=self._password, decode_responses=True) as client:
            answer = client.execute_command(*command)
        values = answer if isinstance(answer, list) else ["" if answer is None else str(answer)]
        return [line for value in values for line in value.split("\n")]


def _message(record: dict[str, Any]) -> dict[str, Any]:
    content = record["item"]["content"]
    return {
        "item_id": record["id"],
        "turn_id": record["turn"] if "turn" in record else record["id"].split("_")[1],
        "role": record["item"]["role"],
        "content": content if isinstance(content, str) else "".join(part["text"] for part in content),
        "model": record.get("model"),
    }


@dataclass(frozen=True)
class Count:
    """Turn numbers: acknowledged but not in the store as acknowledged, there more than once; and what else is odd."""

    lost: tuple[int, ...]
    doubled: tuple[int, ...]
    strange: tuple[str, ...]


def count_turns(acknowledged: Sequence[Turn], items: Sequence[dict[str, Any]]) -> Count:
    """Hold the client's log against the stored items."""
    lost, doubled = [], []
    order = []
    for turn in acknowledged:
        asked = [item for item in items if item["role"] == "user" and turn.nonce in item["content"]]
        turn_ids = {item["turn_id"] for item in asked}
        answers = [item for item in items if item["role"] == "assistant" and item["turn_id"] in turn_ids]
        if not any(item["content"] == turn.text and item["model"] == turn.model for item in answers):
            lost.append(turn.number)
        if len(asked) > 1 or len(answers) > 1:
            doubled.append(turn.number)
        order += [items.index(item) for item in (*asked, *answers)]
    strange = [f"item {i['item_id']} is of no acknowledged turn" for n, i in enumerate(items) if n not in order]
    if order != sorted(order):
        strange.append(f"the stored order {order} is not the client's")
    return Count(tuple(lost), tuple(doubled), tuple(strange))


def turn_id_of(turn: Turn, items: Sequence[dict[str, Any]]) -> str:
    return next(item["turn_id"] for item in items if item["role"] == "user" and turn.nonce in item["content"])


def oracle_tokens(model_dir: Path, messages: Sequence[dict[str, str]], fallback_template: str) -> int:
    """Prompt tokens of a conversation, by transformers; a model without a template by the fallback and plain jinja2."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if tokenizer.chat_template:
        return len(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(fallback_template).render(
        messages=messages, add_generation_prompt=True, bos_token=tokenizer.bos_token
    )
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])
