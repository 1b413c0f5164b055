"""Owns the identity of KV: which blocks of two contexts may be shared. Pure.

A block's key is a sha256 over (namespace, parent key, token ids). The namespace holds everything besides the tokens
that the KV depends on, and the tenant, each part length-prefixed so that ("org_1", "2345") and ("org_12345", "")
differ. The built-in ``hash()`` is not used: it differs between processes. Technique: hash-chained blocks, as in vLLM's
automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LAYOUT_VERSION = 1  # bump when the meaning of a KV block's bytes changes


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """All that KV depends on besides its tokens, and the tenant who may see it."""

    tenant: str
    fingerprint: str  # sha256 of the weights
    dtype: str
    block_size: int
    adapter: str = ""  # content digest of an adapter; a name would outlive its weights
    layout_version: int = LAYOUT_VERSION

    def namespace(self) -> bytes:
        """The 32-byte root of this identity's hash chains."""
        digest = hashlib.sha256(b"kv-namespace")
        for part in (
            self.tenant,
            self.fingerprint,
            self.dtype,
            str(self.block_size),
            self.adapter,
            str(self.layout_version),
        ):
            raw = part.encode()
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
        return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the full block ``token_ids`` that follows the block with key ``parent`` (or the namespace)."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Keys of all full blocks of ``token_ids``, first to last."""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size])
        yield parent
