"""Owns a deterministic engine without a model: same scheduler, same books, settable time, size, speed and faults.

For tests of everything around an engine, and for trials of a configuration on a machine without weights. Its vocabulary
is bytes, its answers are words drawn from a hash of the prompt, so that equal prompts give equal answers on any host.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.core import EngineCore
from engine.logprobs import Choice
from engine.protocol import EngineLimits, LoadReport
from engine.scheduler import Chunk
from engine.tiers import Move
from policies.errors import LoadFailed

EOS = 0
FINGERPRINT = "fake"  # of its weights
VOCABULARY = 256
BLOCK_BYTES = 16  # of the made-up KV in its checkpoints
SCRIPTED = re.compile(rb"User: say ([^\n]+)\nAssistant:$")  # of the plain template
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "juniper")


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """What the fake engine pretends. Seconds are slept; bytes are only reported."""

    load_seconds: float = 0.0
    wake_seconds: float = 0.0
    step_seconds: float = 0.0
    prefill_seconds_per_token: float = 0.0
    kv_capacity_tokens: int = 65_536
    weight_bytes: int = 64 * 2**20
    kv_bytes: int = 64 * 2**20
    residual_bytes: int = 32 * 2**20
    reply_words: int = 8
    load_error: str = ""  # every load fails with this
    wake_error: str = ""  # every wake fails with this
    nan_at_token: int = 0  # the n-th token of a generation is not finite
    die_at_token: int = 0  # SIGKILL to ourselves when the n-th token of the process is made


class FakeTokenizer:
    """Bytes as tokens."""

    longest_token = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i != EOS or not skip_special_tokens).decode(errors="replace")

    def id_to_token(self, id: int, /) -> str | None:
        return f"<0x{id:02X}>"


class FakeEngine(EngineCore):
    """See the module's text."""

    def __init__(self, limits: EngineLimits, settings: FakeSettings | None = None) -> None:
        super().__init__(limits)
        self.settings = settings or FakeSettings()
        self._made = 0

    def load(self, *, asleep: bool = False) -> LoadReport:
        fake = self.settings
        time.sleep(fake.load_seconds)
        if fake.load_error:
            raise LoadFailed(fake.load_error)
        report = LoadReport(
            weight_bytes=fake.weight_bytes,
            kv_bytes=fake.kv_bytes,
            kv_capacity_tokens=fake.kv_capacity_tokens,
            peak_bytes=0,
            residual_bytes=fake.residual_bytes,
            fingerprint=FINGERPRINT,
            dtype="bytes",
            seconds=fake.load_seconds,
            kv_host_capacity_tokens=self.limits.kv_host_bytes * fake.kv_capacity_tokens // max(1, fake.kv_bytes),
        )
        self._begin(report, FakeTokenizer(), frozenset({EOS}), VOCABULARY)
        return report

    def _warm(self) -> None:
        """Nothing is cold."""

    def _canary(self) -> None:
        """Nothing can have changed."""

    def _compute(self, chunks: Sequence[Chunk]) -> list[Choice | None]:
        fake = self.settings
        time.sleep(fake.step_seconds + fake.prefill_seconds_per_token * sum(c.count for c in chunks if c.count > 1))
        return [self._choose(chunk) for chunk in chunks if chunk.samples]

    def _choose(self, chunk: Chunk) -> Choice | None:
        token = self._next(chunk)
        asked = chunk.context.request.sampling.logprobs
        return token if token is None else Choice(token) if asked is None else scored(token, asked)

    def _next(self, chunk: Chunk) -> int | None:
        self._made += 1
        if self._made == self.settings.die_at_token:
            os.kill(os.getpid(), signal.SIGKILL)
        request = chunk.context.request
        position = chunk.context.num_generated
        if position + 1 == self.settings.nan_at_token:
            return None
        reply = reply_to(request.prompt_token_ids, self.settings.reply_words)
        if position >= len(reply) and position < request.sampling.min_tokens:
            reply = (reply or b" ") * (position + 1)  # once more from the start
        return reply[position] if position < len(reply) else EOS

    def _read_kv(self, blocks: Sequence[int], *, host: bool) -> np.ndarray:
        return np.zeros((len(blocks), BLOCK_BYTES), np.uint8)

    def _write_kv(self, blocks: Sequence[int], content: np.ndarray) -> None:
        """There is no KV."""

    def _move(self, moves: Sequence[Move]) -> None:
        """There is no KV."""

    def _distrust(self) -> None:
        """It goes by nothing."""

    def lend_core(self, lent: bool) -> None:
        """It computes nothing."""

    def _content_bytes(self) -> int:
        return BLOCK_BYTES

    def _keep_memory(self, blocks: int) -> None:
        """There is no KV."""

    def _give_back(self) -> None:
        """Nothing is held."""

    def _take_again(self) -> None:
        time.sleep(self.settings.wake_seconds)
        if self.settings.wake_error:
            raise MemoryError(self.settings.wake_error)


def scored(token: int, top: int) -> Choice:
    """The fake's scores: half for what it says, the other half shared by all other bytes."""
    sure, other = math.log(0.5), math.log(0.5 / (VOCABULARY - 1))
    others = [(byte, other) for byte in range(top) if byte != token]
    return Choice(token, sure, ((token, sure), *others)[:top])


def reply_to(prompt_token_ids: Sequence[int], words: int) -> bytes:
    """The fake's whole answer to a prompt; what its last message, `say TEXT`, tells it to say, is scripted."""
    asked = SCRIPTED.search(bytes(prompt_token_ids))
    if asked is not None:
        return asked[1]
    digest = hashlib.sha256(bytes(prompt_token_ids)).digest()
    return " ".join(WORDS[digest[i % 32] % len(WORDS)] for i in range(words)).encode()
