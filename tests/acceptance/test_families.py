"""The program ``families`` in its short form, and that it would notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention import torch_blocks
from tests.acceptance import families

BREAKS = {
    "test_the_program": ("engine/attention/torch_blocks.py", "softcap=score.softcap,", "softcap=None,"),
}


def test_the_program_in_its_short_form(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    assert families.main(["--quick"]) == 0
    torch.set_num_threads(before)
    said = capsys.readouterr().out
    assert "otherwise than expected: none" in said and "window in 1 of 2 layers, softcap" in said


def test_a_family_that_comes_out_wrong_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # beyond the 8 tokens that the load looks at
    monkeypatch.setattr(torch_blocks, "_unseen", lambda span, window: 2 if span.start > 8 else 0)
    before = torch.get_num_threads()
    verdict = families.check_right("gemma2", tmp_path)
    torch.set_num_threads(before)
    assert (verdict.said, verdict.good) == ("WRONG", False)


def test_a_family_that_is_served_though_it_should_be_refused_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.REFUSED, "llama", ("llama", {}, "nothing at all"))
    before = torch.get_num_threads()
    verdict = families.check_refused("llama", tmp_path)
    torch.set_num_threads(before)
    assert verdict.said.startswith("LOADED") and not verdict.good
