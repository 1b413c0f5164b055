"""The sums that every gateway's /metrics shows."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from orchestrator.aggregator import LIVE_SECONDS, Aggregator, Collected, snapshot


class Source:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counter = Counter("turns", "Turns", ("model",), registry=self.registry)
        self.gauge = Gauge("running", "Running", registry=self.registry)
        self.histogram = Histogram("ttft_seconds", "TTFT", buckets=(1, 2), registry=self.registry)


def text(aggregator: Aggregator, now: float) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(Collected(aggregator.total(now)))  # type: ignore[arg-type]
    lines = generate_latest(registry).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_sums_over_gateways_and_never_falls_when_one_dies() -> None:
    aggregator, a, b = Aggregator(), Source(), Source()
    for source, count in ((a, 2), (b, 3)):
        source.counter.labels("m").inc(count)
        source.gauge.set(count)
        source.histogram.observe(1.5)
    aggregator.push("a", snapshot(a.registry), 0.0)
    aggregator.push("b", snapshot(b.registry), 0.0)
    both = text(aggregator, 1.0)
    assert both['turns_total{model="m"}'] == 5 and both["running"] == 5
    assert both['ttft_seconds_bucket{le="2.0"}'] == 2 == both["ttft_seconds_count"]
    later = LIVE_SECONDS + 1
    a.counter.labels("m").inc()
    aggregator.push("a", snapshot(a.registry), later)
    after = text(aggregator, later)
    assert after['turns_total{model="m"}'] == 6  # b's 3 stay
    assert after["running"] == 2  # b's gauge went with it


def test_pushing_again_replaces() -> None:
    aggregator, a = Aggregator(), Source()
    a.counter.labels("m").inc()
    for _ in range(5):
        aggregator.push("a", snapshot(a.registry), 0.0)
    assert text(aggregator, 0.0)['turns_total{model="m"}'] == 1
