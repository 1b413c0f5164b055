"""Owns the independent view of the crash test: a bare Redis client, JSON parsed here, and the count against the log.

Shares no code with the session store. It knows the documented keys and shapes and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.acceptance.crash_clients import CrashTurn, Talk

TENANT = "acme"


@dataclass(frozen=True)
class Look:
    """What lay in Redis of one turn's key. ``committed_ms``: by Redis's clock; None while no later turn hides it."""

    lease_turn: str = ""  # of the turn that holds the lease under this key
    turn: str = ""  # that was recorded under this key
    committed_ms: float | None = None


@dataclass
class History:
    """One session as it lies in Redis."""

    items: list[dict[str, Any]]
    turns: dict[str, str]  # turn id → record

    @property
    def said(self) -> list[tuple[str, str, str]]:
        """(turn, role, text) of each item."""
        return [(_turn_of(item), item["item"]["role"], _text(item["item"])) for item in self.items]


class CrashReader:
    """Reads the private Redis of a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._redis = redis.Redis(
            port=int((state_dir / "redis.port").read_text()),
            password=(state_dir / "redis.secret").read_text().strip(),
            decode_responses=True,
            socket_timeout=5,
            retry=Retry(NoBackoff(), 0),
        )

    def close(self) -> None:
        self._redis.close()

    def answers(self) -> bool:
        try:
            return bool(self._redis.ping())
        except redis.RedisError:
            return False

    def look(self, turns: Sequence[CrashTurn]) -> list[Look]:
        """The state of each of these turns now, in one round trip."""
        pipe = self._redis.pipeline(transaction=True)
        for turn in turns:
            for place in turn.places:
                pipe.hmget(_name(place, "lease"), "idem", "turn")
                pipe.hget(_name(place, "idem"), f"t:{turn.key}")
                pipe.hmget(_name(place, "meta"), "last", "updated_ms")
        answers = iter(pipe.execute())
        return [
            self._seen(turn, [(next(answers), next(answers), next(answers)) for _ in turn.places]) for turn in turns
        ]

    def committed(self, turn: CrashTurn) -> bool:
        try:
            return bool(self.look([turn])[0].turn)
        except redis.RedisError:
            return False

    def histories(self) -> dict[str, History]:
        """Every session of the tenant, whoever made it."""
        found = {}
        for key in self._redis.scan_iter(_name("*", "items"), count=1000):
            name = key.removesuffix("}:items").split("/", 1)[1]
            items = [json.loads(item) for item in self._redis.lrange(key, 0, -1)]
            found[name] = History(items, {str(t): str(r) for t, r in self._redis.hgetall(_name(name, "turns")).items()})
        return found

    @staticmethod
    def _seen(turn: CrashTurn, answers: Sequence[tuple[Any, Any, Any]]) -> Look:
        lease_turn, recorded, committed_ms = "", "", None
        for (key, holder), committed, (last, updated_ms) in answers:
            lease_turn = holder if key == turn.key else lease_turn
            if committed:
                recorded, committed_ms = committed, float(updated_ms) if last == committed else None
        return Look(lease_turn, recorded, committed_ms)


@dataclass
class Count:
    """What the histories say of the clients' log. Names are nonces."""

    acknowledged: int = 0
    given_up: int = 0
    kept: int = 0  # given up, and in the history, whole and once: allowed
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    half: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        named = (("lost", self.lost), ("doubled", self.doubled), ("half", self.half), ("strange", self.strange))
        return [f"{name}: {', '.join(what)}" for name, what in named if what]


def count_talk(talk: Talk, histories: Mapping[str, History]) -> Count:
    """Hold one talk against its history, which for a chain is where its last acknowledged response lies."""
    count = Count()
    said = histories[talk.session].said if talk.session in histories else []
    order = []
    for turn in talk.turns:
        count.acknowledged += turn.acknowledged
        count.given_up += turn.gave_up
        asked = [at for at, (_, role, text) in enumerate(said) if role == "user" and text == turn.prompt]
        ids = {said[at][0] for at in asked}
        answers = [at for at, (by, role, _) in enumerate(said) if role == "assistant" and by in ids]
        if len(asked) > 1 or len(answers) > 1:
            count.doubled.append(turn.nonce)
        if turn.acknowledged:
            if not any(said[at][2] == turn.text for at in answers):
                count.lost.append(turn.nonce)
            order += [*asked, *answers]
        elif is_kept(turn, histories):
            count.kept += 1
    if order != sorted(order):
        count.strange.append(f"{talk.name}: the stored order {order} is not the client's")
    return count


def count_sessions(histories: Mapping[str, History], turns: Iterable[CrashTurn]) -> Count:
    """What holds of every session, forks included: turns are whole, once, recorded, asked for, and answered as told."""
    count = Count()
    asked = {turn.prompt: turn for turn in turns}
    ids: dict[str, set[str]] = {}
    recorded = {turn_id for history in histories.values() for turn_id in history.turns}  # a fork has no older records
    for name, history in histories.items():
        by_turn: dict[str, list[tuple[str, str]]] = {}
        for turn_id, role, text in history.said:
            by_turn.setdefault(turn_id, []).append((role, text))
        prompts = Counter(text for _, role, text in history.said if role == "user")
        for turn_id, role, text in history.said:
            if role == "user":
                ids.setdefault(text, set()).add(turn_id)
        count.doubled += [f"{name}: {prompt!r}" for prompt, times in prompts.items() if times > 1]
        for turn_id, parts in by_turn.items():
            if [role for role, _ in parts] != ["user", "assistant"] or turn_id not in recorded:
                said = "recorded" if turn_id in recorded else "without a record"
                count.half.append(f"{name}: turn {turn_id}, {said}, is {parts}")
                continue
            turn = asked.get(parts[0][1])
            if turn is None:
                count.strange.append(f"{name}: nobody asked {parts[0][1]!r}")
            elif turn.expected is not None and parts[1][1] != turn.expected:
                count.half.append(f"{name}: {turn.nonce} is answered {parts[1][1]!r}")
        for turn_id, record in history.turns.items():
            if int(record.split()[3]) != len(by_turn.get(turn_id, ())):
                count.half.append(f"{name}: turn {turn_id} has other items than its record says")
    # a fork has its turns from where it came from, under their ids
    count.doubled += [f"{text!r} is turns {', '.join(found)}" for text, found in ids.items() if len(found) > 1]
    return count


def is_kept(turn: CrashTurn, histories: Mapping[str, History]) -> bool:
    """Whether the turn is in any history: what was given up in a chain lies beside it."""
    found = (histories[place] for place in turn.places if place in histories)
    return any(role == "user" and text == turn.prompt for history in found for _, role, text in history.said)


def _name(session: str, part: str) -> str:
    return f"co:{{{TENANT}/{session}}}:{part}"


def _turn_of(item: Mapping[str, Any]) -> str:
    """Written beside it, or named by its id: ``msg_<turn>_0``."""
    return str(item["turn"]) if "turn" in item else item["id"].split("_", 1)[1].rsplit("_", 1)[0]


def _text(body: Mapping[str, Any]) -> str:
    content = body["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
