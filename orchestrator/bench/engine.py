"""Owns ``bench engine``'s sections: our engine against its peers on the same model, prompts and machine, in one run.

Peers are measured in turns with ours, each in a process of its own, with the better of one thread and all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrator.bench.report import Section, section
from orchestrator.bench.service import Say
from orchestrator.bench.workers import FLOOR, LOADS, Worker

DECODE_PEERS = ("continuous", "padded")
MIXED_PEERS = ("continuous", "padded", "one_by_one")
AGAINST_PEERS = (
    ("throughput_decode", "decode", DECODE_PEERS, ">=2.2"),
    ("throughput_mixed", "mixed", MIXED_PEERS, ">=1.3"),
)
AGAINST_FLOOR = (("decode", ""), ("mixed", "<=1.5"), ("long", "<=1.6"))  # load, target

Workers = Callable[[str], Worker]


def run(path: Path, shared: Path, say: Say, *, pairs: int) -> tuple[list[Section], str]:
    """All sections that need no service, for the model in ``path``; and the peer that decodes fastest.

    Args:
        shared: directory for compiled layers and for what engines keep for each other.
        say: is told what is being measured.
    """
    sections = []
    with _workers(path, shared) as worker:
        for name, load, peers, target in AGAINST_PEERS:
            say(f"{name}: which of {', '.join(peers)} is the best")
            rates = {peer: worker(peer).measure(load).tokens_per_second for peer in peers}
            best = max(peers, key=lambda peer: rates[peer])
            if load == "decode":
                fastest = best
            worker("ours").measure(load)  # the first run of a shape is everybody's slowest; the peers have had theirs
            others = ", ".join(f"{peer} {rate:.1f}" for peer, rate in rates.items())
            limit = f"float32 matrix products of few rows; all peers, once each: {others} tokens/s"
            samples = _rates(name, best, load, worker, say, pairs)
            sections.append(section(name, samples, f"transformers {best}", "tokens/s", target=target, limit=limit))
        for load, target in AGAINST_FLOOR:
            name = f"throughput_{load}_floor" if load != "long" else "throughput_long"
            worker("floor").measure(load)
            seconds = [(1 / ours, 1 / floor) for ours, floor in _rates(name, "floor", load, worker, say, pairs)]
            limit = "attention, norms, rotary and sampling, which the floor leaves out"
            sections.append(section(name, seconds, FLOOR, "s/token", target=target, limit=limit))
        sections.append(_compute_turns(worker, say, pairs))
    return sections, fastest


def _rates(name: str, peer: str, load: str, worker: Workers, say: Say, pairs: int) -> list[tuple[float, float]]:
    """Tokens per second of ours and the peer's, in turns."""
    samples = []
    for number in range(pairs):
        say(f"{name}: pair {number + 1} of {pairs}, {len(LOADS[load].prompts)} prompts")
        ours = worker("ours").measure(load).tokens_per_second
        samples.append((ours, worker(peer).measure(load).tokens_per_second))
    return samples


def _compute_turns(worker: Workers, say: Say, pairs: int) -> Section:
    """Two engines that share the cores, at once, against each alone."""
    samples = []
    engines = worker("ours"), worker("ours too")
    engines[1].measure("decode")
    for number in range(pairs):
        say(f"compute_turns: pair {number + 1} of {pairs}")
        alone = [engine.measure("decode").tokens_per_second for engine in engines]
        with ThreadPoolExecutor(2) as together:
            both = list(together.map(lambda engine: engine.measure("decode").tokens_per_second, engines))
        samples.append((sum(both), sum(alone) / 2))
    return section(
        "compute_turns",
        samples,
        "half of the sum of what each decodes alone",
        "tokens/s",
        target=">=0.9",
        limit="memory bandwidth: each computes with its share of the cores",
    )


@contextlib.contextmanager
def _workers(path: Path, shared: Path) -> Iterator[Workers]:
    """Workers by name, started when first asked for; further words in a name make another one of the kind."""
    started: dict[str, Worker] = {}

    def worker(who: str) -> Worker:
        if who not in started:
            started[who] = Worker(who.split(maxsplit=1)[0], path, shared)
        return started[who]

    try:
        yield worker
    finally:
        for each in started.values():
            each.close()
