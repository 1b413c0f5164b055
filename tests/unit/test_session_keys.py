"""Keys: unambiguous framing, one cluster slot per session and per tenant, safe session ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from policies.errors import BadRequest
from session_store.keys import check_idempotency_key, check_session_id, session_keys, tenant_keys

tenants = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)
sessions = st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True)


@given(tenants, sessions, tenants, sessions)
def test_different_names_never_share_a_key(tenant: str, session: str, other: str, another: str) -> None:
    mine, theirs = set(session_keys(tenant, session).all()), set(session_keys(other, another).all())
    assert len(mine) == 9
    assert (mine == theirs) == ((tenant, session) == (other, another))
    assert bool(mine & theirs) == ((tenant, session) == (other, another))
    assert not mine & set(tenant_keys(other).all())


@given(tenants, sessions)
def test_one_slot_each(tenant: str, session: str) -> None:
    assert len({key_slot(key.encode()) for key in session_keys(tenant, session).all()}) == 1
    assert len({key_slot(key.encode()) for key in tenant_keys(tenant).all()}) == 1


def test_a_slash_or_a_brace_in_a_tenants_name_frames_nothing() -> None:
    assert session_keys("a/b", "c").meta == "co:{a%2Fb/c}:meta"
    assert session_keys("a}", "c").meta == "co:{a%7D/c}:meta"


@pytest.mark.parametrize("bad", ["", "a/b", "a b", "{x}", "é", "a\n", "x" * 129])
def test_a_bad_session_id_is_a_400_on_session_id(bad: str) -> None:
    with pytest.raises(BadRequest) as raised:
        check_session_id(bad)
    assert raised.value.param == "session_id"


def test_the_longest_session_id_passes() -> None:
    assert check_session_id("x" * 128) == "x" * 128


def test_idempotency_keys() -> None:
    assert check_idempotency_key(None) == ""
    assert check_idempotency_key("any thing {}/") == "any thing {}/"
    for bad in ("", "x" * 256):
        with pytest.raises(BadRequest):
            check_idempotency_key(bad)


def test_a_tenant_needs_a_name() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        tenant_keys("")
