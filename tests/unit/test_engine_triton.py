"""The Triton kernels under Triton's interpreter, against the plain definition in float64. No GPU is needed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import triton_step
from tests.attention_cases import Case, Part, answers
from tests.unit.test_engine_attention import cases

KERNELS = "engine/attention/triton_kernels.py"
BREAKS = {
    "test_every_shape": (KERNELS, "seen &= key[None, :] > position[:, None] - window", "pass"),
    "test_keys_split": (KERNELS, "weights = tl.exp2(sums - top)", "weights = tl.exp2(sums - sums)"),
}


@given(case=cases)
@settings(max_examples=30, deadline=None)
def test_every_shape_equals_the_definition_and_reads_no_slot_it_should_not(case: Case) -> None:
    torch.testing.assert_close(*answers(case, triton_step.TritonStep), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize("window", [None, 6, 150])
@pytest.mark.parametrize("sinks", [False, True])
def test_keys_split_among_programs(
    monkeypatch: pytest.MonkeyPatch, splits: int, window: int | None, sinks: bool
) -> None:
    """More shares than a short one has keys for: some have none."""
    monkeypatch.setattr(triton_step, "splits_of", lambda *_: splits)
    parts = (Part(230, 1, False), Part(3, 1, True), Part(0, 5, False), Part(90, 1, True, True))
    triton_step.launches.clear()
    case = Case(2, 3, 24, 16, parts, window, 5.0 if splits == 8 else None, sinks, 0.3, 7)
    torch.testing.assert_close(*answers(case, triton_step.TritonStep), rtol=2e-5, atol=2e-5)
    assert triton_step.launches == Counter(store=2, decode=1, merge=1, prefill=1)


@pytest.mark.parametrize("head_dim", [80, 256])
def test_half_precision_and_wide_heads(head_dim: int) -> None:
    """float16; the interpreter multiplies bfloat16 by the integers that stand for it."""
    case = Case(1, 4, head_dim, 0, (Part(37, 1, False), Part(20, 30, False)), None, None, False, 0.1, 3)
    torch.testing.assert_close(*answers(case, triton_step.TritonStep, "float16"), rtol=2e-3, atol=2e-3)


@given(st.integers(1, 100_000), st.integers(1, 4096), st.integers(1, 200))
def test_splits_are_a_power_of_two_and_never_small(keys: int, programs: int, processors: int) -> None:
    splits = triton_step.splits_of(keys, programs, processors)
    assert splits & (splits - 1) == 0 and 1 <= splits <= triton_step.MOST_SPLITS
    assert splits == 1 or keys // splits >= triton_step.LEAST_KEYS_OF_A_SPLIT
