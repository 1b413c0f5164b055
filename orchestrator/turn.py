"""Owns one request from begin to commit, step by step (design section 4). Knows nothing of HTTP.

``run`` yields ``Started`` once the first token is there, ``Piece`` for text, and ``Done`` only after the turn is
committed: whoever passes ``Done`` on has an acknowledged turn in hand. Every other end, an exception or a closed
generator, gives back the lease and the reservation, and the turn is not in the history.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import Output
from orchestrator.answers import keep
from orchestrator.asks import Ask, Called, Done, Event, History, Piece, Place, Started
from orchestrator.choices import choice_requests, merged
from orchestrator.generation import Generator
from orchestrator.logs import EventLogger
from orchestrator.messages import to_items
from orchestrator.progress import Progress
from orchestrator.prompting import Prompt, Prompter
from orchestrator.tokens import ChatTokenizer
from orchestrator.toolcalls import ToolCall, ToolSplitter
from policies.errors import ItemNotFound, LeaseLost, OrchestratorError, SessionExists, StoreUnavailable, TurnCancelled
from policies.types import TruncationRecord
from session_store.items import Item, message
from session_store.records import Begun, Moved, Replay
from session_store.store import SessionStore, Wish

LEAST_WINDOW_BYTES = 16 * 2**10
BYTES_PER_TOKEN = 12  # of stored items: a token's share of text and envelope is about 6 in English, 4 in Chinese


@dataclass(slots=True)
class _Answer:
    """The first answer of a turn, the only one that a session keeps."""

    splitter: ToolSplitter | None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def add(self, output: Output) -> str:
        """The text to show."""
        self.token_ids += output.token_ids
        return self.show(output.text if self.splitter is None else self.splitter.feed(output.text))

    def finish(self) -> str:
        """The text to show that had been held back."""
        return "" if self.splitter is None else self.show(self.splitter.finish())

    def show(self, text: str) -> str:
        self.pieces.append(text)
        return text

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return () if self.splitter is None else tuple(self.splitter.calls)


class TurnRunner:
    """Runs turns for one gateway."""

    def __init__(
        self,
        store: SessionStore,
        generator: Generator,
        tokenizers: Mapping[str, ChatTokenizer],
        gateway: str,
        busy_seconds: float,
        log: EventLogger,
    ) -> None:
        self._store = store
        self._generator = generator
        self._prompter = Prompter(tokenizers)
        self._gateway = gateway
        self._busy_seconds = busy_seconds
        self._log = log
        self._background: set[asyncio.Task[Any]] = set()
        self._running: dict[str, Progress] = {}  # turn id → where an abort is heard

    def cancel(self, turn_id: str) -> None:
        """End the turn if it runs here; another gateway's ends when it next renews its lease."""
        if turn_id in self._running:
            self._running[turn_id].abort(TurnCancelled(f"turn {turn_id} was cancelled"))

    async def run(self, ask: Ask, progress: Progress) -> AsyncGenerator[Event]:
        """One turn. Errors before ``Started`` leave nothing behind; errors after it end the turn uncommitted."""
        begun = await self._begin(ask)
        if isinstance(begun, Replay):
            for event in _replay(begun):
                yield event
            return
        session_id = None if begun is None else begun.session_id
        used, committed = 0, False
        self._running[ask.turn_id] = progress
        try:
            history = ask.history if begun is None else History(begun.items, begun.truncated_store, begun.known)
            new = _new_items(ask, history)
            # long texts must not hold up other streams
            prompt = await asyncio.to_thread(self._prompter.prompt, ask, history, new)
            progress.truncation = prompt.truncation
            requests = choice_requests(self._prompter.request(ask, prompt, session_id), ask.n)
            answer = _Answer(ToolSplitter(ask.most_calls) if ask.most_calls else None)
            last: dict[int, Output] = {}
            outputs = merged(self._generator, requests, ask.model.name, progress)
            async with self._keeping(ask, begun, progress), contextlib.aclosing(outputs):
                async for index, output in outputs:
                    if not last:
                        yield Started(prompt.truncation, output.usage, progress.load_seconds, session_id)
                    last[index] = output
                    used = len(prompt.token_ids) + _completion_tokens(last)
                    text = answer.add(output) if index == 0 else output.text
                    if text or output.logprobs:
                        yield Piece(text, index, output.logprobs)
            if text := answer.finish():
                yield Piece(text)
            if answer.calls:
                yield Called(answer.calls, _call_ids(ask, answer))
            done = _done(last, progress, calls=bool(answer.calls))
            await asyncio.shield(self._spawn(self._commit(ask, begun, new, prompt, answer, done)))
            committed = True
            yield done
        finally:
            del self._running[ask.turn_id]
            if not committed:
                # a task of its own: this generator may be closing because its client went away
                await asyncio.shield(self._spawn(self._give_back(ask, begun, used)))

    async def count(self, ask: Ask) -> int:
        """Tokens of the prompt that the ask's history and its own items would make. Takes nothing."""
        prompt = await asyncio.to_thread(self._prompter.prompt, ask, ask.history, _new_items(ask, ask.history))
        return len(prompt.token_ids)

    # -- begin ---------------------------------------------------------------------

    async def _begin(self, ask: Ask) -> Begun | Replay | None:
        limits = {
            # the upper bound: the prompt is not known before the window
            "reserve_tokens": ask.model.max_model_len * ask.n,
            "max_concurrent": ask.tenant.max_concurrent,
            "max_reserved_tokens": ask.tenant.max_reserved_tokens,
        }
        if ask.place is None:
            await self._store.reserve(ask.tenant.name, ask.turn_id, **limits)
            return None
        begun = await self._begin_at(ask, ask.place, limits)
        if isinstance(begun, Moved):
            fork = Place(ask.place.fork_id, "chain")
            with contextlib.suppress(SessionExists):  # an earlier attempt of this request has made it
                await self._store.fork_session(
                    ask.tenant.name, begun.session_id, fork.session_id, end=begun.end, kind=fork.kind
                )
            begun = await self._begin_at(ask, fork, limits)
            assert not isinstance(begun, Moved)
        return begun

    async def _begin_at(self, ask: Ask, place: Place, limits: Mapping[str, int]) -> Begun | Replay | Moved:
        wish = Wish(
            window_bytes=window_bytes(ask.model.max_model_len),
            kind=place.kind,
            must_exist=place.must_exist,
            after=place.after,
            item_ids=(*ask.references, *(item.item_id for item in ask.items if item.item_id is not None)),
        )
        return await self._store.begin_turn_waiting(
            ask.tenant.name,
            place.session_id,
            ask.turn_id,
            deadline_seconds=self._busy_seconds,
            owner=self._gateway,
            idempotency_key=ask.idempotency_key,
            request_fingerprint=ask.fingerprint,
            wish=wish,
            **limits,
        )

    # -- end -----------------------------------------------------------------------

    async def _commit(
        self, ask: Ask, begun: Begun | None, new: list[Item], prompt: Prompt, answer: _Answer, done: Done
    ) -> None:
        used = done.prompt_tokens + done.completion_tokens
        if begun is None:
            try:
                await self._store.settle(ask.tenant.name, ask.turn_id, used)
            except StoreUnavailable as error:  # the answer stands; the reservation lapses by its TTL
                self._log.warning("settle_failed", turn=ask.turn_id, cause=error.message)
            return
        said = await asyncio.to_thread(_answer_items, ask, self._prompter.tokenizer(ask.model), prompt, answer)
        record = prompt.truncation
        truncation = dataclasses.asdict(record) if record is not None and record.reason else {}  # something was cut
        reply = {
            **ask.reply,
            "model": ask.model.name,
            "finish_reason": done.finish_reasons[0],
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.completion_tokens,
            "cached_tokens": done.cached_tokens,
        }
        goes_on = "response" in ask.reply
        await self._store.commit_turn(begun, [*new, *said], truncation, reply, used, goes_on=goes_on)

    async def _give_back(self, ask: Ask, begun: Begun | None, used_tokens: int) -> None:
        try:
            if begun is None:
                await self._store.settle(ask.tenant.name, ask.turn_id, used_tokens)
            else:
                await self._store.abort_turn(begun, "not finished", used_tokens)
        except OrchestratorError as error:  # lease and place lapse by their TTL
            self._log.warning("give_back_failed", turn=ask.turn_id, cause=error.message)

    @contextlib.asynccontextmanager
    async def _keeping(self, ask: Ask, begun: Begun | None, progress: Progress) -> AsyncIterator[None]:
        """Renew lease and reservation beside the turn; a lost lease aborts the generation."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._store.lease_ttl_seconds / 3)
                try:
                    if begun is None:
                        await self._store.renew_reservation(ask.tenant.name, ask.turn_id)
                    else:
                        await self._store.renew(begun)
                except LeaseLost as error:
                    progress.abort(await self._why(ask, begun, error))
                    return
                except StoreUnavailable as error:  # try again: the lease may outlast the outage
                    self._log.warning("renew_failed", turn=ask.turn_id, cause=error.message)

        renewing = self._spawn(renew())
        try:
            yield
        finally:
            renewing.cancel()

    async def _why(self, ask: Ask, begun: Begun | None, lost: LeaseLost) -> OrchestratorError:
        """Cancelled through another gateway, or lost in truth."""
        if begun is not None:
            with contextlib.suppress(OrchestratorError):
                turn = await self._store.read_turn(ask.tenant.name, begun.session_id, ask.turn_id)
                if turn is not None and turn.status == "cancelled":
                    return TurnCancelled(f"turn {ask.turn_id} was cancelled")
        return lost

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def window_bytes(model_tokens: int) -> int:
    """How much of a session is read for a model with a window of so many tokens: more than it could take."""
    return max(LEAST_WINDOW_BYTES, BYTES_PER_TOKEN * model_tokens)


def _new_items(ask: Ask, history: History | None) -> list[Item]:
    """The ask's items that are not stored yet. ItemNotFound for a reference to one that is not there."""
    known = frozenset[str]() if history is None else history.known
    if missing := [item_id for item_id in ask.references if item_id not in known]:
        raise ItemNotFound(f"there is no item {missing[0]} in this conversation", param="input")
    fresh = [item for item in ask.items if item.item_id is None or item.item_id not in known]
    return to_items(fresh, ask.turn_id, ask.arrival)


