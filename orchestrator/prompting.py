"""Owns the prompt of a turn: the session's window and what the turn brings, as token ids that fit the model."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.protocol import GenerationRequest, SamplingParams
from orchestrator.answers import Conversation
from orchestrator.asks import Ask, History
from orchestrator.config import ModelConfig
from orchestrator.messages import to_messages
from orchestrator.tokens import ChatTokenizer
from policies.errors import BadRequest, ContextLengthExceeded, LoadFailed
from policies.truncation import check_calls, fit
from policies.types import TruncationRecord
from session_store.items import Item, message

REPLY_SHARE = 4  # without max_tokens, a session's prompt leaves at least 1/4 of the window to the answer
INSTRUCTIONS = "instructions"  # the id of the item that is not stored


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int
    truncation: TruncationRecord | None  # None: there is no history


class Prompter:
    """Makes prompts and requests for the engines."""

    def __init__(self, tokenizers: Mapping[str, ChatTokenizer]) -> None:
        self._tokenizers = tokenizers

    def tokenizer(self, model: ModelConfig) -> ChatTokenizer:
        tokenizer = self._tokenizers.get(model.name)
        if tokenizer is None:
            raise LoadFailed(f"model {model.name} has no usable tokenizer; `orchestrator ps` says why")
        return tokenizer

    def prompt(self, ask: Ask, history: History | None, new: Sequence[Item]) -> Prompt:
        """Of these new items, behind those of the history. ContextLengthExceeded, BadRequest."""
        items = [*(history.items if history is not None else ()), *new]
        if ask.instructions:
            said = message("system", ask.instructions)
            items.insert(0, Item(INSTRUCTIONS, INSTRUCTIONS, ask.arrival, said, pinned=True))
        if not any(item.role != "system" for item in items):
            raise BadRequest("there is nothing to answer: no items were sent, and there is no history", param="input")
        return self._alone(ask, items) if history is None else self._behind(ask, history, items)

    def request(self, ask: Ask, prompt: Prompt, session_id: str | None) -> GenerationRequest:
        sampling = SamplingParams(
            max_tokens=prompt.max_tokens,
            seed=ask.seed if ask.seed is not None else secrets.randbits(63),
            temperature=ask.temperature,
            top_p=ask.top_p,
            stop=ask.stop + self.tokenizer(ask.model).stop,
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
            session=None if session_id is None else f"{ask.tenant.name}/{session_id}",
            arrival=ask.arrival,
            keep_alive_seconds=ask.keep_alive_seconds,
            pin_seconds=ask.pin_seconds,
            pin_bytes=int(ask.tenant.kv_pin),
        )

    def _alone(self, ask: Ask, items: Sequence[Item]) -> Prompt:
        tokenizer, window = self.tokenizer(ask.model), ask.model.max_model_len
        check_calls([item.view() for item in items])
        messages = to_messages(items).messages
        _check_window(ask, tokenizer.count(messages, window))
        token_ids = tokenizer.encode(messages)
        return Prompt(tuple(token_ids), _answer_limit(ask, len(token_ids)), None)

    def _behind(self, ask: Ask, history: History, items: Sequence[Item]) -> Prompt:
        window = ask.model.max_model_len
        as_messages = to_messages(items)
        kept = {
            place: item.ids
            for item, place in zip(items, as_messages.places, strict=True)
            if place is not None and item.ids is not None and item.model == ask.model.name
        }
        talk = Conversation(self.tokenizer(ask.model), as_messages.messages, kept)
        reply = ask.max_tokens or min(ask.model.default_max_tokens, window // REPLY_SHARE)
        sent, record = fit(
            [item.view() for item in items], window - reply, lambda some: talk.count(as_messages.of(some), window)
        )
        if history.unread:
            unread = f"{history.unread} older items are beyond what is read for a turn"
            reason = f"{record.reason}; {unread}" if record.reason else unread
            record = dataclasses.replace(record, unread_items=history.unread, reason=reason)
        if not ask.may_truncate and (record.full_tokens > record.budget_tokens or history.unread):
            raise ContextLengthExceeded(
                f"This model's maximum context length is {window} tokens. The conversation does not fit beside {reply} "
                f"tokens for the answer ({record.reason}). Send truncation: auto, or shorten it.",
                param="input",
            )
        token_ids = talk.encode(as_messages.of(sent))
        return Prompt(tuple(token_ids), _answer_limit(ask, len(token_ids)), record)


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
