"""What Ray Serve is told of its front: ports and files that no other service has, our limits, our errors."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest
import ray

from orchestrator.front import GATEWAY_PORTS, PORTS_PER_SERVICE, fast_front

BREAKS = {
    "test_gateways_get_ports": (
        "orchestrator/front.py",
        "if not any(listens(port) for port in range(start, start + PROBED_PORTS)):",
        "if True:",
    ),
    "test_two_services": (
        "orchestrator/front.py",
        '"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),',
        '"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": "8500",',
    ),
    "test_where_gateways": ("orchestrator/front.py", "if host not in HOSTS:", "if False:"),
    "test_haproxy_runs": ("orchestrator/front.py", " -dS ", " "),
}
HERE = "127.0.0.1"
OF_RAY = """global
    maxconn 4096
defaults
    mode http
    timeout client 3600s
    errorfile 502 /x/500.http
    errorfile 503 /x/500.http
    errorfile 504 /x/500.http
frontend prometheus
    bind :48453
frontend http_frontend
    bind 127.0.0.1:8000
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found. Ping /-/routes"
listen stats
  bind *:56069
"""


# what the edits look for, as Ray's template has it
LOOKED_FOR = (
    "\ndefaults\n", "errorfile 502 ", "errorfile 503 ", "errorfile 504 ", "bind :{{ config.metrics_port }}",
    "bind *:{{ config.stats_port }}", 'http-request return status 404 content-type text/plain lf-string "Path ',
)  # fmt: skip


def gateway_ports(front: dict[str, str]) -> range:
    first, last = (int(front[f"RAY_SERVE_DIRECT_INGRESS_{which}_HTTP_PORT"]) for which in ("MIN", "MAX"))
    return range(first, last + 1)


def test_two_services_of_a_machine_share_no_port_and_no_file(tmp_path: Path) -> None:
    fronts = [fast_front(tmp_path / name, HERE) for name in ("one", "two")]
    for key in fronts[0]:
        if key.endswith(("_PORT", "_LOC", "_PATH", "_BASE", "_FILE")) and "DIRECT" not in key:
            assert fronts[0][key] != fronts[1][key], key


def test_gateways_get_ports_that_nobody_uses(tmp_path: Path) -> None:
    before = gateway_ports(fast_front(tmp_path, HERE))
    assert len(before) == PORTS_PER_SERVICE and set(before) <= set(GATEWAY_PORTS)
    assert gateway_ports(fast_front(tmp_path, HERE)) == before
    with socket.socket() as other:
        other.bind(("127.0.0.1", before.start + 1))
        other.listen()
        assert set(gateway_ports(fast_front(tmp_path, HERE))).isdisjoint(before)


def test_haproxy_runs_without_splicing_on_rays_configuration_with_our_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary, config = tmp_path / "a binary", tmp_path / "haproxy.cfg"
    binary.write_text('#!/bin/sh\necho "$@"\n')
    binary.chmod(0o700)
    config.write_text(OF_RAY)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(binary))
    wrapper = fast_front(tmp_path, HERE)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    told = subprocess.run([wrapper, "-db", "-f", config], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["-dS", "-db", "-f", str(config)]
    place = tmp_path / "front"
    lines = [line.strip() for line in config.read_text().splitlines()]
    assert lines == [
        "global", "maxconn 4096",
        "defaults", "timeout http-request 10s",
        "mode http", "timeout client 3600s", *(f"errorfile {code} {place}/503.http" for code in (502, 503, 504)),
        "frontend prometheus", "bind 127.0.0.1:48453", "frontend http_frontend", "bind 127.0.0.1:8000",
        "backend default_backend", "http-request deny deny_status 503", "listen stats", "bind 127.0.0.1:56069",
    ]  # fmt: skip


def test_what_it_answers_for_a_gateway_is_our_error(tmp_path: Path) -> None:
    fast_front(tmp_path, HERE)
    head, _, body = (tmp_path / "front" / "503.http").read_bytes().decode().partition("\r\n\r\n")
    assert json.loads(body)["error"]["code"] == "unavailable"
    assert f"Content-Length: {len(body)}" in head and "Retry-After: 1" in head and head.startswith("HTTP/1.1 503 ")


@pytest.mark.parametrize("text", LOOKED_FOR)
def test_rays_configuration_is_still_the_one_we_edit(text: str) -> None:
    template = Path(ray.__file__).parent / "serve" / "_private" / "haproxy_templates.py"
    assert text in template.read_text()


def test_where_gateways_would_not_be_found_there_is_rays_own_proxy(tmp_path: Path) -> None:
    assert fast_front(tmp_path, "192.0.2.7") == {} != fast_front(tmp_path, "0.0.0.0")
