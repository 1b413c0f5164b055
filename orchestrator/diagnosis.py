"""Owns what is concluded from the engines' snapshots: what is wrong, by how much, and what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.scheduler import EXPECTED_SHARE
from engine.snapshot import ContextSnapshot, EngineSnapshot
from orchestrator.contexts import HostContexts
from policies.types import ContextState

PILE_SECONDS = 10.0  # who waits for this long is too many
CROWD_SECONDS = 1.0  # the same, where more wait than may run
THRASH_PREEMPTIONS = 3
SMALL_WAITING = 4
ENDED_ENOUGH = 8  # below, a share of them says nothing

Kind = Literal["no_answer", "unfreed", "small_pool", "disk", "waiting", "thrash", "small_batches", "length"]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One thing that is wrong with one host."""

    kind: Kind
    host: str
    said: str
    fix: str


def conclude(hosts: Sequence[HostContexts]) -> list[Conclusion]:
    """What is wrong, worst first for each host; nothing when all is well."""
    return [conclusion for host in hosts for conclusion in _of_host(host)]


def summary(hosts: Sequence[HostContexts]) -> str:
    """One line of numbers over all hosts."""
    found = [host.snapshot for host in hosts if host.snapshot is not None]
    states = Counter(context.state for snapshot in found for context in snapshot.contexts)
    said = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no context lives"
    held, total = sum(s.pool.held for s in found), sum(s.pool.total for s in found)
    unfreed = sum(s.unfreed_blocks for s in found)
    return f"{len(found)} hosts: {said}; {held} of {total} blocks held, {unfreed} unfreed"


def _of_host(host: HostContexts) -> Iterator[Conclusion]:
    if host.snapshot is None:
        yield Conclusion(
            "no_answer", host.host, host.error or "no snapshot", "if it stays so, look at 'orchestrator events'"
        )
        return
    for check in (_unfreed, _small_pool, _disk, _waiting, _thrash, _small_batches, _length):
        found = check(host.snapshot)
        if found is not None:
            kind, said, fix = found
            yield Conclusion(kind, host.host, said, fix)


Found = tuple[Kind, str, str] | None


def _unfreed(snapshot: EngineSnapshot) -> Found:
    if not snapshot.unfreed_blocks:
        return None
    said = f"{snapshot.unfreed_blocks} of {snapshot.pool.total} blocks are held, and no live context explains it"
    return "unfreed", said, "a bug: keep 'orchestrator contexts --json', then unload and load the model"


def _small_pool(snapshot: EngineSnapshot) -> Found:
    tokens = snapshot.pool.total * snapshot.limits.block_size
    if tokens >= snapshot.limits.max_model_len:
        return None
    said = (
        f"its KV pool holds {tokens} tokens, its window is {snapshot.limits.max_model_len}: longer requests are refused"
    )
    return "small_pool", said, "raise the model's memory, or lower max_model_len or kv_host"


def _disk(snapshot: EngineSnapshot) -> Found:
    disk = snapshot.disk
    if disk.problem:
        return (
            "disk",
            f"KV on disk is out of use: {disk.problem}",
            "see to that directory; KV is computed again meanwhile",
        )
    if disk.dropped <= max(disk.written, ENDED_ENOUGH):
        return None
    said = f"{disk.dropped} blocks of KV were not written to disk in time, {disk.written} were"
    return "disk", said, "a faster disk for kv_disk.directory, or more kv_host"


def _waiting(snapshot: EngineSnapshot) -> Found:
    waiting = [context for context in snapshot.contexts if context.wait is not None]
    oldest = max((context.state_seconds for context in waiting), default=0.0)
    crowd = len(waiting) > snapshot.max_running and oldest >= CROWD_SECONDS
    if not waiting or not (crowd or oldest >= PILE_SECONDS):
        return None
    first = waiting[0].wait
    assert first is not None
    wanted = sum(context.wait.blocks_wanted for context in waiting if context.wait)
    said = (
        f"{len(waiting)} wait, the oldest for {oldest:.1f} s; they want {wanted} blocks, {first.blocks_free} are free, "
        f"{first.blocks_promised} of them promised; the first waits for {first.said}"
    )
    fix = "lower max_tokens, raise the model's memory, or add replicas"
    if first.reason == "batch_full":
        fix = f"raise max_running ({snapshot.limits.max_running})"
        if snapshot.max_running < snapshot.limits.max_running:  # a token each must fit into a step
            fix = f"raise step_tokens ({snapshot.limits.step_tokens})"
        if first.blocks_wanted > first.blocks_free - first.blocks_promised:  # more places alone would be empty
            fix += " and the model's memory"
        fix += ", or add replicas"
    return "waiting", said, fix


def _thrash(snapshot: EngineSnapshot) -> Found:
    hurt = [context for context in snapshot.contexts if _thrashes(context, snapshot.limits.block_size)]
    if not hurt:
        return None
    worst = max(hurt, key=lambda context: context.preemptions)
    said = (
        f"{len(hurt)} contexts were preempted {THRASH_PREEMPTIONS} times or more and hardly came on; the worst, "
        f"{worst.request_id}: {worst.preemptions} times for {worst.generated_tokens} tokens, "
        f"{worst.recomputed_tokens} recomputed; {snapshot.pool.total} blocks for {snapshot.max_running} at once"
    )
    return "thrash", said, "lower max_running, or raise the model's memory or kv_host"


def _thrashes(context: ContextSnapshot, block_size: int) -> bool:
    """Often preempted, and each time for less than a block of tokens, or for less than was lost by it."""
    made = context.generated_tokens
    small = made < context.preemptions * block_size or made < context.recomputed_tokens
    return context.preemptions >= THRASH_PREEMPTIONS and small


def _small_batches(snapshot: EngineSnapshot) -> Found:
    waiting = [context.wait for context in snapshot.contexts if context.wait is not None]
    running = sum(context.state is ContextState.RUNNING for context in snapshot.contexts)
    if len(waiting) < SMALL_WAITING or running * 2 > snapshot.max_running:
        return None
    first = waiting[0]
    if first.blocks_wanted > first.blocks_free:
        return None
    said = (
        f"{running} of {snapshot.max_running} run while {len(waiting)} wait and {first.blocks_free} blocks are free, "
        f"{first.blocks_promised} of them promised; the first wants {first.blocks_wanted}"
    )
    fix = f"raise step_tokens ({snapshot.limits.step_tokens}): prompts take all of it"
    if first.reason == "blocks":
        fix = f"lower max_tokens: room is kept for {EXPECTED_SHARE:.0%} of it, and the answers do not use it"
    return "small_batches", said, fix


def _length(snapshot: EngineSnapshot) -> Found:
    ended = Counter(one.how for one in snapshot.ended)
    if len(snapshot.ended) < ENDED_ENOUGH or 2 * ended["length"] <= len(snapshot.ended):
        return None
    tokens = sorted(one.generated_tokens for one in snapshot.ended if one.how == "length")
    others = ", ".join(f"{count} {how}" for how, count in ended.most_common() if how != "length")
    said = (
        f"{ended['length']} of the last {len(snapshot.ended)} answers were cut by max_tokens, half of them at "
        f"{tokens[len(tokens) // 2]} tokens or fewer" + (f" ({others})" if others else "")
    )
    return "length", said, "raise max_tokens, or the model's default_max_tokens"
