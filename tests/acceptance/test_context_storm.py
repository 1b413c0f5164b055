"""``python -m tests.acceptance.context_storm``, with fewer operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.context_storm import Storm
from tests.engine_helpers import tiny_llama, tiny_mistral


@pytest.mark.parametrize("window", [None, 20])
def test_whatever_happens_to_a_generation_it_says_what_it_would_have_said(tmp_path: Path, window: int | None) -> None:
    storm = Storm(tiny_mistral(tmp_path, window) if window else tiny_llama(tmp_path), tmp_path, seed=5)
    storm.run(1_000)
    assert storm.violations == []
    assert storm.counts["finished, as undisturbed"] > 80
    assert storm.counts["blocks from host memory"] > 30
    assert storm.counts["blocks from disk"] > 5
