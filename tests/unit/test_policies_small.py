"""Ordering, admission, routing and the registry."""

from __future__ import annotations

import subprocess
import sys

import pytest

from policies.admission import admit, estimate_blocks
from policies.errors import ConfigError, HostUnavailable
from policies.ordering import tier_then_arrival
from policies.registry import RESIDENCY
from policies.residency import Lru
from policies.routing import Route, choose, pick
from policies.types import Tier


def test_tier_first_then_arrival() -> None:
    asked = [(Tier.BATCH, 0.0), (Tier.INTERACTIVE, 9.0), (Tier.STANDARD, 5.0), (Tier.INTERACTIVE, 8.0)]
    ordered = sorted(asked, key=lambda a: tier_then_arrival(*a, now=10.0))
    assert ordered == [(Tier.INTERACTIVE, 8.0), (Tier.INTERACTIVE, 9.0), (Tier.STANDARD, 5.0), (Tier.BATCH, 0.0)]


@pytest.mark.parametrize(("waited", "tier"), [(0, 2), (29.9, 2), (30, 1), (59.9, 1), (60, 0), (1e6, 0)])
def test_a_batch_request_moves_up_one_tier_per_ageing_time(waited: float, tier: int) -> None:
    assert tier_then_arrival(Tier.BATCH, 5.0, 5.0 + waited, aging_seconds=30.0) == (tier, 5.0)


def test_a_clock_that_stands_before_the_arrival_does_not_age() -> None:
    assert tier_then_arrival(Tier.STANDARD, 5.0, 0.0, aging_seconds=1.0) == (1, 5.0)


@pytest.mark.parametrize(
    ("prompt", "new", "factor", "blocks"),
    [(16, 16, 1.0, 2), (17, 16, 1.0, 3), (16, 160, 0.5, 6), (16, 160, 0.0, 1), (16, 16, 9.0, 2), (1, 1, 0.1, 1)],
)
def test_estimate(prompt: int, new: int, factor: float, blocks: int) -> None:
    assert estimate_blocks(prompt, new, block_size=16, safety_factor=factor) == blocks


def test_admits_only_what_will_not_be_preempted_soon() -> None:
    assert admit(10, needed_now=2, estimated_total=4, running_remaining=[3, 3])
    assert not admit(10, needed_now=2, estimated_total=5, running_remaining=[3, 3])
    assert not admit(1, needed_now=2, estimated_total=2, running_remaining=[])


def test_when_nothing_runs_what_fits_is_admitted() -> None:
    assert admit(10, needed_now=10, estimated_total=50)
    assert not admit(10, needed_now=10, estimated_total=50, running_remaining=[0])


def test_routing_is_the_same_in_every_process() -> None:
    hosts = [f"host:m:{i}" for i in range(5)]
    keys = [f"s{i}" for i in range(50)]
    program = f"from policies.routing import Route, choose, pick\nprint([pick({hosts}, k) for k in {keys}])"
    for seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        )
        assert answer.stdout.strip() == str([pick(hosts, key) for key in keys])


def test_routing_spreads_keys_and_moves_only_those_of_the_host_that_goes() -> None:
    hosts = [f"host:m:{i}" for i in range(4)]
    before = {f"s{i}": pick(hosts, f"s{i}") for i in range(1000)}
    assert all(150 < list(before.values()).count(name) < 350 for name in hosts)
    after = {key: pick(hosts[:-1], key) for key in before}
    assert all(after[key] == name for key, name in before.items() if name != hosts[-1])
    assert pick(hosts[::-1], "s1") == before["s1"]


def test_routing_without_hosts() -> None:
    with pytest.raises(HostUnavailable, match="0 hosts"):
        pick([], "s1")


def test_registry() -> None:
    assert isinstance(RESIDENCY.make("lru", aging_seconds=30.0), Lru)
    with pytest.raises(ConfigError, match=r"unknown residency policy 'lur': the 1 known are lru; did you mean 'lru'\?"):
        RESIDENCY.make("lur")
    with pytest.raises(ConfigError, match=r"known are lru$"):
        RESIDENCY.make("belady")


# --- routing with bounded load

HOSTS = [f"host:m:{n}" for n in range(3)]


def test_S52_scaling_from_3_to_4_hosts_moves_about_a_quarter() -> None:
    keys = [f"tenant/session-{n}" for n in range(2000)]
    more = [*HOSTS, "host:m:3"]
    moved = [key for key in keys if choose(HOSTS, key, {}).host != choose(more, key, {}).host]
    assert 0.2 < len(moved) / len(keys) < 0.3
    assert {choose(more, key, {}).host for key in moved} == {"host:m:3"}  # only to the new one


def test_S53_two_gateways_choose_the_same_host() -> None:
    assert all(choose(HOSTS, f"k{n}", {}) == choose(HOSTS[::-1], f"k{n}", {}) for n in range(200))


def test_an_owner_above_the_bound_is_skipped_and_the_spill_is_told() -> None:
    owner = choose(HOSTS, "hot", {}).host
    others = [host for host in HOSTS if host != owner]
    assert choose(HOSTS, "hot", {owner: 4, others[0]: 4, others[1]: 4}) == Route(owner, False)
    spilled = choose(HOSTS, "hot", {owner: 9, others[0]: 1, others[1]: 1})
    assert spilled.spilled and spilled.host in others


def test_S55_a_miss_goes_neither_always_to_the_same_nor_to_the_loaded_host() -> None:
    load = {HOSTS[0]: 50, HOSTS[1]: 0, HOSTS[2]: 0}
    chosen = {choose(HOSTS, f"new-{n}", load).host for n in range(50)}
    assert chosen == {HOSTS[1], HOSTS[2]}


def test_bounded_load_keeps_every_host_within_the_bound() -> None:
    load = dict.fromkeys(HOSTS, 0)
    for n in range(300):
        load[choose(HOSTS, f"s{n}", load).host] += 1
    assert max(load.values()) <= 1.25 * 100 + 1
