"""KV identity: what may be shared, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from engine.prefix import KVIdentity, block_key, chain

BASE = KVIdentity("acme", "f" * 64, "torch.float32", 16)
short = st.text(st.sampled_from("ab1_/:"), max_size=4)


@given(st.tuples(short, short, short, short), st.tuples(short, short, short, short))
def test_E10_identities_with_different_parts_never_share_a_namespace(
    one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    def of(parts: tuple[str, ...]) -> bytes:
        return KVIdentity(parts[0], parts[1], parts[2], 16, parts[3]).namespace()

    assert (of(one) == of(other)) == (one == other)


def test_E10_the_border_between_tenant_and_fingerprint_counts() -> None:
    one = replace(BASE, tenant="org_1", fingerprint="2345").namespace()
    assert one != replace(BASE, tenant="org_12345", fingerprint="").namespace()


def test_every_part_of_an_identity_counts() -> None:
    other: dict[str, object] = {"block_size": 8, "layout_version": 2}
    for part in fields(KVIdentity):
        changed = replace(BASE, **{part.name: other.get(part.name, "other")})  # type: ignore[arg-type]
        assert changed.namespace() != BASE.namespace(), part.name


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_two_chains_agree_exactly_on_their_common_full_blocks(a: list[int], b: list[int], size: int) -> None:
    one, other = list(chain(b"n", a, size)), list(chain(b"n", b, size))
    assert len(one) == len(a) // size
    for index, (key, key2) in enumerate(zip(one, other, strict=False)):
        end = (index + 1) * size
        assert (key == key2) == (a[:end] == b[:end])
    assert not set(one) & set(chain(b"m", a, size))


@given(st.lists(st.integers(0, 2**40), min_size=8, max_size=8), st.integers(0, 8))
def test_a_chain_may_be_made_in_pieces(tokens: list[int], cut: int) -> None:
    cut = cut // 2 * 2
    first = list(chain(b"n", tokens[:cut], 2))
    assert first + list(chain(first[-1] if first else b"n", tokens[cut:], 2)) == list(chain(b"n", tokens, 2))


def test_E43_keys_do_not_depend_on_the_process() -> None:
    code = "from engine.prefix import *; print(block_key(KVIdentity('t','f','d',16).namespace(), (1, 2)).hex())"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert said == {block_key(KVIdentity("t", "f", "d", 16).namespace(), (1, 2)).hex()}
