"""Owns ``bench engine``'s sections: our engine against its peers on the same model, prompts and machine, in one run.

Peers are measured in turns with ours, each in a process of its own, with the better of one thread and all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.bench.report import Section, section
from orchestrator.bench.service import Say
from orchestrator.bench.workers import LOADS, Worker

PAIRS = 3
DECODE_PEERS = ("continuous", "padded")
MIXED_PEERS = ("continuous", "padded", "one_by_one")


def run(path: Path, say: Say, *, pairs: int = PAIRS) -> list[Section]:
    """All sections that need no service, for the model in ``path``; ``say`` is told what is being measured."""
    sections = []
    with _workers(path) as worker:
        for name, load, peers, target in (
            ("throughput_decode", "decode", DECODE_PEERS, ">=1.2"),
            ("throughput_mixed", "mixed", MIXED_PEERS, ">=1.3"),
        ):
            say(f"{name}: which of {', '.join(peers)} is the best")
            rates = {peer: worker(peer).measure(load).tokens_per_second for peer in peers}
            best = max(peers, key=lambda peer: rates[peer])
            worker("ours").measure(load)  # the first run of a shape is everybody's slowest; the peers have had theirs
            others = ", ".join(f"{peer} {rate:.1f}" for peer, rate in rates.items())
            limit = f"float32 matrix products of few rows; all peers, once each: {others} tokens/s"
            sections.append(_against(name, best, load, worker, say, pairs, f"transformers {best}", target, limit))
            limit = "attention, norms, rotary and sampling, which the floor leaves out"
            worker("floor").measure(load)
            sections.append(_against(f"{name}_floor", "floor", load, worker, say, pairs, FLOOR, "", limit))
    return sections


FLOOR = "the same matrix products in their fastest form, and nothing else"


def _against(
    name: str,
    peer: str,
    load: str,
    worker: Callable[[str], Worker],
    say: Say,
    pairs: int,
    baseline_name: str,
    target: str,
    limit: str,
) -> Section:
    """Tokens per second of ours ÷ the peer's, in turns."""
    samples = []
    for number in range(pairs):
        say(f"{name}: pair {number + 1} of {pairs}, {len(LOADS[load].prompts)} prompts")
        ours = worker("ours").measure(load).tokens_per_second
        samples.append((ours, worker(peer).measure(load).tokens_per_second))
    return section(name, samples, baseline_name, "tokens/s", target=target, limit=limit)


@contextlib.contextmanager
def _workers(path: Path) -> Iterator[Callable[[str], Worker]]:
    """Workers by name, started when first asked for."""
    started: dict[str, Worker] = {}

    def worker(who: str) -> Worker:
        if who not in started:
            started[who] = Worker(who, path)
        return started[who]

    try:
        yield worker
    finally:
        for each in started.values():
            each.close()
