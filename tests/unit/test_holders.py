"""Who holds memory that is ours by now: told from a table of processes alone, and nobody is blamed without a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.holders import (
    Conclusion,
    Picture,
    Process,
    compute_processes,
    conclude,
    lock_holders,
    settled,
    summary,
)

HOME, OTHER = "/home/ann/state", "/tmp/other/state"
MIB = 2**20


def process(pid: int, parent: int, name: str, title: str = "", mib: int = 10, state_dir: str = "") -> Process:
    return Process(pid, parent, name, title or f"/usr/bin/{name} --x", False, mib * MIB, state_dir)


def service(state_dir: str, first: int, *, started_by: int) -> list[Process]:
    """All that a service leaves in the process table but itself, as Ray 2.60 shows it."""
    return [
        process(first + 1, started_by, "valkey-server", "/x/valkey-server 127.0.0.1:36571", 7, state_dir),
        process(first + 2, started_by, "ray", "/x/python3 /x/ray start --temp-dir=/tmp/orc-192cd3f9", 140, state_dir),
        process(first + 3, first + 2, "gcs_server", mib=30, state_dir=state_dir),
        process(first + 4, first + 2, "raylet", mib=29, state_dir=state_dir),
        process(first + 5, first + 4, "ray::DashboardA", "ray::DashboardAgent", 75),  # it overwrites its environment
        process(first + 6, first + 4, "ray::Controller", "ray::Controller.ensure_ready", 60, state_dir),
        process(first + 7, first + 4, "ray::EngineHost", "ray::EngineHost.watch", 800, state_dir),
        process(first + 8, first + 4, "ray::host:small", "ray::host:small:0:EngineHost.__init__", 200, state_dir),
    ]


SERVE = process(100, 50, "python", "python -m orchestrator.cli serve", 160)
ALIVE = (process(1, 0, "init"), process(50, 1, "bash"), SERVE, *service(HOME, 100, started_by=100))
DESERTED = (process(1, 0, "init"), *service(HOME, 100, started_by=1))


def picture(
    *processes: Process, services: dict[str, int] | None = None, available: int = 4000, compute: str = ""
) -> Picture:
    return Picture(
        processes, services or {}, HOME, own_pid=9_999, available_bytes=available * MIB, budget_bytes=2400 * MIB,
        compute=compute_processes(compute),
    )  # fmt: skip


def of_kind(found: list[Conclusion], kind: str) -> Conclusion:
    (one,) = [one for one in found if one.kind == kind]
    return one


def test_a_running_service_is_nobody_s_orphan() -> None:
    alive = picture(*ALIVE, services={HOME: 100})
    assert conclude(alive) == []
    assert summary(alive) == "no orphans and no leftovers; 1,000 MiB in our engine hosts"


def test_a_running_service_of_another_directory_is_left_alone() -> None:
    both = picture(*ALIVE, *service(OTHER, 200, started_by=1), services={HOME: 100, OTHER: 0})
    assert conclude(both) == []
    assert summary(both).endswith("1,000 MiB in our engine hosts, 1,000 MiB in those of other services")


def test_what_a_killed_service_leaves_is_named_with_all_its_pids() -> None:
    found = conclude(picture(*DESERTED))
    assert [one.kind for one in found] == ["orphan", "leftover"]
    hosts, rest = found
    assert hosts.pids == (107, 108) and not hosts.warning
    assert hosts.said == f"2 engine hosts hold 1,000 MiB (107, 108) of {HOME}, and nobody serves from there"
    assert hosts.fix.startswith(f"'orchestrator serve --state-dir {HOME}'") and hosts.fix.endswith("kill -9 107 108")
    assert rest.pids == (101, 102, 103, 104, 105, 106)
    for word in ("6 processes hold 341 MiB", "valkey-server 101", "raylet 104", "ray::DashboardAgent 105"):
        assert word in rest.said


def test_of_another_directory_it_is_a_warning() -> None:
    found = conclude(picture(*ALIVE, *service(OTHER, 200, started_by=1), services={HOME: 100}))
    assert [(one.kind, one.warning) for one in found] == [("orphan", True), ("leftover", True)]
    assert all(OTHER in one.said for one in found)


def test_a_host_whose_ray_node_is_gone_is_an_orphan_though_a_new_service_runs() -> None:
    stuck = process(999, 1, "ray::EngineHost", "ray::EngineHost.wake", 512, HOME)
    found = of_kind(conclude(picture(*ALIVE, stuck, services={HOME: 100})), "orphan")
    assert found.pids == (999,) and "512 MiB" in found.said and "Ray node" in found.said
    assert found.fix == "kill -9 999" and not found.warning


def test_a_host_in_a_cluster_run_by_others_is_none() -> None:
    """No token of ours: the Ray node is another's, and no state directory is known."""
    raylet = process(300, 1, "raylet")
    assert conclude(picture(raylet, process(301, 300, "ray::EngineHost", "ray::EngineHost"))) == []


