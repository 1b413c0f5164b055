"""Owns the words that cross the engine's door. Torch-free: gateways import it.

Everything here is plain frozen data, so that it travels between processes and never aliases a live object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from policies.errors import OrchestratorError
from policies.preemption import NOT_MEASURED, KVCosts
from policies.types import Tier

if TYPE_CHECKING:
    from engine.snapshot import EngineSnapshot

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one generation chooses its tokens.

    ``temperature`` 0 is greedy. Noise is keyed on (seed, position), so a generation continued elsewhere from its token
    ids draws the same noise.

    The scores go through, in this order: ``logit_bias``, ``repetition_penalty``, ``presence_penalty`` and
    ``frequency_penalty``, ``min_tokens`` (all these under greedy too), temperature, ``top_k``, ``top_p``, ``min_p``.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0  # only the k best tokens; 0: all
    min_p: float = 0.0  # only tokens at least this likely, relative to the best
    repetition_penalty: float = 1.0  # divides the scores of tokens in prompt or answer (multiplies negative ones)
    presence_penalty: float = 0.0  # taken from the score of every token that is in the answer
    frequency_penalty: float = 0.0  # the same, times how often it is there
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its score)
    min_tokens: int = 0  # before so many no end token is chosen, and no stop string ends the generation
    logprobs: int | None = None  # so many likeliest alternatives beside each token's own score; None: no scores


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation, from its first token or from tokens already delivered elsewhere.

    ``delivered_token_ids`` are generated tokens the client already has: they are part of the context, count towards
    ``max_tokens``, and are never emitted again.
    """

    request_id: str
    generation: int  # attempt number; a late output of an earlier attempt is not applied to this one
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str
    tier: Tier = Tier.STANDARD
    session: str | None = None
    group: str | None = None  # generations of one prompt; routed alike, so that they share its KV
    delivered_token_ids: tuple[int, ...] = ()
    arrival: float = 0.0  # wall-clock seconds of the first arrival at a gateway; kept over every retry
    deadline: float | None = None  # wall-clock seconds
    keep_alive_seconds: float | None = None  # the model stays awake for so long after it; None: as configured
    pin_seconds: float = 0.0  # its session's KV is evicted last for so long
    pin_bytes: int = 0  # that its tenant may have pinned in one engine


@dataclass(frozen=True, slots=True)
class Usage:
    """What one generation cost. Seconds are wall clock, tokens are counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV was found in the prefix cache
    recomputed_tokens: int  # tokens computed again after a preemption
    queue_seconds: float  # from add() to the first scheduled chunk
    prefill_seconds: float  # from there to the first token
    decode_seconds: float  # from the first token to the last


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model itself held a token to be, before any penalty, bias or temperature."""

    token_id: int
    logprob: float  # natural logarithm
    text: str  # U+FFFD where the token is no whole character
    raw: bytes | None  # what the token stands for; None when the tokenizer does not say
    top: tuple[TokenLogprob, ...] = ()  # the likeliest tokens at this place, best first


