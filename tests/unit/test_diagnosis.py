"""What is concluded from snapshots: each conclusion with its numbers, and none where all is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.blocks import Books
from engine.protocol import DiskStats, EngineLimits
from engine.snapshot import ContextSnapshot, EndedContext, EngineSnapshot, Wait, WaitReason
from engine.tiers import HostBooks
from orchestrator.contexts import HostContexts
from orchestrator.diagnosis import Conclusion, conclude, summary
from policies.types import ContextState


def context(number: int, **fields: Any) -> ContextSnapshot:
    base = ContextSnapshot(
        context_id=number, request_id=f"r{number}", generation=0, session=None, tenant="acme", tier="standard",
        state=ContextState.RUNNING, prompt_tokens=32, tokens=80, computed_tokens=79, cached_tokens=0,
        recomputed_tokens=0, generated_tokens=48, max_token_limit=132, blocks_held=5, blocks_shared=0,
        memory_bytes=5, estimated_memory_bytes=9, preemptions=0, age_seconds=3.0, state_seconds=3.0,
        seconds_in={"running": 3.0}, edges=(), wait=None,
    )  # fmt: skip
    return replace(base, **fields)


def waiting(
    number: int, position: int = 1, *, reason: WaitReason = "blocks", seconds: float = 30.0, wanted: int = 9,
    free: int = 4, promised: int = 3,
) -> ContextSnapshot:  # fmt: skip
    wait = Wait(position, reason, wanted, free, promised, f"{wanted} blocks")
    return context(number, state=ContextState.WAITING, blocks_held=0, state_seconds=seconds, wait=wait)


def on_disk(**fields: Any) -> HostContexts:
    found = host()
    assert found.snapshot is not None
    return replace(found, snapshot=replace(found.snapshot, disk=DiskStats(**fields)))


def host(*contexts: ContextSnapshot, ended: tuple[EndedContext, ...] = (), unfreed: int = 0) -> HostContexts:
    held = sum(one.blocks_held for one in contexts)
    limits = EngineLimits(max_model_len=256, max_running=8)
    snapshot = EngineSnapshot(
        at=100.0, wall=100.0, awake=True, limits=limits, max_running=8, block_bytes=1,
        pool=Books(64, 64 - held, 0, held, 0), host=HostBooks(0, 0, 0, 0),
        disk=DiskStats(), supply=(), states={}, contexts=contexts, blocks=(),
        unfreed_blocks=unfreed, ended=ended,
    )  # fmt: skip
    return HostContexts("m", "host:m:0", "ready", snapshot, None)


def ended(how: Any, count: int, tokens: int = 16) -> tuple[EndedContext, ...]:
    one = EndedContext(1, "r", 0, None, "acme", 1.0, how, "test", 32, tokens, 0)
    return (one,) * count


def only(*hosts: HostContexts) -> Conclusion:
    (found,) = conclude(hosts)
    return found


WELL = [
    host(),
    host(*(context(number) for number in range(8))),
    host(context(1), waiting(2, seconds=9.9)),
    host(*(context(n) for n in range(5)), *(waiting(10 + n, n + 1, seconds=0.9, free=20) for n in range(9))),
    host(context(1, preemptions=3, generated_tokens=48)),  # a block of tokens for each preemption
    host(context(1, preemptions=2, generated_tokens=0, recomputed_tokens=999)),
    host(context(1), *(waiting(10 + n, n + 1, seconds=0.5, wanted=5, free=4) for n in range(4))),
    host(ended=ended("length", 7)),
    host(ended=ended("length", 8) + ended("eos", 8)),
    HostContexts("m", "host:m:0", "sleeping", host().snapshot, None),
]


@pytest.mark.parametrize("good", WELL)
def test_nothing_is_concluded_where_all_is_well(good: HostContexts) -> None:
    assert conclude([good]) == []


def test_a_host_that_does_not_answer_is_said() -> None:
    found = only(HostContexts("m", "host:m:0", "ready", None, "host:m:0 did not answer within 2 s"))
    assert (found.kind, found.host, found.said) == ("no_answer", "host:m:0", "host:m:0 did not answer within 2 s")


def test_unfreed_blocks_are_said() -> None:
    found = only(host(unfreed=3))
    assert found.kind == "unfreed"
    assert found.said == "3 of 64 blocks are held, and no live context explains it"


def test_a_pile_of_waiting_ones_is_said_with_what_they_want() -> None:
    found = only(host(*(context(n) for n in range(5)), waiting(10, 1, seconds=12.0), waiting(11, 2, wanted=7)))
    assert found.kind == "waiting"
    assert found.said == (
        "2 wait, the oldest for 30.0 s; they want 16 blocks, 4 are free, 3 of them promised; "
        "the first waits for 9 blocks"
    )
    assert "memory" in found.fix


@pytest.mark.parametrize(
    ("free", "step_tokens", "fix"),
    [
        (12, 256, "raise max_running (8), or add replicas"),
        (11, 256, "raise max_running (8) and the model's memory, or add replicas"),
        (12, 6, "raise step_tokens (6), or add replicas"),
    ],
)
def test_a_full_batch_has_another_fix(free: int, step_tokens: int, fix: str) -> None:
    reasons: list[WaitReason] = ["batch_full", *["behind"] * 8]
    crowd = (waiting(10 + n, n + 1, reason=reason, seconds=1.5, free=free) for n, reason in enumerate(reasons))
    full = host(*(context(n) for n in range(8)), *crowd)
    assert full.snapshot is not None
    limits = replace(full.snapshot.limits, step_tokens=step_tokens)
    full = replace(full, snapshot=replace(full.snapshot, limits=limits, max_running=min(8, step_tokens)))
    found = only(full)
    assert (found.kind, found.said[:27]) == ("waiting", "9 wait, the oldest for 1.5 ")
    assert found.fix == fix


@pytest.mark.parametrize(
    "hurt",
    [
        {"preemptions": 4, "generated_tokens": 63, "recomputed_tokens": 10},  # less than a block for each
        {"preemptions": 3, "generated_tokens": 90, "recomputed_tokens": 200},  # less than was lost
    ],
)
def test_contexts_that_are_preempted_again_and_again_are_said(hurt: dict[str, int]) -> None:
    found = only(host(context(1, **hurt), context(2)))
    assert found.kind == "thrash"
    assert found.said.startswith("1 contexts were preempted 3 times or more")
    assert f"r1: {hurt['preemptions']} times for {hurt['generated_tokens']} tokens" in found.said
    assert f"{hurt['recomputed_tokens']} recomputed" in found.said


@pytest.mark.parametrize(("reason", "fix"), [("blocks", "lower max_tokens"), ("next_step", "raise step_tokens (256)")])
def test_small_batches_with_free_blocks_are_said(reason: WaitReason, fix: str) -> None:
    queue = (waiting(10 + n, n + 1, reason=reason, seconds=0.5, wanted=9, free=40, promised=35) for n in range(4))
    found = only(host(context(1), context(2), *queue))
    assert found.kind == "small_batches"
    assert found.said == (
        "2 of 8 run while 4 wait and 40 blocks are free, 35 of them promised; the first wants 9"
    )  # fmt: skip
    assert fix in found.fix


def test_answers_that_are_cut_by_max_tokens_are_said() -> None:
    found = only(host(ended=ended("length", 3, 16) + ended("length", 6, 32) + ended("eos", 7)))
    assert found.kind == "length"
    assert found.said == (
        "9 of the last 16 answers were cut by max_tokens, half of them at 32 tokens or fewer (7 eos)"
    )  # fmt: skip


def test_every_host_is_looked_at_and_all_of_one_host_is_said() -> None:
    bad = host(waiting(1), unfreed=1)
    found = conclude([host(), bad, HostContexts("n", "host:n:0", "ready", None, "gone")])
    assert [(one.kind, one.host) for one in found] == [
        ("unfreed", "host:m:0"), ("waiting", "host:m:0"), ("no_answer", "host:n:0")
    ]  # fmt: skip


def test_the_summary_adds_up_all_hosts() -> None:
    hosts = [host(context(1), waiting(2)), host(context(3)), HostContexts("n", "host:n:0", "cold", None, "cold")]
    assert summary(hosts) == "2 hosts: 2 running, 1 waiting; 10 of 128 blocks held, 0 unfreed"
    assert summary([host()]) == "1 hosts: no context lives; 0 of 64 blocks held, 0 unfreed"


def test_a_disk_that_is_out_of_use_or_too_slow_is_named() -> None:
    full = only(on_disk(capacity_bytes=10, problem="no space left on device"))
    assert full.kind == "disk" and "no space left" in full.said
    slow = only(on_disk(capacity_bytes=10, written=20, dropped=300))
    assert slow.kind == "disk" and "300 blocks" in slow.said
    assert conclude([on_disk(capacity_bytes=10, written=300, dropped=20)]) == []


def test_a_pool_smaller_than_the_window_is_named() -> None:
    found = host()
    assert found.snapshot is not None
    limits = replace(found.snapshot.limits, max_model_len=4096)
    small = only(replace(found, snapshot=replace(found.snapshot, limits=limits)))
    assert small.kind == "small_pool" and "1024 tokens" in small.said and "4096" in small.said
