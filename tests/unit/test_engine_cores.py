"""Engines of one machine take a share of its cores while others compute."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import cores
from engine.cores import CoreShares
from engine.device import ThreadGovernor

BREAKS = {
    "test_each_computing_engine_has_its_share": ("engine/cores.py", "self._cores // (1 + computing)", "self._cores"),
    "test_who_rests_leaves": ("engine/cores.py", "moment.\"\"\"\n        self._write(0.0)", "moment.\"\"\""),
    "test_a_seat_of_a_dead_process": ("engine/cores.py", "psutil.pid_exists(pid)", "True"),
    "test_what_was_written_before": ("engine/cores.py", "now < until <= now + SILENT_SECONDS", "now < until"),
    "test_on_a_full_disk": ("engine/cores.py", "posix_fallocate(opened.fileno(), 0,", "ftruncate(opened.fileno(),"),
    "test_a_share_is_what": ("engine/device.py", "- self.lent, share or self._threads)", ", 99)"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))


def test_each_computing_engine_has_its_share_and_at_least_one_core(tmp_path: Path) -> None:
    engines = [CoreShares(tmp_path / "new" / "cores") for _ in range(6)]
    assert [engine.take() for engine in engines] == [4, 2, 1, 1, 1, 1]
    assert engines[0].take() == 1


def test_who_rests_leaves_the_cores_to_the_others(tmp_path: Path) -> None:
    one, other = CoreShares(tmp_path / "cores"), CoreShares(tmp_path / "cores")
    one.take()
    assert other.take() == 2
    one.rest()
    assert other.take() == 4
    assert one.take() == 2


def test_one_that_says_nothing_for_long_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = CoreShares(tmp_path / "cores"), CoreShares(tmp_path / "cores")
    monkeypatch.setattr(cores, "SILENT_SECONDS", -1.0)
    one.take()
    assert other.take() == 4


def test_a_seat_of_a_dead_process_is_taken_again_and_no_other(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from engine.cores import CoreShares; CoreShares(Path(sys.argv[1]))"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "cores")], check=True)
    assert CoreShares(tmp_path / "cores")._mine == 0
    assert CoreShares(tmp_path / "cores")._mine == 1


def test_what_was_written_before_the_machine_restarted_is_not_counted(tmp_path: Path) -> None:
    """Its clock begins again, and process ids are given out again."""
    file = tmp_path / "cores"
    one = CoreShares(file)
    content = bytearray(file.read_bytes())
    for seat, pid in ((1, os.getpid()), (2, 2**40), (3, -5)):
        cores.ENTRY.pack_into(content, seat * cores.ENTRY.size, pid, time.monotonic() + 1e6)
    file.write_bytes(content)
    assert one.take() == 4
    assert CoreShares(file)._mine == 2


def test_on_a_full_disk_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out when the file is made: written through the map, it would end the process."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        CoreShares(tmp_path / "cores")


def test_without_a_free_seat_it_still_counts_the_others(tmp_path: Path) -> None:
    engines = [CoreShares(tmp_path / "cores") for _ in range(cores.SEATS + 1)]
    assert engines[-1]._mine is None
    engines[3].take()
    assert engines[-1].take() == 2
    assert engines[4].take() == 2


def test_a_share_is_what_a_step_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    before = torch.get_num_threads()
    governor = ThreadGovernor(4)
    monkeypatch.setattr(governor, "took", lambda *_: None)
    try:
        for share, threads in ((None, 4), (2, 2), (1, 1), (8, 4)):
            with governor.step(share):
                assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
