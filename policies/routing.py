"""Owns which of several hosts of a model a key goes to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from policies.errors import HostUnavailable


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