def test_a_redis_and_a_cluster_started_by_a_program_are_its_own() -> None:
    pytest_process = process(60, 50, "pytest")
    assert conclude(picture(process(50, 1, "bash"), pytest_process, *service(OTHER, 200, started_by=60))) == []
    # in a container serve, or a test, is pid 1 itself; and a process whose starter died is given to pid 1
    as_first = replace(pytest_process, pid=1, parent=0)
    assert {one.kind for one in conclude(picture(as_first, *service(OTHER, 200, started_by=1)))} == {
        "orphan", "leftover",
    }  # fmt: skip
    assert conclude(picture(as_first, *service(OTHER, 200, started_by=1), services={OTHER: 1})) == []


def test_a_zombie_host_is_named_with_who_must_reap_it() -> None:
    zombie = Process(777, 104, "ray::EngineHost", "", zombie=True)
    (found,) = conclude(picture(*ALIVE, zombie, services={HOME: 100}))
    assert found.kind == "zombie" and found.pids == (777,) and "raylet 104" in found.said and found.warning
    (found,) = conclude(picture(replace(zombie, parent=12_345)))
    assert "12345" in found.said
    assert conclude(picture(replace(zombie, name="bash"))) == []


def test_foreign_holders_are_named_only_when_memory_is_short() -> None:
    large = [process(400 + n, 50, f"game{n}", mib=300 + n) for n in range(4)]
    small = process(500, 50, "editor", mib=230)  # less than a tenth of the budget
    machine = (*ALIVE, *large, small)
    assert conclude(picture(*machine, services={HOME: 100}, available=2400)) == []
    (found,) = conclude(picture(*machine, services={HOME: 100}, available=2000))
    assert found.kind == "foreign" and found.warning and found.pids == (403, 402, 401)
    assert "400 MiB less" in found.said and "game3 403 303 MiB, game2 402 302 MiB" in found.said


def test_our_own_processes_are_not_foreign_and_those_of_another_service_say_whose_they_are() -> None:
    serve = replace(SERVE, held_bytes=900 * MIB)
    machine = [serve if one == SERVE else one for one in ALIVE]
    assert conclude(picture(*machine, services={HOME: 100}, available=2000)) == []
    found = conclude(
        picture(*machine, *service(OTHER, 200, started_by=1), services={HOME: 100, OTHER: 0}, available=2000)
    )
    assert of_kind(found, "foreign").said.endswith(f"ray::EngineHost.watch 207 (the service of {OTHER}) 800 MiB")


def test_cuda_processes_that_are_no_hosts_of_a_living_service() -> None:
    listed = "107, 5100, ray::EngineHost\n4242, 1024, /usr/bin/python3\n4243, [N/A], [Not Found]\n"
    (found,) = conclude(picture(*ALIVE, services={HOME: 100}, compute=listed))
    assert found.kind == "cuda" and found.pids == (4242, 4243) and found.warning
    assert found.said.endswith("python3 4242 1,024 MiB, [Not Found] 4243 an unknown size")
    assert conclude(picture(*ALIVE, services={HOME: 100}, compute="107, 5100, ray::EngineHost\n")) == []
    assert of_kind(conclude(picture(*DESERTED, compute=listed)), "cuda").pids == (107, 4242, 4243)


def test_what_nvidia_smi_says() -> None:
    found = compute_processes("12, 300, /opt/my app/run, with a comma\n\nNo running processes found\n13, [N/A], x\n")
    assert [(one.pid, one.held_bytes, one.name) for one in found] == [
        (12, 300 * MIB, "run, with a comma"), (13, None, "x")
    ]  # fmt: skip
    assert compute_processes("") == ()


def test_what_proc_locks_says() -> None:
    text = (
        "1: POSIX  ADVISORY  READ 26900 fe:00:3064308 128 128\n"
        "2: FLOCK  ADVISORY  WRITE 26193 fe:00:3064287 0 EOF\n"
        "2: -> FLOCK  ADVISORY  WRITE 27000 fe:00:3064287 0 EOF\n"
        "3: FLOCK  ADVISORY  READ 5 fe:00:7 0 EOF\n"
        "4: FLOCK  ADVISORY  WRITE -1 00:31:8 0 EOF\n"
    )
    assert lock_holders(text) == {3064287: 26193, 8: 0}


def test_what_was_just_ending_is_no_finding() -> None:
    looks = [picture(*DESERTED), picture(process(1, 0, "init"))]
    slept: list[float] = []
    assert settled(lambda: looks.pop(0), slept.append)[1] == [] and len(slept) == 1
    looks = [picture(*DESERTED), picture(*DESERTED)]
    assert len(settled(lambda: looks.pop(0), slept.append)[1]) == 2
    settled(lambda: picture(*ALIVE, services={HOME: 100}), slept.append)
    assert len(slept) == 2  # nobody waits where nothing was found


@pytest.mark.parametrize(
    ("title", "host"),
    [
        ("ray::EngineHost", True),
        ("ray::EngineHost.watch", True),
        ("ray::host:smollm2-135m-instruct:0:EngineHost.__init__", True),
        ("ray::Controller.watch", False),
        ("grep ray::EngineHost", False),
        ("/usr/bin/raylet", False),
    ],
)
def test_what_a_host_is_called(title: str, host: bool) -> None:
    assert process(1, 0, "x", title).is_host == host
