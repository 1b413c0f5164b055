"""Owns every metric: name, unit and labels, once. Labels are bounded: configured names, never a session or a key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from engine.protocol import EngineStats
from orchestrator.aggregator import Collected, Family

if TYPE_CHECKING:
    from orchestrator.pool_words import PoolPicture

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GatewayMetrics:
    """What one gateway saw."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "orchestrator_requests", "HTTP requests answered", ("route", "status"), registry=self.registry
        )
        self.ttft_seconds = Histogram(
            "orchestrator_time_to_first_token_seconds",
            "From arrival to the first token; start says whether the model had to be brought in first",
            ("model", "start"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "orchestrator_queue_wait_seconds",
            "From arrival to the first scheduled chunk, without waiting for the model",
            ("model", "tenant"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "orchestrator_prompt_tokens", "Prompt tokens of finished turns", ("model", "tenant"), registry=self.registry
        )
        self.cached_tokens = Counter(
            "orchestrator_cached_prompt_tokens",
            "Prompt tokens whose KV was reused; over prompt tokens it is the reuse ratio",
            ("model", "tenant"),
            registry=self.registry,
        )
        self.completion_tokens = Counter(
            "orchestrator_completion_tokens", "Generated tokens", ("model", "tenant"), registry=self.registry
        )
        self.truncated_turns = Counter(
            "orchestrator_truncated_turns", "Turns whose prompt was cut", ("model",), registry=self.registry
        )
        self.spills = Counter(
            "orchestrator_routing_spills",
            "Requests that did not go to their session's own host, because it was too loaded",
            ("model",),
            registry=self.registry,
        )
        self.store_seconds = Histogram(
            "orchestrator_store_round_trip_seconds",
            "A round trip to Redis; two of them are in every turn",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.running = Gauge("orchestrator_turns_running", "Turns in this gateway now", registry=self.registry)


class ControllerMetrics:
    """What the controller counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("model", "kind")
        self.switches = Counter(
            "orchestrator_switches", "Loads and wakes that ended well", labels, registry=self.registry
        )
        self.switch_seconds = Counter(
            "orchestrator_switch_seconds", "Seconds they took", labels, registry=self.registry
        )


def expose(families: Iterable[Family], pool: PoolPicture | None) -> bytes:
    """The Prometheus text: what all gateways and the controller counted, and the pool as it is now."""
    registry = CollectorRegistry()
    registry.register(Collected(families))
    if pool is not None:
        registry.register(_PoolCollector(pool))
    return generate_latest(registry)


KV_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("orchestrator_kv_blocks_used", "KV blocks held by generations", lambda stats: stats.kv_blocks_used),
    ("orchestrator_kv_blocks_cached", "Free KV blocks holding reusable KV", lambda stats: stats.kv_blocks_cached),
    ("orchestrator_kv_blocks_pinned", "Of them: pinned", lambda stats: stats.kv_blocks_pinned),
    ("orchestrator_kv_blocks", "KV blocks of a host's pool", lambda stats: stats.kv_blocks_total),
    ("orchestrator_kv_host_blocks_used", "KV blocks in host memory", lambda stats: stats.kv_host_blocks_used),
    ("orchestrator_kv_host_blocks", "KV blocks host memory has room for", lambda stats: stats.kv_host_blocks_total),
    ("orchestrator_kv_disk_bytes", "KV on the node's disk, of all models", lambda stats: stats.kv_disk.used_bytes),
    ("orchestrator_kv_disk_written", "KV blocks a host wrote to disk", lambda stats: stats.kv_disk.written),
    ("orchestrator_kv_disk_fetched", "KV blocks a host read from disk", lambda stats: stats.kv_disk.fetched),
    ("orchestrator_kv_disk_missed", "KV blocks not found on disk, or damaged", lambda stats: stats.kv_disk.missed),
    (
        "orchestrator_kv_disk_out_of_use",
        "1 while a host cannot use the disk",
        lambda stats: bool(stats.kv_disk.problem),
    ),
)


class _PoolCollector:
    """The controller's picture as metrics."""

    def __init__(self, pool: PoolPicture) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """One family after the other; ``host`` is the number of a model's host."""
        host = ["model", "host"]
        state = GaugeMetricFamily(
            "orchestrator_model_state", "1 for the state a host is in", labels=["model", "host", "state"]
        )
        memory = GaugeMetricFamily("orchestrator_model_memory_bytes", "Device bytes a host holds", labels=host)
        waiting = GaugeMetricFamily("orchestrator_model_waiting", "Requests waiting for a model", labels=["model"])
        kv = [(GaugeMetricFamily(name, text, labels=host), read) for name, text, read in KV_GAUGES]
        for entry in self._pool.models:
            labels = [entry.status.model, str(entry.number)]
            state.add_metric([*labels, str(entry.status.state)], 1)
            memory.add_metric(labels, entry.status.memory_bytes)
            if entry.number == 0:
                waiting.add_metric(labels[:1], entry.status.waiting)
            if entry.host is not None:
                for family, read in kv:
                    family.add_metric(labels, read(entry.host.stats))
        yield from (state, memory, waiting, *(family for family, _ in kv))
        for kind in ("budget", "held", "free"):
            device = GaugeMetricFamily(f"orchestrator_device_{kind}_bytes", "The ledger", labels=["device"])
            for book in self._pool.books:
                device.add_metric([book.device], getattr(book, f"{kind}_bytes"))
            yield device
