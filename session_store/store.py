"""Owns sessions in Redis: begin, renew, commit and abort of a turn, a tenant's reservations, and reading
back.

A turn costs one round trip before and one after: the session's script and the tenant's script travel
together, without MULTI, because a cluster keeps them in two slots. Either can refuse; what the other took
is then given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from policies.errors import IdempotencyMismatch, LeaseLost, StoreUnavailable
from session_store import answers
from session_store.answers import UNLIMITED
from session_store.changing import Lifetimes, SessionChanger, to_ms, triple, when_free
from session_store.client import Call, ScriptClient
from session_store.items import Item
from session_store.keys import check_idempotency_key, confirm_key, session_keys, tenant_keys
from session_store.reading import not_found
from session_store.records import Begun, Moved, Replay

log = logging.getLogger(__name__)

INCOMPLETE_KEPT = 32
SETTLED_TTL_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Wish:
    """What a turn wants of its session beyond the lease."""

    window_bytes: int = 1 << 30  # of stored items, newest first, that are read at most, besides older heads
    kind: str = "session"  # of a session that this turn makes
    must_exist: bool = False  # else SessionNotFound
    after: str | None = None  # the turn that must be the last of a chain; else Moved, or SessionNotFound
    item_ids: tuple[str, ...] = ()  # ``Begun.known`` says which of them are stored


ANY_SESSION = Wish()


class SessionStore(SessionChanger):
    """Sessions and tenant reservations in plain Redis (6.2 or newer, or Valkey).

    Args:
        url: ``redis://:password@host:port/0``.
        session_ttl_seconds: an unused session is gone after this long.
        tenant_ttl_seconds: the same of the tenants named here.
        lease_ttl_seconds: a turn or reservation that is not renewed lapses after this long; renew at a
            third of it.
        window_items: how many of the newest items ``begin_turn`` returns at most, besides older heads.
        command_timeout_seconds: how long one round trip may take; an unanswered one is tried once more.
        replicas: so many replicas must have a turn before it counts as committed.
        observe: hears the seconds of every round trip.

    Every method raises StoreUnavailable when Redis is unreachable, full, read-only or silent.
    """

    def __init__(
        self,
        url: str,
        *,
        session_ttl_seconds: float = 7 * 24 * 3600,
        tenant_ttl_seconds: Mapping[str, float] | None = None,
        lease_ttl_seconds: float = 15.0,
        window_items: int = 4096,
        command_timeout_seconds: float = 5.0,
        replicas: int = 0,
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        lifetimes = Lifetimes(session_ttl_seconds, tenant_ttl_seconds or {})
        shortest = min([session_ttl_seconds, *lifetimes.of_tenant.values()])
        if not 0 < lease_ttl_seconds <= shortest:
            raise ValueError(f"lease_ttl_seconds must be above 0 and at most {shortest:g}, the shortest session TTL")
        if window_items < 1:
            raise ValueError("window_items must be at least 1")
        super().__init__(ScriptClient(url, command_timeout_seconds, replicas, observe), lifetimes)
        self.lease_ttl_seconds = lease_ttl_seconds
        self._lease_ms = to_ms(lease_ttl_seconds)
        self._window_items = window_items
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Finish giving back what cancelled begins took, then close the connections."""
        if self._background:
            await asyncio.gather(*self._background)
        await super().close()

    # The turn

    async def begin_turn(
        self,
        tenant: str,
        session_id: str,
        turn_id: str,
        *,
        owner: str,
        reserve_tokens: int,
        max_concurrent: int | None,
        max_reserved_tokens: int | None,
        idempotency_key: str | None = None,
        request_fingerprint: str | None = None,
        wish: Wish = ANY_SESSION,
    ) -> Begun | Replay | Moved:
        """Take the session's lease and a place of the tenant's, and read the window: one round trip.

        A limit of None is no limit. Raises SessionBusy, SessionNotFound, IdempotencyMismatch, TenantLimit or
        BadRequest; nothing is held then, nor after a Replay or Moved.
        """
        request = (check_idempotency_key(idempotency_key), request_fingerprint or "")
        begin = self._begin_call(tenant, session_id, turn_id, owner, request, wish)
        place = self._reserve_call(tenant, turn_id, reserve_tokens, max_concurrent, max_reserved_tokens)
        undo = (
            self._abort_call(tenant, session_id, turn_id),
            self._settle_call(tenant, turn_id, 0, "release"),
        )
        session, reserved = await self._run_or_give_back((begin, place), undo)
        took = (answers.status(session) == "granted", answers.status(reserved) == "ok")
        if not all(took):
            taken = [call for call, was_taken in zip(undo, took, strict=True) if was_taken]
            await asyncio.shield(self._in_background(self._give_back(taken)))
            refused = self._refused(tenant, session_id, session, reserved, reserve_tokens, wish)
            if isinstance(refused, Replay):  # its own commit may not have been confirmed
                await self._client.confirm(confirm_key(tenant, session_id))
            return refused
        return Begun(
            tenant,
            session_id,
            turn_id,
            idempotency_key=idempotency_key,
            request_fingerprint=request_fingerprint,
            **answers.begun(session, self._window_items, wish.window_bytes),
        )

    async def begin_turn_waiting(
        self, tenant: str, session_id: str, turn_id: str, *, deadline_seconds: float, **begin: Any
    ) -> Begun | Replay | Moved:
        """``begin_turn``, asking again for up to ``deadline_seconds`` while the session is busy; then SessionBusy."""
        return await when_free(deadline_seconds, lambda: self.begin_turn(tenant, session_id, turn_id, **begin))

    async def renew(self, begun: Begun) -> None:
        """Keep lease and reservation for another ``lease_ttl_seconds``. LeaseLost if the lease is another's
        now."""
        keys = session_keys(begun.tenant, begun.session_id).all()
        args = (begun.fencing_token, begun.turn_id, self._lease_ms, self._lifetimes.ms(begun.tenant))
        place = Call("renew_place", tenant_keys(begun.tenant).all(), (begun.turn_id, self._lease_ms))
        lease, _ = await self._client.run(Call("renew_lease", keys, args), place)
        self._check_lease(begun, lease)

    async def commit_turn(
        self,
        begun: Begun,
        items: Sequence[Item],
        truncation_record: Mapping[str, Any],
        reply: Mapping[str, Any],
        used_tokens: int,
        *,
        goes_on: bool = False,
    ) -> int:
        """Append the turn, free lease and reservation, book the tokens: one round trip. Returns the new
        version.

        Repeating it for the same ``begun`` returns the same version and appends nothing. LeaseLost: the lease had gone
        to another turn or the session was deleted, and nothing was appended. The caller shields it from cancellation:
        once sent, the turn may be in the history. ``goes_on``: ``Wish.after`` may name it.
        """
        if strange := [item.item_id for item in items if item.turn_id.partition(".")[0] != begun.turn_id]:
            raise ValueError(f"items of another turn than {begun.turn_id}: {', '.join(strange)}")
        commit = Call(
            "commit_turn",
            session_keys(begun.tenant, begun.session_id).all(),
            (
                begun.fencing_token,
                begun.turn_id,
                self._lifetimes.ms(begun.tenant),
                begun.idempotency_key or "",
                begun.request_fingerprint or "",
                orjson.dumps({"reply": reply, "truncation": truncation_record}),
                int(goes_on),
                *(value for item in items for value in triple(item)),
            ),
        )
        settle = self._settle_call(begun.tenant, begun.turn_id, used_tokens, "commit", begun.session_id)
        committed, settled = await self._client.run(commit, settle, confirmed=True)
        self._check_lease(begun, committed)
        if isinstance(settled, StoreUnavailable):  # the turn is in the history: the place lapses by its TTL
            log.warning("settle_failed", extra={"turn_id": begun.turn_id, "cause": settled.message})
        return int(committed[1])

    async def abort_turn(self, begun: Begun, reason: str, used_tokens: int = 0) -> None:
        """Free lease and reservation and remember the attempt as incomplete, outside prompts. Safe to
        repeat."""
        attempt = {"turn_id": begun.turn_id, "reason": reason, "used_tokens": used_tokens}
        results = await self._client.run(
            self._abort_call(begun.tenant, begun.session_id, begun.turn_id, begun.fencing_token, orjson.dumps(attempt)),
            self._settle_call(begun.tenant, begun.turn_id, used_tokens, "abort", begun.session_id),
        )
        answers.raise_refusal(*results)

    async def cancel_turn(self, tenant: str, session_id: str, turn_id: str) -> bool:
        """Take the lease from a turn that holds it, so that it cannot be committed; False if it does not hold it."""
        attempt = orjson.dumps({"turn_id": turn_id, "reason": "cancelled", "used_tokens": 0})
        args = (turn_id, self._lifetimes.ms(tenant), attempt, INCOMPLETE_KEPT)
        (answer,) = await self._client.run(Call("cancel_turn", session_keys(tenant, session_id).all(), args))
        answers.raise_refusal(answer)
        return answers.status(answer) == "ok"

    # The tenant

    async def reserve(
        self,
        tenant: str,
        turn_id: str,
        *,
        reserve_tokens: int,
        max_concurrent: int | None,
        max_reserved_tokens: int | None,
    ) -> None:
        """Reserve for a stateless request; it lapses after ``lease_ttl_seconds`` unless renewed.
        TenantLimit if full."""
        (answer,) = await self._client.run(
            self._reserve_call(tenant, turn_id, reserve_tokens, max_concurrent, max_reserved_tokens)
        )
        answers.raise_refusal(answer)
        if answers.status(answer) != "ok":
            raise answers.tenant_limit(tenant, answer, reserve_tokens)

    async def renew_reservation(self, tenant: str, turn_id: str) -> bool:
        """Keep a stateless request's reservation; False if it had lapsed."""
        call = Call("renew_place", tenant_keys(tenant).all(), (turn_id, self._lease_ms))
        (answer,) = await self._client.run(call)
        answers.raise_refusal(answer)
        return answers.status(answer) == "ok"

    async def settle(self, tenant: str, turn_id: str, used_tokens: int) -> None:
        """Free a stateless request's reservation and book what it used. Repeating it books nothing."""
        answers.raise_refusal(*await self._client.run(self._settle_call(tenant, turn_id, used_tokens, "commit")))

    # Inside

    def _refused(
        self, tenant: str, session_id: str, session: Any, reserved: Any, reserve_tokens: int, wish: Wish
    ) -> Replay | Moved:
        """The replay, or the error that says most: store, mismatch, missing, busy, then the tenant's limit."""
        answers.raise_refusal(session)
        match answers.status(session):
            case "replay":
                return answers.replay(tenant, session_id, session)
            case "mismatch":
                raise IdempotencyMismatch(
                    f"the idempotency key was used for a different request on session {session_id}: "
                    "use a new key, or send the same request",
                    param="Idempotency-Key",
                )
            case "missing":
                raise not_found(session_id)
            case "moved":
                return Moved(tenant, session_id, str(wish.after), int(session[1]))
            case "busy":
                raise answers.busy(session_id, session)
        answers.raise_refusal(reserved)
        raise answers.tenant_limit(tenant, reserved, reserve_tokens)

    def _check_lease(self, begun: Begun, answer: Any) -> None:
        answers.raise_refusal(answer)
        if answers.status(answer) != "ok":
            raise LeaseLost(
                f"turn {begun.turn_id} no longer holds session {begun.session_id} (fencing "
                f"token {begun.fencing_token}, lease {self.lease_ttl_seconds:g} s): nothing was written; "
                "send it again"
            )

    def _begin_call(
        self, tenant: str, session_id: str, turn_id: str, owner: str, request: tuple[str, str], wish: Wish
    ) -> Call:
        args = (
            *(turn_id, owner, self._lease_ms, self._lifetimes.ms(tenant), *request),
            *(self._window_items, wish.window_bytes, wish.kind, "1" if wish.must_exist else "", wish.after or ""),
            *wish.item_ids,
        )
        return Call("begin_turn", session_keys(tenant, session_id).all(), args)

    def _reserve_call(
        self, tenant: str, turn_id: str, tokens: int, max_concurrent: int | None, max_tokens: int | None
    ) -> Call:
        limits = (UNLIMITED if limit is None else limit for limit in (max_concurrent, max_tokens))
        return Call("reserve", tenant_keys(tenant).all(), (turn_id, tokens, *limits, self._lease_ms))

    def _settle_call(self, tenant: str, turn_id: str, used_tokens: int, mode: str, session_id: str = "") -> Call:
        args = (turn_id, used_tokens, mode, session_id, self._lifetimes.ms(tenant), to_ms(SETTLED_TTL_SECONDS))
        return Call("settle", tenant_keys(tenant).all(), args)

    def _abort_call(
        self, tenant: str, session_id: str, turn_id: str, token: int | str = "", attempt: bytes = b""
    ) -> Call:
        args = (token, turn_id, self._lifetimes.ms(tenant), attempt, INCOMPLETE_KEPT)
        return Call("abort_turn", session_keys(tenant, session_id).all(), args)

    async def _run_or_give_back(self, calls: Sequence[Call], undo: Sequence[Call]) -> list[Any]:
        """Run; if cancelled on the way, what Redis took is unknown to all: give it back, whatever it was."""
        try:
            return await self._client.run(*calls)
        except asyncio.CancelledError:
            self._in_background(self._give_back(undo))
            raise

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _give_back(self, calls: Sequence[Call]) -> None:
        """Undo a begin. If Redis is out of reach the TTLs do it."""
        if not calls:
            return
        try:
            await self._client.run(*calls)
        except StoreUnavailable as error:
            log.warning("give_back_failed", extra={"cause": error.message})
