"""The packaged models: our greedy tokens are transformers' own, on 20 prompts, however they are batched or cached.

A choice counts as different when transformers scores another token higher by more than 1e-3. The check is forced
(one forward of transformers over prompt and answer, every position's choice looked at), which is what ``generate`` does
step by step; two prompts go through ``generate`` itself as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.protocol import EngineLimits
from engine.torch_engine import TorchEngine
from tests.engine_helpers import MARGIN, Said, cached_model, generate, plain_model, request, run, torch_engine

pytestmark = [pytest.mark.models, pytest.mark.timeout(400)]

NEW = 12
LIMITS = EngineLimits(max_model_len=1024, step_tokens=128, max_running=8)
SHORT = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "Die Hauptstadt von Deutschland ist",
    "พระอาทิตย์ขึ้นทาง",
    "日本で一番高い山は",
    "🙂 means",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,",
    "To be, or not to be,",
    "The opposite of hot is",
    "import numpy as np\n",
    "A haiku about rain:\n",
    "He opened the door and",
)
SHARED = "You are a careful assistant. Answer in one sentence, name your source, and say when you do not know. " * 3
LONG = "The river ran past the mill and the miller counted the sacks of grain that the carts had brought. " * 28
TEXTS = (*SHORT, f"{SHARED}What is rain?", f"{SHARED}What is snow?", f"{SHARED}Who was Ada?", LONG)


@dataclass(frozen=True)
class Real:
    engine: TorchEngine
    plain: Any
    prompts: tuple[tuple[int, ...], ...]
    checked: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)  # the same answer is looked at once

    def check(self, said: dict[str, Said]) -> int:
        """Every choice is transformers' own; returns how many were clear by the margin."""
        return sum(self._check_one(int(name), one.tokens) for name, one in said.items())

    def _check_one(self, index: int, tokens: Sequence[int]) -> int:
        key = (index, tuple(tokens))
        if key not in self.checked:
            self.checked[key] = self._clear(index, tokens)
        return self.checked[key]

    def _clear(self, index: int, tokens: Sequence[int]) -> int:
        prompt = self.prompts[index]
        assert len(tokens) == NEW
        with torch.inference_mode():
            rows = torch.arange(len(prompt) - 1, len(prompt) + NEW - 1)
            ids = torch.tensor([[*prompt, *tokens[:-1]]])
            scores = self.plain(ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=rows).logits
        best = scores[0].topk(2)
        chosen = scores[0].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.all(best.values[:, 0] - chosen < MARGIN), f"prompt {index}: {TEXTS[index][:40]!r}"
        return int((best.values[:, 0] - best.values[:, 1] >= MARGIN).sum())


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "gemma-3-270m"])
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    path = cached_model(request.param)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    before = torch.get_num_threads()
    engine = torch_engine(path, LIMITS)
    torch.set_num_threads(1)  # two are far slower beside a busy neighbour, and hardly faster alone
    yield Real(engine, plain_model(path), tuple(tuple(tokenizer.encode(text).ids) for text in TEXTS))
    torch.set_num_threads(before)


def asked(real: Real, indices: Sequence[int]) -> list[Any]:
    return [request(str(i), real.prompts[i], NEW, ignore_eos=True) for i in indices]


def test_alone_without_and_with_prefix_hits(real: Real) -> None:
    everybody = range(len(TEXTS))
    assert len(real.prompts) == 20 and max(map(len, real.prompts)) > 512  # beyond gemma's window
    said: dict[str, Said] = {}
    for i in everybody:
        real.engine._kv_cache.pool.clear_cache()
        said |= run(real.engine, *asked(real, [i]))
        assert said[str(i)].last.usage.cached_tokens == 0  # type: ignore[union-attr]
    assert real.check(said) > 0.95 * NEW * len(TEXTS)
    hits = [16, 17, 18, 19]
    again: dict[str, Said] = {}
    for i in hits:  # the first two in turn share a prefix; the long one finds itself
        again |= run(real.engine, *asked(real, [i]))
    assert again["17"].last.usage.cached_tokens >= 48  # type: ignore[union-attr]
    assert again["19"].last.usage.cached_tokens >= 512  # type: ignore[union-attr]
    real.check(again)
    assert {i: again[str(i)].text for i in hits} == {i: said[str(i)].text for i in hits}


def test_in_batches_of_eight_without_and_with_prefix_hits(real: Real) -> None:
    everybody = range(len(TEXTS))
    real.engine._kv_cache.pool.clear_cache()
    first = run(real.engine, *asked(real, everybody))
    real.check(first)
    again = run(real.engine, *asked(real, everybody))
    for i in everybody:
        expected = (len(real.prompts[i]) - 1) // LIMITS.block_size * LIMITS.block_size
        assert again[str(i)].last.usage.cached_tokens == expected  # type: ignore[union-attr]
    changed = {name: one for name, one in again.items() if one.tokens != first[name].tokens}
    real.check(changed)  # the same tokens need no second look


def test_generate_itself_says_the_same(real: Real) -> None:
    for i in (0, 10):
        generate(real.plain, real.prompts[i], NEW).check(run(real.engine, *asked(real, [i]))[str(i)].tokens)


def test_text_is_the_tokenizers_own_decode(real: Real) -> None:
    said = run(real.engine, *asked(real, [6, 7, 8]))
    for i in (6, 7, 8):
        prompt, tokens = real.prompts[i], said[str(i)].tokens
        decode = real.engine._decoder.decode
        assert said[str(i)].text == decode([*prompt, *tokens])[len(decode(prompt)) :]
