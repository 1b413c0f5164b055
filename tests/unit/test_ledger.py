"""The account of device bytes."""

from __future__ import annotations

import pytest

from model_pool.ledger import Ledger
from policies.errors import DoesNotFit


@pytest.fixture
def ledger() -> Ledger:
    return Ledger({"d0": 100, "d1": 50})


def test_books_per_device_and_releases_all(ledger: Ledger) -> None:
    ledger.book("host:a:0", "d0", 60)
    ledger.book("host:b:0", "d1", 50)
    assert (ledger.free_bytes("d0"), ledger.free_bytes("d1")) == (40, 0)
    assert ledger.release("host:a:0") == 60
    assert ledger.release("host:a:0") == 0
    assert ledger.free_bytes("d0") == 100
    ledger.check()


def test_overbooking_raises_with_the_numbers_and_changes_nothing(ledger: Ledger) -> None:
    ledger.book("host:a:0", "d0", 60)
    with pytest.raises(DoesNotFit, match="host:b:0 asks for 41 bytes on d0: budget 100, free 40, it holds 0"):
        ledger.book("host:b:0", "d0", 41)
    assert ledger.free_bytes("d0") == 40
    assert not ledger.has("host:b:0")


def test_a_measurement_replaces_the_promise_and_shows_drift(ledger: Ledger) -> None:
    ledger.book("host:a:0", "d0", 60)
    ledger.settle("host:a:0", 66)
    (entry,) = ledger.books()[0].entries
    assert (entry.held_bytes, entry.promised_bytes, entry.drift_bytes) == (66, 60, 6)
    with pytest.raises(DoesNotFit, match="asks for 101 bytes"):
        ledger.settle("host:a:0", 101)
    assert ledger.free_bytes("d0") == 34


def test_asleep_only_the_residual_is_held_and_waking_books_anew(ledger: Ledger) -> None:
    ledger.book("host:a:0", "d0", 60)
    ledger.settle("host:a:0", 60)
    ledger.settle("host:a:0", 7, residual=True)
    assert ledger.free_bytes("d0") == 93
    assert ledger.books()[0].entries[0].drift_bytes == 0
    ledger.book("host:a:0", "d0", 60)
    (entry,) = ledger.books()[0].entries
    assert (entry.held_bytes, entry.measured_bytes, entry.residual_bytes) == (60, None, 7)
    ledger.check()


def test_a_host_lives_on_one_device(ledger: Ledger) -> None:
    ledger.book("host:a:0", "d0", 1)
    with pytest.raises(DoesNotFit, match="holds 1 bytes on d0"):
        ledger.book("host:a:0", "d1", 1)


def test_negative_bytes_are_refused(ledger: Ledger) -> None:
    with pytest.raises(DoesNotFit):
        ledger.book("host:a:0", "d0", -1)
