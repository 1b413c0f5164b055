"""Residency scenarios about bytes: who waits for them, who is refused, what a load measures beside another one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engine.protocol import EngineLimits, Output
from model_pool import host as host_module
from model_pool.effects import HostRef
from model_pool.host import EngineHost
from model_pool.host_words import HostPicture, HostSpec
from policies.errors import DoesNotFit, EngineError, HostUnavailable, LoadFailed, ModelDoesNotFit, ModelLoading
from policies.types import ModelState
from tests.engine_helpers import request
from tests.unit.fake_effects import World

S = ModelState

BREAKS = {
    "test_R08": ("model_pool/pool.py", "if waited >= limit:", "if False:"),
    "test_R17": (
        "model_pool/lifecycle.py",
        "for ticket in self._desk.queue(slot.name, now):\n            self.place",
        "for ticket in self._desk.queue(slot.name, now)[:1]:\n            self.place",
    ),
    "test_R25": (
        "engine/memory.py",
        'return fields["RssAnon"] + fields["RssShmem"]',
        "import psutil; return sum(p.memory_info().rss for p in psutil.Process().parent().children())",
    ),
    "test_R26": (
        "engine/memory.py",
        'return fields["RssAnon"] + fields["RssShmem"]',
        "import psutil; return sum(p.memory_info().rss for p in psutil.Process().parent().children())",
    ),
    "test_R28": (
        "model_pool/lifecycle.py",
        "self._move(slot, _S.UNLOADING, reason, now)",
        "self._move(slot, _S.UNLOADING, reason, now); self._ledger.release(slot.ref.name)",
    ),
    "test_R28_a_failed_load": (
        "model_pool/lifecycle.py",
        "if not waking:\n            self.ask_unload",
        "if not waking:\n            self._ledger.release(slot.ref.name)\n            self.ask_unload",
    ),
    "test_R29_bytes": ("model_pool/ledger.py", "self._budgets[device] - self._held[device]", "self._budgets[device]"),
    "test_R29_a_load": (
        "model_pool/lifecycle.py",
        "self.fail(slot, error, now, gone=True)\n            return",
        "pass",
    ),
    "test_R29_a_real": (
        "engine/loader.py",
        "blocks = min(spare // block_bytes, wanted)",
        "blocks = max(2, min(spare // block_bytes, wanted))",
    ),
    "test_R44_a_real": ("engine/canary.py", "if said != known[-1]:", "if False:"),
}
PROMPT = (5, 9, 200, 31, 77, 12, 45)


# -- the pool's core: a recording fake, and a clock moved by hand ---------------------------------


def test_R08_a_host_that_never_answers_fails_at_its_limit_and_frees_its_bytes() -> None:
    world = World({"a": 80, "b": 80})
    world.demand("a1", "a")
    world.demand("b1", "b")
    world.tick(99.0)
    assert not world.effects.rejected and world.effects.verbs("b") == []
    world.tick(1.0)
    error = world.error("a1")
    assert isinstance(error, LoadFailed) and error.retry_after_seconds == 8.0
    assert "loading a failed after 100.0 s: no answer, limit 100.0 s" in error.message
    assert world.effects.verbs("a") == ["start", "unload"] and world.effects.verbs("b") == []
    world.answer("unload", "a")
    world.answer("start", "b")
    assert world.placed_on("b1").model == "b"


@pytest.mark.parametrize("before", [9, 4, 0])
def test_R17_a_long_job_and_nine_more_cost_one_swap_each_way_and_not_one_per_job(before: int) -> None:
    """What came before b's request is served first, what came after it waits for b: one swap there, one back."""
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    begun = len(world.effects.calls)
    jobs = [f"a{number}" for number in range(9)]
    world.pool.on_report(world.ref("a"), world.report("a", S.READY, in_flight=1), world.now)  # twenty minutes long
    for job in jobs[:before]:
        world.demand(job, "a")
    world.demand("b1", "b")
    for job in jobs[before:]:
        world.demand(job, "a")
    for job in jobs[:before]:
        world.pool.on_redeemed(job, world.now)
    for _ in range(20):
        world.tick(60.0)
    assert [call.verb for call in world.effects.calls[begun:]] == ["drain"], "nothing moves before the last job's end"
    world.answer("drain", "a")
    world.run()
    assert world.placed_on("b1").model == "b"
    world.pool.on_redeemed("b1", world.now)
    world.pool.on_report(world.ref("b"), world.report("b", S.READY), world.now)
    world.tick(1.0)
    world.run()
    assert all(world.placed_on(job).model == "a" for job in jobs)
    swaps = [(call.ref.model, call.verb) for call in world.effects.calls[begun:]]
    there = [("a", "drain"), ("a", "sleep"), ("b", "start")]
    back = [("b", "drain"), ("b", "sleep"), ("a", "wake")]
    assert swaps == there + (back if before < 9 else [])


