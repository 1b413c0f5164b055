"""Owns ``bench engine``'s sections that go through HTTP: what the service adds to its engine, what a gateway costs."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from orchestrator.bench import matrix
from orchestrator.bench.drive import Access, Client
from orchestrator.bench.matrix import Ruler, Turn
from orchestrator.bench.report import Section, section
from orchestrator.bench.service import Say, own_service
from orchestrator.bench.workers import LOADS, Load, Measured, Worker
from policies.errors import OrchestratorError

KEY = "sk-bench"
REAL, FAKE = "real", "fake"
PROBE_WORDS = (8, 40)
STREAMS = 64
STREAM_TOKENS = 256
PROFILE_SECONDS = 5
TOP_ITEMS = 3


def run(path: Path, shared: Path, peer: str, say: Say, *, pairs: int) -> list[Section]:
    """All sections that go through a service of their own; ``peer``: the one that decodes fastest."""
    with tempfile.TemporaryDirectory(prefix="orchestrator-bench-") as directory:
        config = Path(directory) / "bench.yaml"
        config.write_text(yaml.safe_dump(_config(path, shared)))
        with own_service(config, say) as url:
            bare = Worker("ours", path, shared)  # after the service: both choose their threads on a quiet machine
            try:
                return asyncio.run(_sections(url, bare, lambda: Worker(peer, path, shared), say, pairs))
            finally:
                bare.close()


def _config(path: Path, shared: Path) -> dict[str, object]:
    real = {"name": REAL, "source": str(path), "memory": "3GiB", "max_model_len": 2048, "max_running": 8}
    fake = {"name": FAKE, "source": "fake", "memory": "256MiB", "max_running": STREAMS, "fake": {"step_seconds": 0.02}}
    return {
        "cache_dir": str(shared),
        "devices": [{"name": "cpu0", "memory": "4GiB"}],
        "models": [{**real, "preload": True}, {**fake, "preload": True}],
        "tenants": [{"name": "bench", "demo_key": KEY, "max_concurrent": 4 * STREAMS}],
    }


async def _sections(url: str, bare: Worker, start_peer: Callable[[], Worker], say: Say, pairs: int) -> list[Section]:
    async with Client(Access(url, KEY, "bench", None)) as client:
        ruler = await _ruler(client)
        many: list[tuple[Measured, Measured]] = []
        one: list[tuple[Measured, Measured]] = []
        for load, samples, count in (("decode", many, pairs), ("one", one, 2 * pairs + 1)):
            await _through_http(client, ruler, LOADS[load], f"{load} first")  # everybody's slowest
            bare.measure(load)
            for number in range(count):
                say(f"through HTTP, load {load}: pair {number + 1} of {count}")
                ours = await _through_http(client, ruler, LOADS[load], f"{load} {number}")
                samples.append((ours, bare.measure(load)))
        theirs = start_peer()
        try:
            against = await _against(client, ruler, theirs, say, pairs)
        finally:
            theirs.close()
        say(f"gateway, {STREAMS} streams of the fake engine")
        route = await _route_cost(client, url)
    return [
        section(
            "throughput_decode_http",
            against,
            f"transformers {theirs.who}, without HTTP",
            "tokens/s",
            target=">=2.2",
            limit="float32 matrix products of few rows, and what HTTP adds (http_overhead)",
        ),
        section(
            "http_overhead",
            [(ours.tokens_per_second, bare.tokens_per_second) for ours, bare in many],
            "the bare engine, the same load",
            "tokens/s",
            target=">=0.9",
            limit="gateway, Ray and the client share the cores with the engine",
        ),
        _ttft("http_ttft_1", one),
        _ttft("http_ttft_16", many),
        route,
    ]


async def _against(client: Client, ruler: Ruler, theirs: Worker, say: Say, pairs: int) -> list[tuple[float, float]]:
    """Tokens per second of ours through HTTP, and of the peer without."""
    samples = []
    theirs.measure("decode")  # it chooses its threads first, beside nobody
    for number in range(pairs):
        say(f"through HTTP against {theirs.who}: pair {number + 1} of {pairs}")
        ours = await _through_http(client, ruler, LOADS["decode"], f"peer {number}")
        samples.append((ours.tokens_per_second, theirs.measure("decode").tokens_per_second))
    return samples


def _ttft(name: str, samples: list[tuple[Measured, Measured]]) -> Section:
    pairs = [(ours.ttft_seconds or 0.0, bare.ttft_seconds or 0.0) for ours, bare in samples]
    added = statistics.median(ours - bare for ours, bare in pairs)
    return section(name, pairs, "the bare engine's first token", "s", limit=f"HTTP adds {added * 1000:.0f} ms")


async def _ruler(client: Client) -> Ruler:
    counts = []
    for words in PROBE_WORDS:
        turn = await client.turn(REAL, None, matrix.opening(f"probe {words}", words, True), 1)
        counts.append(_answered(turn).prompt_tokens)
    return matrix.ruler(list(zip(PROBE_WORDS, counts, strict=True)), None, True)


async def _through_http(client: Client, ruler: Ruler, load: Load, seed: str) -> Measured:
    """A load as ``workers`` defines it, every request a stateless streamed one, all sent at once."""
    begin = time.perf_counter()
    turns = await asyncio.gather(
        *(
            client.turn(REAL, None, matrix.opening(f"{seed} {index}", ruler.words(length), True), load.new)
            for index, length in enumerate(load.prompts)
        )
    )
    seconds = time.perf_counter() - begin
    first = [turn.ttft_seconds for turn in map(_answered, turns) if turn.ttft_seconds is not None]
    return Measured(sum(turn.completion_tokens for turn in turns) / seconds, statistics.median(first))


def _answered(turn: Turn) -> Turn:
    if turn.failure is not None:
        raise OrchestratorError(f"a request of the benchmark failed: {turn.failure.message}")
    return turn


# -- what a gateway costs -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routed:
    """One run of ``STREAMS`` streams at once."""

    cpu_seconds: float  # of the gateway's process, per 1,000 tokens
    wall_seconds: float  # per 1,000 tokens


async def _route_cost(client: Client, url: str) -> Section:
    async with httpx.AsyncClient() as http:
        pid = (await http.get(f"{url}/health")).json()["pid"]
    await _stream_all(client, pid, "first")
    runs = [await _stream_all(client, pid, f"run {number}") for number in range(3)]
    profile = asyncio.create_task(asyncio.to_thread(_largest_items, pid))
    number = 0
    while not profile.done():  # under the same load, but not in the figures: the profiler stops the process
        number += 1
        await _stream_all(client, pid, f"profiled {number}")
    return section(
        "route_cost",
        [(routed.cpu_seconds, routed.wall_seconds) for routed in runs],
        "wall seconds of the same tokens: the ratio is the share of a core",
        "CPU s/1,000 tokens",
        limit=f"{STREAMS} streams; {await profile}",
    )


async def _stream_all(client: Client, pid: int, seed: str) -> Routed:
    gateway = psutil.Process(pid)
    before, begin = gateway.cpu_times(), time.perf_counter()
    messages = [matrix.opening(f"{seed} {number}", 8, True) for number in range(STREAMS)]
    turns = await asyncio.gather(*(client.turn(FAKE, None, each, STREAM_TOKENS) for each in messages))
    thousands = sum(_answered(turn).completion_tokens for turn in turns) / 1000
    after = gateway.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    return Routed(cpu / thousands, (time.perf_counter() - begin) / thousands)


def _largest_items(pid: int) -> str:
    """The three largest items of a flame graph: where the gateway's samples end."""
    with tempfile.NamedTemporaryFile(suffix=".folded") as folded:
        tool = str(Path(sys.executable).parent / "py-spy")  # comes with Ray
        command = [tool, "record", "--pid", str(pid), "--duration", str(PROFILE_SECONDS), "--format", "raw", "--gil"]
        try:
            subprocess.run([*command, "--output", folded.name], capture_output=True, check=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            return f"no flame graph: py-spy: {words[-1]}"
        return largest(Path(folded.name).read_text())


def largest(folded: str) -> str:
    """The functions with most samples of their own in folded stacks (``a;b;c count`` a line)."""
    own: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        own[stack.rpartition(";")[2].partition(":")[0]] += int(count)
    total = own.total()
    return "largest: " + ", ".join(f"{name} {count / total:.0%}" for name, count in own.most_common(TOP_ITEMS))
