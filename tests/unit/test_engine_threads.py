"""When an engine gives up its second thread."""

from __future__ import annotations

import pytest
import torch

from engine.device import ThreadGovernor


@pytest.fixture(autouse=True)
def _threads_as_before() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def threads_of(governor: ThreadGovernor) -> int:
    with governor.step():
        return torch.get_num_threads()


def test_three_contended_steps_in_a_row_leave_one_thread() -> None:
    governor = ThreadGovernor(2, pause_seconds=1000)
    assert threads_of(governor) == 2
    for cpu_seconds in (1.0, 1.0, 1.9, 1.0, 1.0):  # of 2 possible: the third step was not contended
        governor.took(1.0, cpu_seconds, 2)
    governor.took(1.0, 1.0, 2)
    assert threads_of(governor) == 1


def test_after_the_pause_all_threads_are_tried_again() -> None:
    governor = ThreadGovernor(2, contended_steps=1, pause_seconds=0)
    governor.took(1.0, 0.5, 2)
    assert threads_of(governor) == 2


def test_a_lent_core_is_left_alone_until_it_is_given_back() -> None:
    governor = ThreadGovernor(2)
    governor.lent = True
    assert threads_of(governor) == 1
    governor.lent = False
    assert threads_of(governor) == 2
    alone = ThreadGovernor(1)
    alone.lent = True
    assert threads_of(alone) == 1