@dataclass(frozen=True, slots=True)
class Output:
    """What one step produced for one generation.

    ``text`` is what may be sent now: never half a character, never part of a stop string. Exactly one Output of a
    generation has ``finish_reason`` or ``error``, and it is the last.
    """

    request_id: str
    generation: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: OrchestratorError | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of each of token_ids, where the request asked

    @property
    def final(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The bounds that both the door and the scheduler obey."""

    max_model_len: int  # tokens of prompt + answer
    block_size: int = 16  # tokens
    step_tokens: int = 256  # most tokens computed in one step
    prompt_step_tokens: int = 0  # most when nobody decodes, who would wait for them; never fewer than step_tokens
    max_running: int = 16  # most generations in one step
    max_waiting: int = 256
    ordering: str = "priority"  # a name of policies.registry.ORDERING
    kv_host_bytes: int = 0  # of the memory: for KV that left the device (preempted, or of a sleeping model)
    kv_disk_bytes: int = 0  # of this node's disk, for the KV of all its models; 0: none
    kv_disk: str = ""  # the directory

    @property
    def largest_step(self) -> int:
        """Tokens; the activation peak is measured for so many."""
        return max(self.step_tokens, self.prompt_step_tokens)


@dataclass(frozen=True, slots=True)
class Places:
    """What engines of one machine keep for each other, as paths; "": nothing of the kind."""

    recipes: str = ""  # directory: what first loads find out; without it every load is a first one
    code: str = ""  # directory: what is compiled for the CPU; without it layers stay plain and torch attends
    cores: str = ""  # file: who computes; without it each engine computes as if alone


NOWHERE = Places()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load (or a wake) measured."""

    weight_bytes: int
    kv_bytes: int
    kv_capacity_tokens: int
    peak_bytes: int  # activation peak of the largest step
    residual_bytes: int  # what the process holds while the model sleeps: itself, and KV in host memory
    fingerprint: str  # of the weights
    dtype: str
    seconds: float
    kv_host_capacity_tokens: int = 0
    kv_costs: KVCosts = NOT_MEASURED
    window_tokens: int | None = None  # that the layer that sees farthest sees; None: some layer sees everything


@dataclass(frozen=True, slots=True)
class WakeReport:
    """Where the time of a wake went."""

    copy_seconds: float  # memory allocated and weights copied
    canary_seconds: float


@dataclass(frozen=True, slots=True)
class DiskStats:
    """The disk tier as one engine sees it. Counters only grow; bytes are the whole node's."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0  # of every model
    written: int = 0  # blocks, by this engine
    fetched: int = 0
    missed: int = 0  # known, but gone or damaged
    dropped: int = 0  # not written: the queue or the disk was full
    problem: str = ""  # why it is out of use now


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A cheap picture for metrics and ``orchestrator ps``. Counters only grow."""

    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_pinned: int = 0  # of the cached ones
    kv_bytes: int = 0  # of the device, that the pool holds now
    kv_host_blocks_total: int = 0
    kv_host_blocks_used: int = 0
    kv_blocks_moved_out: int = 0
    kv_blocks_moved_in: int = 0
    kv_moves_failed: int = 0
    kv_disk: DiskStats = DiskStats()
    kv_supply: tuple[int, ...] = ()  # bytes that could be freed at or below each price of policies.pricing
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    layers: str = ""  # compiled, or why not
    attention: str = ""  # what computes it, and why nothing faster
    weights: str = ""  # in which forms their matrices are
    sessions: int = 0  # whose KV, to its last full block, is still on the device
    tenants_waiting: tuple[tuple[str, int], ...] = ()


class Engine(Protocol):
    """Inference for one model. Not thread-safe: one thread owns it (``engine.loop``)."""

    limits: EngineLimits

    def load(self, *, asleep: bool = False) -> LoadReport:
        """Read the weights, measure, allocate the KV pool.

        ``asleep``: only make ready to wake, by what an earlier load of the same files found out on this machine;
        NotKnownYet when there was none. ``warm`` is then not called: waking does it.
        """

    def warm(self) -> None:
        """First steps, on nobody's request; requests are taken from then on."""

    def add(self, request: GenerationRequest) -> None:
        """Accept a generation; BadRequest or QueueFull when it cannot be."""

    def cancel(self, request_id: str, generation: int, reason: str) -> bool:
        """End a generation; its blocks are free when no step in flight can write them. False if unknown."""

    def step(self) -> Sequence[Output]:
        """Schedule → run → commit."""

    def has_work(self) -> bool: ...

    def live(self) -> Sequence[tuple[str, int]]:
        """(request id, generation) of all generations that have not ended."""

    def sleep(self) -> None:
        """Give weights and KV back. Only with no generation live."""

    def wake(self) -> WakeReport:
        """Copy the weights back and ask the canary.

        HostUnavailable, still asleep, when memory is short; EngineError when the canary's answer is wrong.
        """

    def close(self) -> None:
        """The process is about to end: what KV is worth keeping goes to disk, within seconds."""

    def resize_kv(self, num_bytes: int) -> int:
        """Let the KV pool hold so many bytes of the device, up to what the load gave it; the bytes it has now."""

    def lend_core(self, lent: bool) -> None:
        """Compute with one thread less, or with all again: another model loads on this machine."""

    def forget_session(self, session: str) -> int:
        """Drop the KV that only this session's turns left, on every tier; how many blocks there were."""

    def sessions(self) -> Sequence[str]:
        """Whose KV may be here, ``tenant/session``; the disk's are those of every model of the node."""

    def stats(self) -> EngineStats: ...

    def snapshot(self) -> EngineSnapshot:
        """Who holds the memory, who waits for it, who ended how; HostUnavailable before the load."""

    def check(self) -> None:
        """Raise when the books do not balance."""
