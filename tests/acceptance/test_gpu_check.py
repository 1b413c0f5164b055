"""The program ``gpu_check``: rehearsed without a GPU, and honest about not having one."""

from __future__ import annotations

import pytest
import torch

from tests.acceptance import gpu_check
from tests.acceptance.gpu_check import Line, Size


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="make gpu-check runs it in earnest")
def test_the_rehearsal_runs_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    assert gpu_check.main(["--rehearse"]) == 0
    torch.set_num_threads(before)
    said = capsys.readouterr().out
    for what in (
        "kernels, float32",
        "decode attention",
        "scores against float32",
        "generation, 2",
        "wake",
        "rehearsal",
    ):
        assert what in said


def test_a_wrong_line_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(size: Size) -> list[Line]:
        return [Line("kernels", "0.5", good=False)]

    for part in ("kernels", "attention_bandwidth", "engine"):
        monkeypatch.setattr(gpu_check, part, wrong)
    assert gpu_check.main(["--rehearse"]) == 1
