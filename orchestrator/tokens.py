"""Owns counting and templates in the gateway: ``tokenizers`` and jinja2 only, never transformers or torch.

Templates render as transformers renders them (same jinja2 options, same helpers), which a test holds against it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.detokenizer import Decoder
from engine.fake import EOS, FakeTokenizer
from policies.errors import BadRequest, LoadFailed

# For base models, which have no template of their own. Ends where the model is to go on, and writes an answer down
# where it was said: `Assistant: ` before it would put a second space before every answer. `stop` keeps it from playing
# both parts.
FALLBACK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] in ('system', 'developer') %}{{ message['content'] }}\n\n"
    "{% elif message['role'] == 'assistant' %}Assistant:{{ message['content'] }}\n"
    "{% for call in message['tool_calls'] or () %}"
    "Call: {{ call['function']['name'] }}({{ call['function']['arguments'] }})\n{% endfor %}"
    "{% elif message['role'] == 'tool' %}Tool: {{ message['content'] }}\n"
    "{% else %}User: {{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
FALLBACK_STOP = ("\nUser:",)
ANCHOR = "\0"  # a character that no vocabulary merges with what follows

Message = Mapping[str, Any]


class Encoder(Decoder, Protocol):
    """Text to token ids and back, no special tokens added."""

    longest_token: int  # characters that one token may stand for, at most
    identity: str  # another one, where a text may become other ids
    special: frozenset[int]  # ids that have no text

    def encode(self, text: str) -> list[int]: ...

    def encode_after(self, text: str) -> list[int]:
        """Of a text that does not begin the prompt: some tokenizers put a space before what does."""


class _HubTokenizer:
    """A tokenizer.json."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self._tokenizer = Tokenizer.from_buffer(content)
        self.longest_token = max(map(len, self._tokenizer.get_vocab()))
        self.identity = hashlib.sha256(tokenizers.__version__.encode() + b"\n" + content).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special)
        self.decode = self._tokenizer.decode
        self.id_to_token = self._tokenizer.id_to_token
        self._anchor = self.encode(ANCHOR)
        self._alike_everywhere = self.encode(ANCHOR + "a") == self._anchor + self.encode("a")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_after(self, text: str) -> list[int]:
        if self._alike_everywhere:
            return self.encode(text)
        ids = self.encode(ANCHOR + text)
        size = len(self._anchor)
        return ids[size:] if ids[:size] == self._anchor else self.encode(text)


class _Bytes(FakeTokenizer):
    """The fake engine's."""

    identity = "bytes"
    special = frozenset({EOS})

    def encode_after(self, text: str) -> list[int]:
        return self.encode(text)


class ChatTokenizer:
    """Messages to token ids for one model."""

    def __init__(self, encoder: Encoder, template: str | None, special_tokens: Mapping[str, str]) -> None:
        self.encoder = encoder
        self._template = _environment().from_string(template or FALLBACK_TEMPLATE)
        self._special_tokens = dict(special_tokens)
        self.stop: tuple[str, ...] = () if template else FALLBACK_STOP
        self.fallback = template is None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text; BadRequest with the template's own words when it refuses the conversation."""
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return self.encoder.encode(self.render(messages))

    def count(self, messages: Sequence[Message], enough: int) -> int:
        """Tokens of these messages; of a text that must hold far more than ``enough``, a lower bound.

        Tokenizing is linear in the text: a megabyte that cannot fit is not worth a second of it.
        """
        text = self.render(messages)
        least = self.least(text)
        return least if least > enough else len(self.encoder.encode(text))

    def least(self, text: str) -> int:
        """So many tokens it has at least, whichever say it."""
        return len(text) // self.encoder.longest_token


def load_tokenizer(path: Path | None, template: str | None = None) -> ChatTokenizer:
    """The tokenizer of a model directory; None: the fake engine's.

    Args:
        template: jinja2 text that replaces the model's own.
    """
    if path is None:
        return ChatTokenizer(_Bytes(), template, {"bos_token": ""})
    if not (path / "tokenizer.json").is_file():
        raise LoadFailed(f"{path} has no tokenizer.json")
    settings = _read_json(path / "tokenizer_config.json")
    special = {
        name: value if isinstance(value, str) else value["content"]
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (value := settings.get(name))
    }
    return ChatTokenizer(
        _HubTokenizer(path / "tokenizer.json"), template or _own_template(path, settings), {"bos_token": "", **special}
    )


def _own_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    return template


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
