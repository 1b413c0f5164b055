"""Owns which of several hosts of a model a key goes to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.errors import HostUnavailable

LOAD_BOUND = 1.25  # of the mean; consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2017)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and whether its owner was skipped because it was too loaded."""

    host: str
    spilled: bool


def choose(hosts: Sequence[str], key: str, load: Mapping[str, int]) -> Route:
    """The owner of ``key``, unless it would hold more than ``LOAD_BOUND`` × the mean: then the next in the key's order.

    The order of hosts is a key's own, so equal loads do not always spill to the same host.

    Args:
        load: requests in flight by host; a missing one has none.
    """
    order = sorted(hosts, key=lambda host: (_weight(host, key), host), reverse=True)
    if not order:
        return Route(pick(hosts, key), False)
    total = sum(load.get(host, 0) for host in hosts) + 1
    most = math.ceil(LOAD_BOUND * total / len(hosts))
    host = next((host for host in order if load.get(host, 0) + 1 <= most), order[0])
    return Route(host, host != order[0])


def pick(hosts: Sequence[str], key: str) -> str:
    """The host for ``key`` by rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998.

    The same in every process (hashlib, not ``hash()``). When a host goes, only its own keys move.
    Raises HostUnavailable when there is no host.
    """
    if not hosts:
        raise HostUnavailable(f"0 hosts are ready for key {key!r}; ask the controller to make one ready")
    return max(hosts, key=lambda host: (_weight(host, key), host))


def _weight(host: str, key: str) -> bytes:
    host_bytes = host.encode()
    return hashlib.blake2b(len(host_bytes).to_bytes(4, "big") + host_bytes + key.encode(), digest_size=8).digest()