def _answer_items(ask: Ask, tokenizer: ChatTokenizer, prompt: Prompt, answer: _Answer) -> list[Item]:
    now, name, text = time.time(), ask.model.name, answer.text
    if not answer.calls:
        ids = keep(tokenizer.encoder, prompt.token_ids, answer.token_ids, text)
        return [Item(f"msg_{ask.turn_id}_a", ask.turn_id, now, message("assistant", text), name, ids=ids)]
    said = [Item(f"msg_{ask.turn_id}_a", ask.turn_id, now, message("assistant", text), name)] if text.strip() else []
    calls = zip(answer.calls, _call_ids(ask, answer), strict=True)
    bodies = [
        {"type": "function_call", "call_id": call_id, "name": call.name, "arguments": call.arguments}
        for call, call_id in calls
    ]
    return said + [Item(f"fc_{ask.turn_id}_{n}", ask.turn_id, now, body, name) for n, body in enumerate(bodies, 1)]


def _call_ids(ask: Ask, answer: _Answer) -> tuple[str, ...]:
    return tuple(f"call_{ask.turn_id}_{number}" for number, _ in enumerate(answer.calls, 1))


def _completion_tokens(last: Mapping[int, Output]) -> int:
    return sum(output.usage.completion_tokens for output in last.values() if output.usage is not None)


