"""The scenario bank's entries about where a session's turns go, on a whole service with models of several hosts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.scenarios.calls import ACME, GLOBEX, ask, said, session, usage
from tests.service import RunningService, wait_until

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]

BREAKS = {
    "test_S37_one_session_id": ("orchestrator/prompting.py", 'f"{ask.tenant.name}/{session_id}"', "session_id"),
    "test_S37_two_keys": (
        "orchestrator/tenants.py",
        "[(digest, tenant) for tenant in config.tenants",
        '[(digest, tenant.model_copy(update={"name": digest})) for tenant in config.tenants',
    ),
    "test_S58": ("orchestrator/generation.py", 'f"{model}/{key}"', "repr(time.time())"),
}
ACME_TOO = {"Authorization": "Bearer sk-demo-acme-too"}
BLOCK_TOKENS = 16


def generated(service: RunningService, model: str) -> list[int]:
    """Tokens that each host of a model has made."""
    return [host["stats"]["generated_tokens"] for host in service.hosts(model)]


def places(service: RunningService, headers: dict[str, str]) -> tuple[int, int]:
    """Which host of `wide` answers a turn of this session for acme, and which for globex, as the hosts count it."""
    wait_until(lambda: [h["state"] for h in service.hosts("wide")] == ["ready"] * 3, 30, "three hosts are ready")
    before = generated(service, "wide")
    ask(service, "wide", "hello", headers | ACME, max_tokens=5).raise_for_status()
    ask(service, "wide", "hello", headers | GLOBEX, max_tokens=9).raise_for_status()
    wait_until(lambda: sum(generated(service, "wide")) == sum(before) + 14, 10, "the hosts have counted")
    made = [now - then for now, then in zip(generated(service, "wide"), before, strict=True)]
    return next(i for i, n in enumerate(made) if n in (5, 14)), next(i for i, n in enumerate(made) if n in (9, 14))


def test_S37_one_session_id_of_two_tenants_has_two_histories_and_two_places(fake_service: RunningService) -> None:
    for _ in range(10):  # they may share a place by chance, once in three
        headers = session()
        mine, theirs = places(fake_service, headers)
        if mine != theirs:
            break
    assert mine != theirs, "10 session ids, always the same host for both: 1 in 59,000 by chance"
    answers = [said(ask(fake_service, "wide", "again", headers | who, max_tokens=3)) for who in (ACME, GLOBEX)]
    assert len(answers[0]) == len(answers[1]) == 3
    for who, first in ((ACME, 5), (GLOBEX, 9)):
        tokens, cached = usage(ask(fake_service, "wide", "more", headers | who))
        turns = len("User: hello\nAssistant:\n") + first + len("User: again\nAssistant:\n") + 3
        assert tokens == turns + len("User: more\nAssistant:")
        assert cached >= (turns - 3) // BLOCK_TOKENS * BLOCK_TOKENS, "each finds its own KV where it was"


def test_S37_two_keys_of_one_tenant_share_its_sessions(fake_service: RunningService) -> None:
    """A key names a tenant; sessions, places and KV are the tenant's."""
    headers = session()
    first = said(ask(fake_service, "wide", "a first message that fills some blocks", headers))
    turn = f"User: a first message that fills some blocks\nAssistant:{first}\n"
    tokens, cached = usage(ask(fake_service, "wide", "and?", headers | ACME_TOO))
    assert tokens == len(turn + "User: and?\nAssistant:")
    assert cached >= 2 * BLOCK_TOKENS


def test_S58_two_models_in_turn_on_one_session_each_keep_their_own_state(fake_service: RunningService) -> None:
    """Own template and counts, own sticky host, own KV: what a model has cached grows with each of its turns."""
    headers, talk = session(), []
    rendered: dict[str, Any] = {"wide": _fallback, "tall": _tags}
    seen: dict[str, list[tuple[int, int]]] = {"wide": [], "tall": []}
    for turn in range(8):
        model = ("wide", "tall")[turn % 2]
        talk.append(f"turn {turn}, and some more words")
        answer = ask(fake_service, model, talk[-1], headers)
        seen[model].append(usage(answer))
        assert seen[model][-1][0] == len(rendered[model](talk))
        talk.append(said(answer))
    for turns in seen.values():
        for (before, cached_before), (_, cached) in pairwise(turns):
            assert cached > cached_before and cached >= before // BLOCK_TOKENS * BLOCK_TOKENS


def _fallback(talk: list[str]) -> str:
    return "".join(f"{('User: ', 'Assistant:')[n % 2]}{text}\n" for n, text in enumerate(talk)) + "Assistant:"


def _tags(talk: list[str]) -> str:
    return "".join(f"<{('user', 'assistant')[n % 2]} >{text}</>" for n, text in enumerate(talk)) + "<assistant >"
