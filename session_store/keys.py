"""Owns the name, the type and the lifetime of every key we keep in Redis.

One session, slot ``{<tenant>/<session>}``. "sliding" is ``session_ttl_seconds``, set anew on every key of
the session by each script that touches it; a session nobody uses is gone after it, whole.

| key                  | type   | TTL       | holds
|----------------------|--------|-----------|----------------------------------------------------------------
| co:{t/s}:meta        | hash   | sliding   | fence (last fencing token), version (changes so far), created_ms,
|                      |        |           | updated_ms, kind, last (the turn committed last), metadata (JSON),
|                      |        |           | opened (the load that made it)
| co:{t/s}:lease       | hash   | lease TTL | token, turn, owner, idem, fp of the turn that runs now
| co:{t/s}:items       | list   | sliding   | item JSON, append-only; an item's index never changes (a deleted
|                      |        |           | one leaves a tombstone)
| co:{t/s}:heads       | list   | sliding   | indexes of system, developer and pinned items: always in the window
| co:{t/s}:turns       | hash   | sliding   | turn id → "token version first count goes-on\\n" + JSON {reply,
|                      |        |           | truncation}; goes-on: 1 where another may go on from it
| co:{t/s}:idem        | hash   | sliding   | "t:"+key → turn id, "f:"+key → request fingerprint, of finished turns;
|                      |        |           | "m:"+key → 1, where the request of this key was sent to a fork
| co:{t/s}:incomplete  | list   | sliding   | JSON of the last 32 attempts that were not committed; never prompted
| co:{t/s}:index       | hash   | sliding   | item id → its index; without those deleted
| co:{t/s}:old         | list   | sliding   | the last 32 items that were superseded or deleted, as they were
| co:{t/s}:load-<id>-… | as the | sliding   | items, heads and index of a fork or an import, until all of it is there
|                      | others |           |
| co:{t/s}:confirm     | string | 1 second  | written to hear whether replicas have all that was written before

One tenant, slot ``{<tenant>}``. Session and tenant keys lie in two slots of a cluster, so no script touches
both.

| key                  | type   | TTL       | holds
|----------------------|--------|-----------|----------------------------------------------------------------
| co:{t}:places        | zset   | lease TTL | turn id → when its place lapses (ms)
| co:{t}:reserved      | hash   | lease TTL | turn id → tokens it reserved
| co:{t}:settled       | zset   | 1 hour    | turn id → until when it is remembered as settled (ms)
| co:{t}:usage         | hash   | none      | tokens, turns: monotone counters, one small hash per tenant
| co:{t}:sessions      | zset   | sliding   | session id → last use (µs)

All gateways together, a slot each.

| key                  | type   | TTL       | holds
|----------------------|--------|-----------|----------------------------------------------------------------
| co:turn:<work>       | string | as asked  | there while a gateway has taken on this work for the others

A tenant's name is percent-encoded (so it has no brace and no slash) and a session id has neither by its
alphabet: ``("a/b", "c")`` is ``{a%2Fb/c}``, and the first slash always ends the tenant.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass
from urllib.parse import quote

from policies.errors import BadRequest

PREFIX = "co:"
SESSION_ID_MAX_CHARS = 128
IDEMPOTENCY_KEY_MAX_CHARS = 255
_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """Keys of one session, in the order in which every session script takes them."""

    meta: str
    lease: str
    items: str
    heads: str
    turns: str
    idem: str
    incomplete: str
    index: str
    old: str

    def all(self) -> tuple[str, ...]:
        return astuple(self)


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """Keys of one tenant, in the order in which every tenant script takes them."""

    places: str
    reserved: str
    settled: str
    usage: str
    sessions: str

    def all(self) -> tuple[str, ...]:
        return astuple(self)


def is_session_id(text: str) -> bool:
    return _SESSION_ID.fullmatch(text) is not None


def check_session_id(session_id: str) -> str:
    """Return the id unchanged; BadRequest (param ``session_id``) if it is not 1..128 of
    ``[A-Za-z0-9._:-]``."""
    if not is_session_id(session_id):
        raise BadRequest(
            f"session_id must be 1 to {SESSION_ID_MAX_CHARS} characters out of A-Z a-z 0-9 . _ : -; "
            f"this one has {len(session_id)} characters",
            param="session_id",
        )
    return session_id


def check_idempotency_key(key: str | None) -> str:
    """The key as the scripts take it ("" = none); BadRequest unless it has 1..255 characters."""
    if key is not None and not 0 < len(key) <= IDEMPOTENCY_KEY_MAX_CHARS:
        raise BadRequest(
            f"an idempotency key has 1 to {IDEMPOTENCY_KEY_MAX_CHARS} characters, not {len(key)}",
            param="Idempotency-Key",
        )
    return key or ""


def encode_tenant(tenant: str) -> str:
    """Percent-encode a tenant's name. ValueError if empty: ``{}`` is no hash tag, its keys would scatter."""
    if not tenant:
        raise ValueError("a tenant needs a name")
    return quote(tenant, safe="")


def session_keys(tenant: str, session_id: str) -> SessionKeys:
    tag = f"{PREFIX}{{{encode_tenant(tenant)}/{check_session_id(session_id)}}}:"
    return SessionKeys(*(tag + name for name in SessionKeys.__slots__))


def load_keys(tenant: str, session_id: str, load_id: str) -> tuple[str, str, str]:
    """Where items, heads and index of a load lie until it is whole."""
    tag = f"{PREFIX}{{{encode_tenant(tenant)}/{check_session_id(session_id)}}}:load-{load_id}-"
    return f"{tag}items", f"{tag}heads", f"{tag}index"


def confirm_key(tenant: str, session_id: str) -> str:
    return f"{PREFIX}{{{encode_tenant(tenant)}/{check_session_id(session_id)}}}:confirm"


def turn_key(work: str) -> str:
    return f"{PREFIX}turn:{work}"


def tenant_keys(tenant: str) -> TenantKeys:
    tag = f"{PREFIX}{{{encode_tenant(tenant)}}}:"
    return TenantKeys(*(tag + name for name in TenantKeys.__slots__))
