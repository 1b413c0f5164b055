"""Owns ``/metrics`` over all gateways: each pushes what it counted, any of them serves the same sum.

A detached actor around ``Aggregator``. Counters of a gateway that died stay in the sums, so they never fall; its gauges
go with it. Pulling a scrape wakes nothing and touches no session.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import ray
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from ray.exceptions import RayError

from model_pool.host import NAMESPACE

LIVE_SECONDS = 10.0  # a gateway that has not pushed for this long shows no gauges any more
ANSWER_SECONDS = 3.0
NAME = "metrics"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of one source: plain data, as it travels."""

    name: str
    kind: str  # counter | gauge | histogram
    help: str
    samples: tuple[tuple[str, Labels, float], ...]  # sample name, labels, value


def snapshot(registry: CollectorRegistry) -> tuple[Family, ...]:
    """What a registry holds now. Creation times are left out: they would differ between replicas."""
    families = []
    for metric in registry.collect():
        samples = tuple(
            (sample.name, tuple(sorted(sample.labels.items())), sample.value)
            for sample in metric.samples
            if not sample.name.endswith("_created")
        )
        families.append(Family(metric.name, metric.type, metric.documentation, samples))
    return tuple(families)


class Aggregator:
    """The last snapshot of every source that ever pushed."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[float, tuple[Family, ...]]] = {}

    def push(self, source: str, families: tuple[Family, ...], now: float) -> None:
        """A source's counts so far; replaces what it pushed before."""
        self._sources[source] = (now, families)

    def total(self, now: float) -> tuple[Family, ...]:
        """Counters and histograms summed over all sources, gauges over the living ones."""
        sums: dict[str, dict[tuple[str, Labels], float]] = {}
        first: dict[str, Family] = {}
        for seen, families in self._sources.values():
            living = now - seen <= LIVE_SECONDS
            for family in families:
                first.setdefault(family.name, family)
                into = sums.setdefault(family.name, {})
                if living or family.kind != "gauge":
                    _add(into, family.samples)
        return tuple(
            Family(name, first[name].kind, first[name].help, tuple((*key, value) for key, value in into.items()))
            for name, into in sorted(sums.items())
        )


def _add(into: dict[tuple[str, Labels], float], samples: Iterable[tuple[str, Labels, float]]) -> None:
    for name, labels, value in samples:
        into[name, labels] = into.get((name, labels), 0.0) + value


class Collected:
    """Families as prometheus_client wants to collect them."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


async def push(source: str, registry: CollectorRegistry) -> None:
    """Send a source's counts to the aggregator; nothing is lost when it is away: the next push has all of it."""
    with contextlib.suppress(RayError, ValueError):
        actor = await asyncio.to_thread(ray.get_actor, NAME, NAMESPACE)
        await actor.push.remote(source, snapshot(registry))


async def exchange(source: str, registry: CollectorRegistry) -> tuple[Family, ...]:
    """Push, and the sums of all sources; only our own counts while the aggregator is away."""
    own = snapshot(registry)
    try:
        actor = await asyncio.to_thread(ray.get_actor, NAME, NAMESPACE)
        total: tuple[Family, ...] = await asyncio.wait_for(actor.exchange.remote(source, own), ANSWER_SECONDS)
    except (RayError, ValueError, TimeoutError):
        return own
    return total


def start_aggregator() -> None:
    """Start the actor if there is none; Ray restarts it whenever it dies."""
    ray.remote(MetricsActor).options(
        name=NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1
    ).remote()


class MetricsActor:
    """The Ray actor's class."""

    def __init__(self) -> None:
        self._aggregator = Aggregator()

    def push(self, source: str, families: tuple[Family, ...]) -> None:
        self._aggregator.push(source, families, time.monotonic())

    def exchange(self, source: str, families: tuple[Family, ...]) -> tuple[Family, ...]:
        """Push, then the total: what a scrape does."""
        self.push(source, families)
        return self._aggregator.total(time.monotonic())
