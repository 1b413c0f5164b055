"""Whose KV is dropped: that of sessions the store does not know, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.forgetting import Forgetting
from orchestrator.logs import event_logger
from orchestrator.pool_words import Forgotten
from policies.errors import StoreUnavailable


class Remote:
    """An actor's method."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def remote(self, *args: Any) -> Any:
        return self._answer(*args)


class Controller:
    def __init__(self, held: list[str]) -> None:
        self.forgotten: list[str] = []
        self.kv_sessions = Remote(lambda: held)
        self.forget_sessions = Remote(self._forget)

    def _forget(self, names: Sequence[str]) -> Forgotten:
        self.forgotten += names
        return Forgotten(len(names), ())


class Store:
    def __init__(self, known: set[tuple[str, str]], error: Exception | None = None) -> None:
        self._known, self._error = known, error

    async def missing(self, asked: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        if self._error is not None:
            raise self._error
        return [session for session in asked if session not in self._known]


def forgetting(controller: Controller, store: Any, tmp_path: Path) -> Forgetting:
    return Forgetting(controller, store, ["acme", "globex"], event_logger(str(tmp_path / "log")))


def test_expired_sessions_and_those_of_removed_tenants_go_and_the_others_stay(tmp_path: Path) -> None:
    controller = Controller(["acme/here", "acme/gone", "globex/here", "left/here"])
    store = Store({("acme", "here"), ("globex", "here"), ("left", "here")})
    asyncio.run(forgetting(controller, store, tmp_path).once())
    assert controller.forgotten == ["acme/gone", "left/here"]


def test_a_name_that_no_session_can_have_goes_and_keeps_none_of_the_others(tmp_path: Path) -> None:
    controller = Controller(["nonsense", "acme/a b", "acme/", "acme/here", "acme/gone"])
    asyncio.run(forgetting(controller, Store({("acme", "here")}), tmp_path).once())
    assert controller.forgotten == ["nonsense", "acme/a b", "acme/", "acme/gone"]


def test_while_the_store_does_not_answer_nothing_is_dropped(tmp_path: Path) -> None:
    controller = Controller(["acme/here", "left/here"])
    with pytest.raises(StoreUnavailable):
        asyncio.run(forgetting(controller, Store(set(), StoreUnavailable("no Redis")), tmp_path).once())
    assert controller.forgotten == []
