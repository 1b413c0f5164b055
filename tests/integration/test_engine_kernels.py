"""A whole engine whose attention runs through the Triton kernels, interpreted: its tokens are transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import runner
from engine.attention import triton_step
from engine.attention.torch_blocks import TorchStep
from engine.protocol import EngineLimits
from tests.engine_helpers import generate, plain_model, request, run, save_tiny, torch_engine
from tests.integration.test_engine_models import config_of

LIMITS = EngineLimits(max_model_len=128, block_size=4, step_tokens=40, max_running=4)
LENGTHS = (13, 30)  # in steps of 40 tokens, around a window of 12
NEW = 4

BREAKS = {
    "test_greedy": ("engine/attention/triton_step.py", "ones = [[number, 0] for number", "ones = [[0, 0] for number"),
    "test_the_engine_picks": ("engine/runner.py", 'if device == "cpu":', "if device:"),
}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_greedy_tokens_through_the_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads; softcap and windows; sinks."""
    path = save_tiny(config_of(name), tmp_path)
    prompts = [[2 + (7 * n * n + 3 * n) % 300 for n in range(length)] for length in LENGTHS]
    plain = plain_model(path)
    expected = [generate(plain, prompt, NEW) for prompt in prompts]
    monkeypatch.setattr(runner, "step_on", lambda _device: triton_step.TritonStep)
    monkeypatch.setattr(triton_step, "splits_of", lambda keys, *_: 2 if keys > 15 else 1)
    before = torch.get_num_threads()
    engine = torch_engine(path, LIMITS)
    triton_step.launches.clear()
    requests = [request(str(number), prompt, NEW, ignore_eos=True) for number, prompt in enumerate(prompts)]
    said = run(engine, *requests)
    torch.set_num_threads(before)
    for number, each in enumerate(expected):
        each.check(said[str(number)].tokens)
    layers, launched = 2, triton_step.launches
    assert set(launched) == {"store", "prefill", "decode", "merge"}
    assert launched["decode"] >= layers * NEW and launched["store"] == 2 * layers * engine.stats().steps


def test_the_engine_picks_them_by_device() -> None:
    assert (runner.step_on("cpu"), runner.step_on("cuda")) == (TorchStep, triton_step.TritonStep)