def test_R28_the_next_load_waits_until_the_bytes_are_measured_free() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    world.pool.ask_unload("a", world.now)
    world.answer("drain", "a")
    world.demand("b1", "b")
    for _ in range(5):
        assert (world.state("a"), world.held(), world.effects.verbs("b")) == (S.UNLOADING, 80, [])
        world.tick(30.0)
    assert world.effects.verbs("a").count("unload") > 1  # not heard of: asked again
    world.answer("unload", "a")
    assert (world.state("a"), world.effects.verbs("b")) == (S.COLD, ["start"])


def test_R28_a_failed_load_keeps_its_bytes_until_its_process_is_gone() -> None:
    world = World({"a": 80, "b": 80})
    world.demand("a1", "a")
    world.demand("b1", "b")
    world.fail("start", "a")
    world.tick(30.0)
    assert (world.held(), world.effects.verbs("b")) == (80, [])
    world.answer("unload", "a")
    assert world.effects.verbs("b") == ["start"]


def test_R29_bytes_that_come_back_late_are_waited_for_and_nothing_is_put_where_it_does_not_fit() -> None:
    world = World({"a": 80, "b": 80}, {"d0": 100, "d1": 50})
    world.bring_up("a")
    world.pool.ask_unload("a", world.now)
    world.answer("drain", "a")
    world.demand("b1", "b", deadline=15.0)
    world.tick(15.0)
    assert world.effects.verbs("b") == [], "a part of it on d0, or all of it on d1"
    error = world.error("b1")
    assert isinstance(error, ModelLoading)
    assert "needs 80 bytes, 20 bytes free on d0, 50 bytes free on d1" in error.message
    world.demand("b2", "b")
    world.answer("unload", "a")
    assert [(call.verb, call.device) for call in world.effects.calls if call.ref.model == "b"] == [("start", "d0")]


def test_R29_a_load_that_turns_out_larger_than_the_device_is_refused_with_the_numbers() -> None:
    world = World({"a": 80, "huge": 101})
    world.demand("h", "huge")
    assert isinstance(world.error("h"), ModelDoesNotFit)
    assert "huge needs 101 bytes, the largest device has a budget of 100" in world.error("h").message
    world.sizes["a"] = 130
    world.demand("a1", "a")
    world.answer("start", "a")
    assert "a1" not in world.effects.resolved
    assert isinstance(world.error("a1"), LoadFailed)
    assert "asks for 130 bytes on d0: budget 100" in world.error("a1").message
    assert world.effects.verbs() == ["start", "unload"]


# -- a real small model, in the host's class without Ray ----------------------------------------------


@pytest.fixture
def path(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def _host(path: Path, memory_bytes: int, epoch: int = 1) -> EngineHost:
    limits = EngineLimits(max_model_len=64, max_running=4)
    return EngineHost(HostSpec(HostRef("llama", 0, epoch), str(path), memory_bytes, limits))


async def test_R29_a_real_model_that_does_not_fit_is_refused_with_the_numbers(path: Path) -> None:
    answer = await _host(path, 40 * 2**20).load()
    assert isinstance(answer, DoesNotFit)
    assert f"memory_bytes {40 * 2**20} − weights " in answer.message
    assert "bytes for KV; two blocks need" in answer.message and "Raise memory_bytes" in answer.message


async def test_R44_a_real_model_that_wakes_with_other_weights_answers_nobody_and_a_cold_one_answers_as_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "SILENCE_SECONDS", 10_000.0)
    host = _host(path, 4 * 2**30)
    assert isinstance(await host.load(), HostPicture)
    outputs = host.open("gateway")
    before = await _answer(host, outputs, "before")
    assert await host.drain(()) is None
    assert isinstance(await host.sleep(), HostPicture)
    _garble(host)
    error = await host.wake()
    assert isinstance(error, EngineError) and "canary answered" in error.message
    picture = await host.picture()
    assert (picture.report.state, picture.cause) == (S.QUARANTINED, error)
    assert isinstance(await host.submit("gateway", request("after", PROMPT), None), HostUnavailable)
    assert isinstance(await host.wake(), HostUnavailable)

    world = World({"llama": 80})  # what the pool makes of it
    world.put_asleep("llama")
    world.demand("t", "llama")
    world.quarantine("llama", error.message)
    world.answer("unload", "llama")
    assert world.state("llama") is S.LOADING and "t" not in world.effects.resolved
    cold = _host(path, 4 * 2**30, epoch=2)
    assert isinstance(await cold.load(), HostPicture)
    assert await _answer(cold, cold.open("gateway"), "again") == before


