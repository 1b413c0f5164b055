"""``python -m tests.acceptance.checkpoint --quick``."""

from __future__ import annotations

from pathlib import Path

from tests.acceptance import checkpoint
from tests.engine_helpers import tiny_llama


def test_a_killed_generation_goes_on_from_its_checkpoint_and_damage_is_refused(tmp_path: Path) -> None:
    rows = checkpoint.run(tiny_llama(tmp_path))
    assert [row for row in rows if not row.good] == []
    assert len(rows) == len(checkpoint.CASES) * len(checkpoint.CUTS) + len(checkpoint.DAMAGE) + 1
