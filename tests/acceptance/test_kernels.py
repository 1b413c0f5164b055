"""The program ``kernels`` in its short form, and that it would notice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.acceptance import kernels
from tests.acceptance.kernels import Variant

BREAKS = {
    "test_the_program": ("engine/attention/triton_step.py", "rows = max(LEAST_ROWS", "rows = 8 * max(LEAST_ROWS"),
}


def test_the_program_in_its_short_form() -> None:
    """In a process of its own: here, Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.acceptance.kernels", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout and "prefill" in done.stdout and "sm_90" in done.stdout


def test_every_width_dtype_and_group_is_in_the_whole_program() -> None:
    whole = kernels.variants(quick=False)
    assert {(v.kernel, v.dtype, v.dim) for v in whole} == {
        (kernel, dtype, dim)
        for kernel in ("store", "merge", "prefill", "decode", "split")
        for dtype in ("bfloat16", "float16", "float32")
        for dim in (64, 80, 128, 256)
    }
    assert set(kernels.variants(quick=True)) <= set(whole)


@pytest.mark.parametrize(("spilled", "shared", "code"), [(0, 100, 0), (8, 100, 1), (0, 10**6, 1)])
def test_a_spill_or_too_much_shared_memory_is_noticed(
    spilled: int, shared: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "interpreted", lambda quick: {"prefill float32": 1e-6})
    monkeypatch.setattr(kernels, "variants", lambda quick: [Variant("store", "bfloat16", 64)])
    monkeypatch.setattr(kernels, "build", lambda *_: kernels.Built(32, shared, spilled))
    assert kernels.main([]) == code


def test_an_error_above_its_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", lambda quick: {"prefill float32": 1e-4})
    monkeypatch.setattr(kernels, "variants", lambda quick: [])
    assert kernels.main([]) == 1
