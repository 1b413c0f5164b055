"""Owns one request from begin to commit, step by step (design section 4). Knows nothing of HTTP.

``run`` yields ``Started`` once the first token is there, ``Piece`` for text, and ``Done`` only after the turn is
committed: whoever passes ``Done`` on has an acknowledged turn in hand. Every other end, an exception or a closed
generator, gives back the lease and the reservation, and the turn is not in the history.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import GenerationRequest, Output, SamplingParams, TokenLogprob, Usage
from orchestrator.answers import Conversation, keep
from orchestrator.choices import choice_requests, merged
from orchestrator.config import ModelConfig, TenantConfig
from orchestrator.generation import Generator
from orchestrator.logs import EventLogger
from orchestrator.progress import Progress
from orchestrator.tokens import ChatTokenizer
from policies.errors import ContextLengthExceeded, LeaseLost, LoadFailed, OrchestratorError, StoreUnavailable
from policies.truncation import fit
from policies.types import TruncationRecord
from session_store.items import Item
from session_store.records import Begun, Replay
from session_store.store import SessionStore

REPLY_SHARE = 4  # without max_tokens, a session's prompt leaves at least 1/4 of the window to the answer


@dataclass(frozen=True, slots=True)
class Ask:
    """A validated request."""

    tenant: TenantConfig
    model: ModelConfig
    messages: tuple[Mapping[str, Any], ...]  # role, content, and tool fields where present
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    max_tokens: int | None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None  # alternatives per token; None: no log probabilities
    n: int = 1  # answers; more than one only without a session
    session_id: str | None = None
    idempotency_key: str | None = None
    fingerprint: str | None = None  # of the body, to tell a retry from another request under the same key
    keep_alive_seconds: float | None = None  # the model stays awake for so long after it; None: as configured
    pin_seconds: float = 0.0  # the session's KV is evicted last for so long
    turn_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrival: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Started:
    """The first token is there; headers may go."""

    truncation: TruncationRecord | None
    first: Usage | None
    load_seconds: float
    replayed_turn: str | None = None  # the finished turn whose stored reply follows


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one of the answers."""

    text: str
    index: int = 0  # of the answer
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The turn is committed."""

    finish_reasons: tuple[str, ...]  # of each answer
    prompt_tokens: int
    completion_tokens: int  # of all answers
    cached_tokens: int
    usage: Usage | None  # of the first answer
    hosts: tuple[str, ...] = ()


Event = Started | Piece | Done


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int
    truncation: TruncationRecord | None


@dataclass(slots=True)
class _Answer:
    """The first answer of a turn, the only one that a session keeps."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.pieces.append(output.text)


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
        self._tokenizers = tokenizers
        self._gateway = gateway
        self._busy_seconds = busy_seconds
        self._log = log
        self._background: set[asyncio.Task[Any]] = set()

    async def run(self, ask: Ask, progress: Progress) -> AsyncGenerator[Event]:
        """One turn. Errors before ``Started`` leave nothing behind; errors after it end the turn uncommitted."""
        begun = await self._begin(ask)
        if isinstance(begun, Replay):
            for event in _replay(begun):
                yield event
            return
        used, committed = 0, False
        try:
            prompt = await asyncio.to_thread(self._prompt, ask, begun)  # long texts must not hold up other streams
            progress.truncation = prompt.truncation
            requests = choice_requests(self._request(ask, prompt), ask.n)
            answer = _Answer()
            last: dict[int, Output] = {}
            outputs = merged(self._generator, requests, ask.model.name, progress)
            async with self._keeping(ask, begun, progress), contextlib.aclosing(outputs):
                async for index, output in outputs:
                    if not last:
                        yield Started(prompt.truncation, output.usage, progress.load_seconds)
                    last[index] = output
                    used = len(prompt.token_ids) + _completion_tokens(last)
                    if index == 0:
                        answer.add(output)
                    if output.text or output.logprobs:
                        yield Piece(output.text, index, output.logprobs)
            done = _done(last, progress)
            await asyncio.shield(self._spawn(self._commit(ask, begun, prompt, answer, done)))
            committed = True
            yield done
        finally:
            if not committed:
                # a task of its own: this generator may be closing because its client went away
                await asyncio.shield(self._spawn(self._give_back(ask, begun, used)))

    # -- begin ---------------------------------------------------------------------

    async def _begin(self, ask: Ask) -> Begun | Replay | None:
        limits = {
            # the upper bound: the prompt is not known before the window
            "reserve_tokens": ask.model.max_model_len * ask.n,
            "max_concurrent": ask.tenant.max_concurrent,
            "max_reserved_tokens": ask.tenant.max_reserved_tokens,
        }
        if ask.session_id is None:
            await self._store.reserve(ask.tenant.name, ask.turn_id, **limits)
            return None
        return await self._store.begin_turn_waiting(
            ask.tenant.name,
            ask.session_id,
            ask.turn_id,
            deadline_seconds=self._busy_seconds,
            owner=self._gateway,
            idempotency_key=ask.idempotency_key,
            request_fingerprint=ask.fingerprint,
            **limits,
        )

    # -- prompt --------------------------------------------------------------------

    def _prompt(self, ask: Ask, begun: Begun | None) -> _Prompt:
        tokenizer = self._tokenizer(ask.model)
        window = ask.model.max_model_len
        if begun is None:
            _check_window(ask, tokenizer.count(ask.messages, window))
            token_ids = tokenizer.encode(ask.messages)
            return _Prompt(tuple(token_ids), _answer_limit(ask, len(token_ids)), None)
        items = (*begun.items, *_new_items(ask))
        kept = {at: item.ids for at, item in enumerate(items) if item.ids is not None and item.model == ask.model.name}
        talk = Conversation(tokenizer, [_message(item) for item in items], kept)
        reply = ask.max_tokens or min(ask.model.default_max_tokens, window // REPLY_SHARE)
        sent, record = fit([item.view() for item in items], window - reply, lambda some: talk.count(some, window))
        if begun.truncated_store:
            record = dataclasses.replace(record, reason=f"{record.reason}; {begun.truncated_store} older items unread")
        token_ids = talk.encode(sent)
        return _Prompt(tuple(token_ids), _answer_limit(ask, len(token_ids)), record)

    def _tokenizer(self, model: ModelConfig) -> ChatTokenizer:
        tokenizer = self._tokenizers.get(model.name)
        if tokenizer is None:
            raise LoadFailed(f"model {model.name} has no usable tokenizer; `orchestrator ps` says why")
        return tokenizer

    def _request(self, ask: Ask, prompt: _Prompt) -> GenerationRequest:
        seed = ask.seed if ask.seed is not None else secrets.randbits(63)
        sampling = SamplingParams(
            max_tokens=prompt.max_tokens,
            seed=seed,
            temperature=ask.temperature,
            top_p=ask.top_p,
            stop=ask.stop + self._tokenizer(ask.model).stop,
            top_k=ask.top_k,
            min_p=ask.min_p,
            repetition_penalty=ask.repetition_penalty,
            presence_penalty=ask.presence_penalty,
            frequency_penalty=ask.frequency_penalty,
            logit_bias=ask.logit_bias,
            min_tokens=ask.min_tokens,
            logprobs=ask.logprobs,
        )
        return GenerationRequest(
            request_id=ask.turn_id,
            generation=0,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            tenant=ask.tenant.name,
            tier=ask.tenant.tier,
            session=None if ask.session_id is None else f"{ask.tenant.name}/{ask.session_id}",
            arrival=ask.arrival,
            keep_alive_seconds=ask.keep_alive_seconds,
            pin_seconds=ask.pin_seconds,
            pin_bytes=int(ask.tenant.kv_pin),
        )

    # -- end -----------------------------------------------------------------------

    async def _commit(self, ask: Ask, begun: Begun | None, prompt: _Prompt, answer: _Answer, done: Done) -> None:
        used = done.prompt_tokens + done.completion_tokens
        if begun is None:
            try:
                await self._store.settle(ask.tenant.name, ask.turn_id, used)
            except StoreUnavailable as error:  # the answer stands; the reservation lapses by its TTL
                self._log.warning("settle_failed", turn=ask.turn_id, cause=error.message)
            return
        item = await asyncio.to_thread(_answer_item, ask, self._tokenizer(ask.model), prompt, answer)
        truncation = dataclasses.asdict(prompt.truncation) if prompt.truncation is not None else {}
        reply = {
            "model": ask.model.name,
            "finish_reason": done.finish_reasons[0],
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.completion_tokens,
            "cached_tokens": done.cached_tokens,
        }
        await self._store.commit_turn(begun, [*_new_items(ask), item], truncation, reply, used)

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
                    progress.abort(error)
                    return
                except StoreUnavailable as error:  # try again: the lease may outlast the outage
                    self._log.warning("renew_failed", turn=ask.turn_id, cause=error.message)

        renewing = self._spawn(renew())
        try:
            yield
        finally:
            renewing.cancel()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _new_items(ask: Ask) -> list[Item]:
    return [
        Item(
            item_id=f"{ask.turn_id}-{index}",
            turn_id=ask.turn_id,
            role=message["role"],
            content=message["content"],
            created=ask.arrival,
            tool_calls=tuple(message.get("tool_calls", ())),
            tool_call_id=message.get("tool_call_id"),
            name=message.get("name"),
        )
        for index, message in enumerate(ask.messages)
    ]


def _answer_item(ask: Ask, tokenizer: ChatTokenizer, prompt: _Prompt, answer: _Answer) -> Item:
    text = "".join(answer.pieces)
    return Item(
        item_id=f"{ask.turn_id}-a",
        turn_id=ask.turn_id,
        role="assistant",
        content=text,
        created=time.time(),
        model=ask.model.name,
        ids=keep(tokenizer.encoder, prompt.token_ids, answer.token_ids, text),
    )


def _message(item: Item) -> dict[str, Any]:
    """An item as chat templates expect it."""
    message: dict[str, Any] = {"role": item.role, "content": item.content}
    if item.tool_calls:
        message["tool_calls"] = list(item.tool_calls)
    if item.tool_call_id is not None:
        message["tool_call_id"] = item.tool_call_id
    if item.name is not None:
        message["name"] = item.name
    return message


def _check_window(ask: Ask, prompt_tokens: int) -> None:
    window = ask.model.max_model_len
    wanted = ask.max_tokens or 1
    if prompt_tokens + wanted > window:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {window} tokens. However, your messages take {prompt_tokens} "
            f"tokens and {wanted} were requested for the answer. Shorten the messages, or max_tokens.",
            param="messages",
        )


def _answer_limit(ask: Ask, prompt_tokens: int) -> int:
    room = ask.model.max_model_len - prompt_tokens
    return min(room, ask.max_tokens or ask.model.default_max_tokens)


def _completion_tokens(last: Mapping[int, Output]) -> int:
    return sum(output.usage.completion_tokens for output in last.values() if output.usage is not None)


def _done(last: Mapping[int, Output], progress: Progress) -> Done:
    """From the last output of each answer. The prompt counts once: the further answers find the first one's KV."""
    usage = last[0].usage
    reasons = tuple(last[index].finish_reason for index in sorted(last))
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
    record["dropped_items"] = tuple(record.get("dropped_items", ()))
    text = "".join(item.content for item in replay.items if item.role == "assistant")
    return [
        Started(TruncationRecord(**record), None, 0.0, replay.turn_id),
        Piece(text),
        Done(
            (reply["finish_reason"],), reply["prompt_tokens"], reply["completion_tokens"], reply["cached_tokens"], None
        ),
    ]
