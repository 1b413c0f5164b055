"""One request from begin to commit, on fakes of the store and the generator: what is acknowledged when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.protocol import GenerationRequest, Output, Usage
from orchestrator.answers import recall
from orchestrator.asks import Ask, Done, Piece, Place, Started
from orchestrator.config import ModelConfig, TenantConfig
from orchestrator.messages import NewItem
from orchestrator.progress import Progress
from orchestrator.tokens import load_tokenizer
from orchestrator.turn import TurnRunner
from policies.errors import EngineError, LeaseLost, OrchestratorError, StoreUnavailable, TurnCancelled
from session_store.items import Item, message
from session_store.records import Begun, StoredTurn

BREAKS = {
    "test_a_turn_that_another": ("orchestrator/turn.py", 'turn.status == "cancelled"', "False"),
    "test_done_comes_only": (
        "orchestrator/turn.py",
        "            done = _done(last, progress, calls=bool(answer.calls))\n",
        "            done = _done(last, progress, calls=bool(answer.calls))\n            yield done\n",
    ),
}
MODEL = ModelConfig(name="m", source="fake", memory=1, max_model_len=256, default_max_tokens=16)
TENANT = TenantConfig(name="t")


class FakeStore:
    """Records calls; ``fail`` maps a method to the error it raises."""

    lease_ttl_seconds = 15.0

    def __init__(self, **fail: OrchestratorError) -> None:
        self.calls: list[str] = []
        self.fail = fail
        self.committed: Any = None
        self.items: tuple[Item, ...] = ()
        self.status = "running"

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]

    async def begin_turn_waiting(self, tenant: str, session_id: str, turn_id: str, **_: Any) -> Begun:
        self._call("begin")
        return Begun(tenant, session_id, turn_id, 1, 0, self.items, 0)

    async def reserve(self, *_: Any, **__: Any) -> None:
        self._call("reserve")

    async def commit_turn(
        self, begun: Begun, items: Any, truncation: Any, reply: Any, used_tokens: int, *, goes_on: bool
    ) -> int:
        self._call("commit")
        self.committed = (items, reply, used_tokens)
        return 1

    async def abort_turn(self, *_: Any, **__: Any) -> None:
        self._call("abort")

    async def settle(self, *_: Any, **__: Any) -> None:
        self._call("settle")

    async def renew(self, *_: Any) -> None:
        self._call("renew")

    async def read_turn(self, tenant: str, session_id: str, turn_id: str) -> StoredTurn:
        return StoredTurn(turn_id, self.status)

    async def renew_reservation(self, *_: Any) -> bool:
        self._call("renew_reservation")
        return True


class FakeGenerator:
    """Says ``words``, then ends, or fails with ``error``."""

    def __init__(self, words: list[str], error: OrchestratorError | None = None) -> None:
        self.words, self.error = words, error
        self.request: GenerationRequest | None = None
        self.closed = False

    async def outputs(self, request: GenerationRequest, model: str, progress: Progress) -> AsyncIterator[Output]:
        self.request = request
        try:
            for index, word in enumerate(self.words):
                if progress.aborted is not None:
                    raise progress.aborted
                last = self.error is None and index == len(self.words) - 1
                usage = Usage(len(request.prompt_token_ids), index + 1, 0, 0, 0.0, 0.0, 0.0)
                yield Output(request.request_id, 0, (index,), word, "stop" if last else None, usage=usage)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


class Speaker(FakeGenerator):
    """Says these (token ids, text), then ends; over two hosts, the second of which goes on with the request."""

    def __init__(self, *steps: tuple[tuple[int, ...], str]) -> None:
        super().__init__([])
        self.steps = steps

    async def outputs(self, request: GenerationRequest, model: str, progress: Progress) -> AsyncIterator[Output]:
        self.request = request
        for number, (ids, text) in enumerate(self.steps, 1):
            usage = Usage(len(request.prompt_token_ids), number, 0, 0, 0.0, 0.0, 0.0)
            progress.hosts.append(f"host {number // 2}")
            end = "stop" if number == len(self.steps) else None
            yield Output(request.request_id, number // 2, ids, text, end, usage=usage)


class SilentLog:
    def warning(self, *_: Any, **__: Any) -> None: ...


def runner(store: FakeStore, generator: FakeGenerator) -> TurnRunner:
    tokenizers = {"m": load_tokenizer(None)}
    return TurnRunner(store, generator, tokenizers, "gw", 0.0, SilentLog())  # type: ignore[arg-type]


def ask(session_id: str | None = "s", **fields: Any) -> Ask:
    values: dict[str, Any] = {
        "tenant": TENANT, "model": MODEL, "items": (NewItem(message("user", "hi")),), "temperature": 1.0,
        "top_p": 1.0, "seed": None, "stop": (), "max_tokens": None,
        "place": None if session_id is None else Place(session_id),
    }  # fmt: skip
    return Ask(**values | fields)


async def test_done_comes_only_after_the_commit() -> None:
    store = FakeStore()
    seen = []
    async for event in runner(store, FakeGenerator(["a", "b"])).run(ask(), Progress(0.0)):
        seen.append((type(event), list(store.calls)))
    assert [kind for kind, _ in seen] == [Started, Piece, Piece, Done]
    assert all("commit" not in calls for kind, calls in seen if kind is not Done)
    assert store.calls == ["begin", "commit"]
    items, reply, used = store.committed
    assert [(item.role, item.text) for item in items] == [("user", "hi"), ("assistant", "ab")]
    assert reply["finish_reason"] == "stop" and used == reply["prompt_tokens"] + 2


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([(b"one", "one"), (b" two", " two"), (b"\0", "")], b"one two"),  # the end token is the template's business
        ([(b"one", "o"), (b" two", "ne tw"), (b"", "o")], b"one two"),  # text that was held back
        ([(b"one", "one"), (b"\nUser:", "")], b"one"),  # cut by a stop string
        ([(b"caf\xc3", "caf"), (b"", "\ufffd")], b"caf\xc3"),  # ends within a character
        ([(b"caf\xc3", "caf"), (b"\xa9", "é")], b"caf\xc3\xa9"),
        ([(b"one", "uno")], None),
        ([(b"o\0ne", "one")], None),  # a control token within it
        ([(b"\0", "")], None),
    ],
)
async def test_a_session_keeps_the_ids_of_what_was_said(steps: list[tuple[bytes, str]], kept: bytes | None) -> None:
    store, generator = FakeStore(), Speaker(*((tuple(said), text) for said, text in steps))
    pieces = [e async for e in runner(store, generator).run(ask(), Progress(0.0)) if isinstance(e, Piece)]
    question, answer = store.committed[0]
    assert question.ids is None
    assert answer.text == "".join(piece.text for piece in pieces) == "".join(text for _, text in steps)
    encoder = load_tokenizer(None).encoder
    found = None if answer.ids is None else recall(encoder, answer.ids, answer.text)
    assert found == (None if kept is None else list(kept))


async def test_the_next_turn_says_them_again() -> None:
    store, generator = FakeStore(), Speaker((tuple(b"caf\xc3"), "caf"), ((), "\ufffd"))
    async for _ in runner(store, generator).run(ask(), Progress(0.0)):
        pass
    first = generator.request
    store.items = tuple(store.committed[0])
    async for _ in runner(store, generator).run(ask(), Progress(0.0)):
        pass
    assert first is not None and generator.request is not None
    assert bytes(generator.request.prompt_token_ids) == (
        bytes(first.prompt_token_ids) + b"caf\xc3" + b"\n" + bytes(first.prompt_token_ids)
    )


async def test_a_failed_commit_acknowledges_nothing() -> None:
    store = FakeStore(commit=StoreUnavailable("gone"))
    seen = []
    with pytest.raises(StoreUnavailable):
        async for event in runner(store, FakeGenerator(["a"])).run(ask(), Progress(0.0)):
            seen.append(type(event))
    assert Done not in seen
    assert store.calls == ["begin", "commit", "abort"]


async def test_an_engine_error_aborts_the_turn() -> None:
    store = FakeStore()
    with pytest.raises(EngineError):
        async for _ in runner(store, FakeGenerator(["a"], EngineError("nan"))).run(ask(), Progress(0.0)):
            pass
    assert store.calls == ["begin", "abort"]


async def test_a_closed_generator_gives_everything_back() -> None:
    store, generator = FakeStore(), FakeGenerator(["a", "b", "c"])
    events = runner(store, generator).run(ask(), Progress(0.0))
    assert isinstance(await anext(events), Started)
    await events.aclose()  # type: ignore[attr-defined]
    assert generator.closed
    assert store.calls == ["begin", "abort"]


async def test_a_lost_lease_ends_the_turn() -> None:
    store, progress = FakeStore(), Progress(0.0)
    events = runner(store, FakeGenerator(["a", "b"])).run(ask(), progress)
    await anext(events)
    await anext(events)
    progress.abort(LeaseLost("taken over"))
    with pytest.raises(LeaseLost):
        await anext(events)
    assert store.calls == ["begin", "abort"]


@pytest.mark.parametrize(("status", "error"), [("cancelled", TurnCancelled), ("completed", LeaseLost)])
async def test_a_turn_that_another_gateway_has_cancelled_says_so(status: str, error: type[Exception]) -> None:
    """It hears of it when it renews its lease."""
    store, progress = FakeStore(renew=LeaseLost("taken")), Progress(0.0)
    store.lease_ttl_seconds, store.status = 0.0, status
    events = runner(store, FakeGenerator(["a", "b", "c"])).run(ask(), progress)
    with pytest.raises(error):
        async for _ in events:
            async with asyncio.timeout(5):
                while progress.aborted is None:  # noqa: ASYNC110 — there is no event to wait for
                    await asyncio.sleep(0)
    assert store.calls[-1] == "abort"


async def test_a_stateless_request_reserves_and_settles_once() -> None:
    store = FakeStore()
    kinds = [type(e) async for e in runner(store, FakeGenerator(["a"])).run(ask(None), Progress(0.0))]
    assert kinds == [Started, Piece, Done]
    assert store.calls == ["reserve", "settle"]


async def test_a_seed_is_drawn_when_the_client_gives_none() -> None:
    seeds = set()
    for _ in range(3):
        generator = FakeGenerator(["a"])
        async for _ in runner(FakeStore(), generator).run(ask(None), Progress(0.0)):
            pass
        assert generator.request is not None
        seeds.add(generator.request.sampling.seed)
    assert len(seeds) == 3


async def test_the_answer_limit_fits_the_window() -> None:
    generator = FakeGenerator(["a"])
    long = ask(None, items=(NewItem(message("user", "x" * 230)),))
    async for _ in runner(FakeStore(), generator).run(long, Progress(0.0)):
        pass
    request = generator.request
    assert request is not None
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == 256
