"""Templates and counting in the gateway against transformers, on a tokenizer made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from orchestrator.tokens import FALLBACK_STOP, load_tokenizer
from policies.errors import BadRequest, LoadFailed

TEMPLATE = """{% for message in messages %}
    {% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}
<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MESSAGES = [
    {"role": "system", "content": " be brief "},
    {"role": "user", "content": "héllo 川 \n\n x"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "again"},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["hello again"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_template_and_count_equal_transformers(directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    (directory / "chat_template.jinja").write_text(TEMPLATE)
    ours = load_tokenizer(directory)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    rendered = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ours.render(MESSAGES) == rendered
    assert ours.encode(MESSAGES) == theirs(rendered, add_special_tokens=False).input_ids
    assert not ours.fallback and ours.stop == ()


def test_the_template_may_refuse(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(BadRequest, match="no robots"):
        load_tokenizer(directory).render([{"role": "robot", "content": ""}])


def test_the_fallback_begins_with_bos_and_stops_before_the_next_user(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    assert tokenizer.render(MESSAGES) == (
        "<s> be brief \n\nUser: héllo 川 \n\n x\nAssistant:ok\nUser: again\nAssistant:"
    )
    assert tokenizer.fallback and tokenizer.stop == FALLBACK_STOP


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
