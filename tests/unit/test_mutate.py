"""Every line that ``make mutate`` breaks is there: code that moves takes its breaks along."""

from __future__ import annotations

from tests.mutate import ROOT, all_breaks


def test_every_break_finds_its_text() -> None:
    lost = [(test, name) for _, test, name, text, _ in all_breaks() if text not in (ROOT / name).read_text()]
    assert not lost
