"""What the private cluster tells Ray Serve: a front of its own, on ports and files that no other service has."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from orchestrator.cluster import GATEWAY_PORTS, PORTS_PER_SERVICE, fast_front

BREAKS = {
    "test_gateways_get_ports": (
        "orchestrator/cluster.py",
        "if not any(_listens(port) for port in range(start, start + PROBED_PORTS)):",
        "if True:",
    ),
    "test_two_services": (
        "orchestrator/cluster.py",
        '"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),',
        '"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": "8500",',
    ),
    "test_haproxy_runs": ("orchestrator/cluster.py", " -dS ", " "),
}


def gateway_ports(front: dict[str, str]) -> range:
    first, last = (int(front[f"RAY_SERVE_DIRECT_INGRESS_{which}_HTTP_PORT"]) for which in ("MIN", "MAX"))
    return range(first, last + 1)


def test_two_services_of_a_machine_share_no_port_and_no_file(tmp_path: Path) -> None:
    fronts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        fronts.append(fast_front(tmp_path / name))
    for key in fronts[0]:
        if key.endswith(("_PORT", "_LOC", "_PATH", "_BASE", "_FILE")) and "DIRECT" not in key:
            assert fronts[0][key] != fronts[1][key], key


def test_gateways_get_ports_that_nobody_uses(tmp_path: Path) -> None:
    before = gateway_ports(fast_front(tmp_path))
    assert len(before) == PORTS_PER_SERVICE and set(before) <= set(GATEWAY_PORTS)
    assert gateway_ports(fast_front(tmp_path)) == before
    with socket.socket() as other:
        other.bind(("127.0.0.1", before.start + 1))
        other.listen()
        assert set(gateway_ports(fast_front(tmp_path))).isdisjoint(before)


def test_haproxy_runs_without_splicing(tmp_path: Path) -> None:
    wrapper = Path(fast_front(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert wrapper.stat().st_mode & 0o777 == 0o700
    told = subprocess.run([wrapper, "-v"], capture_output=True, text=True, check=True)
    assert "HAProxy version" in told.stdout
    fake = tmp_path / "binary"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o700)
    wrapper.write_text(wrapper.read_text().replace(wrapper.read_text().split('"')[1], str(fake)))
    told = subprocess.run([wrapper, "-f", "a file"], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert told.stdout.split() == ["-dS", "-f", "a", "file"]
