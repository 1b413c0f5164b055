"""The scenario bank's entries about counting tokens: transformers is the oracle, two model families are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.tokens import FALLBACK_TEMPLATE, load_tokenizer
from tests.acceptance.reader import oracle_tokens
from tests.engine_helpers import cached_model
from tests.scenarios.calls import ask_all, said, session, usage
from tests.service import RunningService

BREAKS = {
    "test_S13_the_usage": (
        "orchestrator/prompting.py",
        "self._tokenizers.get(model.name)",
        'self._tokenizers.get("llama")',
    ),
}
TALK = [
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "the quick brown fox, déjà vu 漢字 😀"}],
    [{"role": "user", "content": "which animal was it?\n\n  and which colour? "}],
    [{"role": "user", "content": "สวัสดีครับ"}],
    [{"role": "user", "content": "thank you"}],
]


@pytest.mark.service
@pytest.mark.timeout(180)
def test_S13_the_usage_counts_each_models_own_templated_prompt(
    scarce_service: RunningService, tiny_models: dict[str, Path]
) -> None:
    """One session over both families, turn by turn: history is counted anew for the model that is asked."""
    headers = session()
    messages: list[dict[str, str]] = []
    for turn, new in enumerate(TALK):
        messages += new
        family, other = ("llama", "gemma3_text")[:: (1, -1)[turn % 2]]
        answer = ask_all(scarce_service, family, new, headers, max_tokens=8, temperature=0)
        counted = {name: oracle_tokens(tiny_models[name], messages, FALLBACK_TEMPLATE) for name in (family, other)}
        assert usage(answer)[0] == counted[family]
        assert abs(counted[family] - counted[other]) > 0.1 * counted[family], "they count alike: this shows nothing"
        messages.append({"role": "assistant", "content": said(answer)})


@pytest.mark.models
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_S13_the_demo_models_are_counted_as_transformers_counts_them(name: str) -> None:
    path = cached_model(name)
    messages = [message for new in TALK for message in (*new, {"role": "assistant", "content": "An answer."})][:-1]
    counted = load_tokenizer(path).count(messages, 10**6)
    assert counted == oracle_tokens(path, messages, FALLBACK_TEMPLATE) > 50