async def _answer(host: EngineHost, outputs: AsyncIterator[list[Output]], name: str) -> tuple[int, ...]:
    """The tokens of one generation."""
    await anext(outputs)
    assert await host.submit("gateway", request(name, PROMPT, 8, ignore_eos=True), None) is None
    tokens: list[int] = []
    async for batch in outputs:
        for output in batch:
            assert output.error is None
            tokens += output.token_ids
            if output.final:
                break
        else:
            continue
        break
    assert len(tokens) == 8
    return tuple(tokens)


def _garble(host: EngineHost) -> None:
    """The next wake brings back other weights than the load did."""
    import torch

    from engine.linear import PackedLinear, reordered
    from engine.torch_engine import TorchEngine
    from engine.weights import Arena

    engine = host._engine
    assert isinstance(engine, TorchEngine)
    wake = engine._weights.wake

    def garbled() -> None:
        wake()
        for module in engine._runner.model.modules():
            if isinstance(module, PackedLinear):
                module.pack(reordered(module.dense() * -1.3))
        for store in engine._weights._stores:
            if isinstance(store, Arena):
                store.bytes.view(torch.float32).mul_(-1.3)

    engine._weights.wake = garbled  # type: ignore[method-assign]


# -- two loads at once, each in a process of its own ----------------------------------------------------

MEMORY_BYTES = 900 * 2**20
SAME_SHARE = 0.03  # of the KV pool: what a process holds differs a little from run to run

LOADER = """
    import sys
    from pathlib import Path

    from engine import loader
    from engine.protocol import EngineLimits
    from engine.torch_engine import TorchEngine

    engine = TorchEngine(Path(sys.argv[1]), int(sys.argv[2]), EngineLimits(512, max_running=8192))
    peak_of, peaks = loader.machine.peak_of, []

    def paused(step):
        peaks.append(peak_of(step))
        if len(peaks) == 1:  # half of what a load measures is measured: now others may begin or go
            print("profiling", flush=True)
            sys.stdin.readline()
        return peaks[-1]

    loader.machine.peak_of = paused
    print("imported", flush=True)
    for line in sys.stdin:
        if line.strip() == "load":
            report = engine.load()
            engine.warm()
            print(report.kv_bytes, flush=True)
        elif line.strip() == "sleep":
            engine.sleep()
            print("asleep", flush=True)
"""


class Loading:
    """A process that loads one engine, step by step as it is told."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", textwrap.dedent(LOADER), str(path), str(MEMORY_BYTES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self) -> None:
        """Until it is in the midst of measuring."""
        assert self.hear() == "imported"
        self.tell("load")

    def finish(self) -> int:
        """To the end of the load; the bytes of its KV pool."""
        self.tell("go on")
        return int(json.loads(self.hear()))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def first(tiny_models: dict[str, Path]) -> Iterator[tuple[Loading, int]]:
    """An engine that is up, and the KV bytes that it got, alone."""
    loading = Loading(tiny_models["llama"])
    loading.begin()
    assert loading.hear() == "profiling"
    yield loading, loading.finish()
    loading.end()


def test_R25_two_loads_at_once_get_the_kv_each_gets_alone(path: Path, first: tuple[Loading, int]) -> None:
    _, alone = first
    assert 50 * 2**20 < alone < MEMORY_BYTES, "bounded by memory, not by what the model could use"
    pair = [Loading(path), Loading(path)]
    try:
        for loading in pair:
            loading.begin()
        assert [loading.hear() for loading in pair] == ["profiling", "profiling"]  # both are in the midst of it
        got = [loading.finish() for loading in pair]
    finally:
        for loading in pair:
            loading.end()
    assert got == pytest.approx([alone, alone], rel=SAME_SHARE)


def test_R26_a_neighbour_that_falls_asleep_while_a_load_measures_changes_nothing(
    path: Path, first: tuple[Loading, int]
) -> None:
    neighbour, alone = first
    loading = Loading(path)
    try:
        loading.begin()
        assert loading.hear() == "profiling"
        neighbour.tell("sleep")
        assert neighbour.hear() == "asleep"
        got = loading.finish()
    finally:
        loading.end()
    assert got == pytest.approx(alone, rel=SAME_SHARE)