def _done(last: Mapping[int, Output], progress: Progress, *, calls: bool) -> Done:
    """From the last output of each answer. The prompt counts once: the further answers find the first one's KV."""
    usage = last[0].usage
    reasons: list[str | None] = [last[index].finish_reason for index in sorted(last)]
    if calls and reasons[0] == "stop":
        reasons[0] = "tool_calls"
    assert usage is not None
    return Done(
        tuple(reason for reason in reasons if reason is not None),
        usage.prompt_tokens,
        _completion_tokens(last),
        usage.cached_tokens,
        usage,
        tuple(progress.hosts),
    )


def _replay(replay: Replay) -> list[Event]:
    reply = replay.reply
    record = dict(replay.truncation)
    if record:
        record["dropped_items"] = tuple(record["dropped_items"])
    said = [item for item in replay.items if item.role == "assistant" and item.model is not None]
    calls = [item for item in said if item.type == "function_call"]
    called = Called(
        tuple(ToolCall(item.body["name"], item.body["arguments"]) for item in calls),
        tuple(str(item.call_id) for item in calls),
    )
    begun = (replay.turn_id, replay.items, reply)
    return [
        Started(TruncationRecord(**record) if record else None, None, 0.0, replay.session_id, begun),
        Piece("".join(item.text for item in said if item.type == "message")),
        *([called] if calls else []),
        Done(
            (reply["finish_reason"],), reply["prompt_tokens"], reply["completion_tokens"], reply["cached_tokens"], None
        ),
    ]
