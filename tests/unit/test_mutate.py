"""Every line that ``make mutate`` breaks is there, and is Python after it: code that moves takes its breaks along."""

from __future__ import annotations

from tests.mutate import ROOT, all_breaks, is_python


def test_every_break_finds_its_text() -> None:
    lost = [(test, name) for _, test, name, text, _ in all_breaks() if text not in (ROOT / name).read_text()]
    assert not lost


def test_every_break_leaves_a_file_that_is_python() -> None:
    """A test that is red because nothing can be imported has noticed nothing."""
    wrong = []
    for _, test, name, text, replacement in all_breaks():
        if name.endswith(".py") and not is_python((ROOT / name).read_text().replace(text, replacement, 1)):
            wrong.append((test, name))
    assert not wrong
