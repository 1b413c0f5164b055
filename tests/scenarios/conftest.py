"""Fixtures that several scenario files share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine_helpers import byte_fallback_tokenizer, save_tiny
from tests.service import RunningService

CONFIG = Path(__file__).parents[1] / "data" / "residency.yaml"
# Two families: a byte-level BPE with a template, and single characters with another.
TEMPLATES = {
    "llama": "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "gemma3_text": "{{ bos_token }}{% for m in messages %}[{{ m['role'] | upper }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT]{% endif %}",
}


@pytest.fixture(scope="package")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family → directory of a small random model that has a tokenizer and a chat template of its own."""
    return {family: _tiny(family, tmp_path_factory.mktemp(family)) for family in TEMPLATES}


@pytest.fixture(scope="package")
def scarce_service(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Iterator[RunningService]:
    """A whole service whose models do not all fit: the fake ones of residency.yaml, and the tiny ones."""
    directory = tmp_path_factory.mktemp("scarce")
    config = yaml.safe_load(CONFIG.read_text())
    config["models"] += [
        {"name": family, "source": str(path), "memory": "900MiB", "max_model_len": 512, "compile_layers": False}
        for family, path in tiny_models.items()
    ]
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    service = RunningService(directory / "config.yaml", directory / "state")
    service.start()
    yield service
    service.stop()


def _tiny(family: str, path: Path) -> Path:
    from transformers import AutoConfig

    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    save_tiny(AutoConfig.for_model(family, **sizes, **heads, **ends), path)
    if family == "gemma3_text":
        byte_fallback_tokenizer().save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(TEMPLATES[family])
    return path
