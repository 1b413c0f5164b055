"""Owns the steps nobody asked for: warm-up, and the fixed prompt whose answer must survive every sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from engine.attention.kv import KVMemory
from engine.context import Context
from engine.protocol import EngineLimits, GenerationRequest, SamplingParams
from engine.runner import Runner
from engine.scheduler import Chunk
from policies.errors import EngineError

PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)  # any ids do: only sameness matters
MOST_TOKENS = 4
PIECE_TOKENS = 64
WARM_SECONDS = 0.3  # for shapes beyond the usual ones
MARGIN = 1e-3  # lead over the runner-up below which rounding could change a token


def warm_up(runner: Runner, kv: KVMemory, limits: EngineLimits, seen: Sequence[int] = ()) -> None:
    """Run the shapes of decoding once, and those that traffic had (``seen``: tokens in one step) within a moment."""
    rows = {1, min(2, limits.max_running), min(8, limits.max_running)}
    for count in sorted(rows):
        made_up_step(runner, kv, limits.block_size, [[1]] * count)()
    if next(iter(kv.keys.values())).is_cuda:  # kernels are compiled when first launched: of prompts, and of split keys
        longest = [1] * min(limits.max_model_len, kv.num_slots)
        made_up_step(runner, kv, limits.block_size, [longest[: limits.largest_step]])()
        made_up_step(runner, kv, limits.block_size, [longest], start=len(longest) - 1)()
    until = time.monotonic() + WARM_SECONDS
    for count in sorted(set(seen) - rows):
        if time.monotonic() >= until:
            return
        if count <= limits.max_running:
            made_up_step(runner, kv, limits.block_size, [[1]] * count)()
        elif count <= limits.max_model_len:
            made_up_step(runner, kv, limits.block_size, [[1] * count])()


def decoding(runner: Runner, kv: KVMemory, limits: EngineLimits) -> Callable[[], torch.Tensor]:
    """The step that the number of threads is chosen on: a few decodes beside a piece of a prompt."""
    decodes = min(4, limits.max_running, limits.step_tokens)
    prompt = [1] * min(PIECE_TOKENS, limits.step_tokens - decodes, limits.max_model_len)
    return made_up_step(runner, kv, limits.block_size, [*[[1]] * decodes, *([prompt] if prompt else [])])


def answer(runner: Runner, kv: KVMemory, limits: EngineLimits) -> tuple[int, ...]:
    """The greedy continuation of the canary prompt, as far as every choice is clear by the margin."""
    tokens: tuple[int, ...] = ()
    while len(tokens) < MOST_TOKENS:
        top = made_up_step(runner, kv, limits.block_size, [[*PROMPT, *tokens]])().topk(2)
        if float(top.values[0, 0] - top.values[0, 1]) < MARGIN:
            break
        tokens += (int(top.indices[0, 0]),)
    return tokens


def check(runner: Runner, kv: KVMemory, limits: EngineLimits, known: tuple[int, ...]) -> None:
    """One forward over prompt and answer must give the answer's last token again; EngineError otherwise."""
    if known:
        said = int(made_up_step(runner, kv, limits.block_size, [[*PROMPT, *known[:-1]]])().argmax())
        if said != known[-1]:
            raise EngineError(f"canary answered {said} instead of {known[-1]}: the weights are not what they were")


def made_up_step(
    runner: Runner, kv: KVMemory, block_size: int, prompts: list[list[int]], start: int = 0
) -> Callable[[], torch.Tensor]:
    """A step of made-up contexts, from token ``start`` on; they share blocks, which is only right for one alone."""
    blocks = kv.num_slots // block_size
    chunks = []
    for prompt in prompts:
        request = GenerationRequest("warm", 0, tuple(prompt), SamplingParams(1, 0), tenant="")
        context = Context(request, b"", 0.0)
        context.block_table = list(range(min(blocks, -(-len(prompt) // block_size))))
        chunks.append(Chunk(context, start, len(prompt) - start))
    return lambda: runner.run(chunks, kv)
