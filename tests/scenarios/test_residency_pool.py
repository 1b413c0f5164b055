"""Residency scenarios at the pool's core: pure, with a recording fake and a clock moved by hand."""

from __future__ import annotations

from policies.errors import CapacityPinned, LoadFailed, ModelLoading
from policies.types import ModelState, Tier
from tests.unit.fake_effects import World

S = ModelState

BREAKS = {
    "test_R01": ("policies/residency.py", "return not demand.committed, key", "return False, key"),
    "test_R05": (
        "model_pool/lifecycle.py",
        "for ticket in self._desk.queue(slot.name, now):\n            self.place",
        "for ticket in ():\n            self.place",
    ),
    "test_R10": (
        "model_pool/lifecycle.py",
        "self._effects.drain(slot.ref, self",
        "self._effects.sleep(slot.ref); (slot.ref, self",
    ),
    "test_R14": ("model_pool/lifecycle.py", "self._desk.unredeemed(slot.ref, now))", "())"),
    "test_R20": (
        "model_pool/lifecycle.py",
        "if slot.state is _S.SLEEPING:\n            self._asked",
        "if False:\n            self._asked",
    ),
    "test_R35": ("model_pool/lifecycle.py", "other.restore = True", "other.restore = False"),
    "test_R37": ("model_pool/views.py", "if not arrivals and not slot.committed:", "if not arrivals:"),
}


def test_R01_a_request_for_the_victim_does_not_cancel_the_eviction() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    world.demand("b1", "b")
    assert world.state("a") is S.DRAINING
    world.demand("a2", "a", Tier.INTERACTIVE)  # lands before the victim has gone, and outranks b
    world.answer("drain", "a")
    world.answer("sleep", "a")
    assert world.state("b") is S.LOADING
    assert "a2" not in world.effects.resolved
    world.answer("start", "b")
    assert world.placed_on("b1").model == "b"
    world.pool.on_redeemed("b1", world.now)
    world.run()
    assert world.placed_on("a2").model == "a"
    assert not world.effects.rejected


def test_R05_two_waiters_do_not_both_own_the_freed_bytes() -> None:
    world = World({"a": 80, "b": 80, "c": 80}, 120)
    world.bring_up("a")
    world.demand("b1", "b")
    world.demand("c1", "c")
    world.run()
    assert {t: len(p) for t, p in world.effects.resolved.items() if t in ("b1", "c1")} == {"b1": 1, "c1": 1}


def test_R07_each_request_ends_by_its_deadline_when_the_load_never_does() -> None:
    world = World({"a": 80})
    world.demand("t1", "a", deadline=15.0)
    world.demand("t2", "a", deadline=30.0)
    world.tick(14.0)
    assert not world.effects.rejected
    world.tick(1.0)
    assert isinstance(world.error("t1"), ModelLoading)
    assert "a is loading for 15.0 s: needs 80 bytes, 20 bytes free on d0" in world.error("t1").message
    world.tick(15.0)
    assert isinstance(world.error("t2"), ModelLoading)


def test_R10_streams_of_the_victim_complete_before_it_sleeps() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    world.pool.on_report(world.ref("a"), world.report("a", S.READY, in_flight=3), world.now)
    world.demand("b1", "b")
    assert world.status("a").in_flight == 3
    world.tick(60.0)  # a long stream: nothing but its end moves the host on
    assert world.effects.verbs("a")[-1] == "drain"
    assert world.effects.verbs("b") == []
    world.answer("drain", "a")
    assert world.effects.verbs("a")[-1] == "sleep"
    assert world.effects.verbs("b") == []  # the bytes are not measured free yet
    world.answer("sleep", "a")
    assert world.effects.verbs("b") == ["start"]


def test_R14_placed_tickets_are_served_before_the_host_may_go() -> None:
    world = World({"a": 80, "b": 80})
    world.demand("a1", "a")
    world.demand("b1", "b", Tier.INTERACTIVE)  # queued while a is loading: a becomes its victim at once
    world.answer("start", "a")
    assert world.placed_on("a1").model == "a"
    assert world.status("a").in_flight == 1
    assert world.call("drain", "a").tickets == ("a1",)


def test_R19_dwell_limits_sleeping_never_waking() -> None:
    world = World({"a": 80, "b": 80}, min_resident_seconds=60.0)
    world.put_asleep("a")
    world.now += 10.0
    world.demand("a2", "a")
    assert world.state("a") is S.WAKING
    world.answer("wake", "a")
    world.demand("b1", "b")
    world.tick(59.0)
    assert world.state("a") is S.READY
    world.tick(1.0)
    assert world.state("a") is S.DRAINING


def test_R20_fifty_requests_for_a_sleeping_model_are_one_wake() -> None:
    world = World({"a": 80})
    world.put_asleep("a")
    for i in range(50):
        world.demand(f"t{i}", "a")
    world.answer("wake", "a")
    assert world.effects.verbs("a").count("wake") == 1
    assert [len(world.effects.resolved[f"t{i}"]) for i in range(50)] == [1] * 50
    assert not world.effects.rejected


def test_R22_a_wake_that_ran_out_of_memory_is_asleep_again_and_may_be_retried() -> None:
    world = World({"a": 80})
    world.put_asleep("a")
    world.demand("t1", "a")
    world.fail("wake", "a", "out of memory: 70 of 80 bytes copied")
    assert world.state("a") is S.SLEEPING
    assert world.held() == 10
    assert "70 of 80 bytes" in world.error("t1").message
    world.tick(8.0)
    world.demand("t2", "a")
    world.answer("wake", "a")
    assert world.placed_on("t2").model == "a"


def test_R32_eviction_is_by_bytes() -> None:
    world = World({"a": 30, "b": 60, "c": 50}, 100, residual=0)
    world.bring_up("a")
    world.now += 1.0
    world.bring_up("b")
    world.now += 1.0
    world.demand("c1", "c")  # short by 40: a was used longest ago but does not free enough
    assert (world.state("a"), world.state("b")) == (S.READY, S.DRAINING)
    world.run()
    assert world.placed_on("c1").model == "c"


def test_R34_a_broken_model_costs_one_attempt_per_cooldown_and_leaks_nothing() -> None:
    world = World({"a": 80, "b": 80})
    waits = []
    for i in range(6):
        world.demand(f"t{i}", "a")
        world.fail("start", "a")
        assert world.held() == 80  # until the process is seen to be gone
        world.answer("unload", "a")
        assert world.held() == 0
        world.demand(f"again{i}", "a")
        wait = world.error(f"again{i}").retry_after_seconds
        assert wait is not None
        waits.append(wait)
        world.tick(wait)
    assert waits == [8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    assert world.effects.verbs("a").count("start") == 6
    world.demand("b1", "b")
    world.answer("start", "b")
    assert world.placed_on("b1").model == "b"


def test_R35_a_failed_load_is_one_attempt_twenty_errors_and_the_victim_comes_back() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    for i in range(20):
        world.demand(f"t{i}", "b")
    world.answer("drain", "a")
    world.answer("sleep", "a")
    world.fail("start", "b", "weights file is truncated at 12 of 80 bytes")
    assert world.effects.verbs("b").count("start") == 1
    errors = [world.error(f"t{i}") for i in range(20)]
    assert {error.message for error in errors} == {errors[0].message}
    assert all(isinstance(e, LoadFailed) and e.retry_after_seconds == 8.0 for e in errors)
    assert "12 of 80 bytes" in errors[0].message
    world.now += 3.0
    world.demand("late", "b")
    assert (world.error("late").message, world.error("late").retry_after_seconds) == (errors[0].message, 5.0)
    assert world.effects.verbs("b").count("start") == 1
    world.answer("unload", "b")
    assert world.state("a") is S.WAKING
    world.answer("wake", "a")
    assert world.state("a") is S.READY


def test_R37_a_load_outlives_the_client_that_asked_and_a_retry_joins_it() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    world.demand("t1", "b", deadline=15.0)
    world.pool.on_abandoned("t1", world.now)  # even before the victim has gone
    world.answer("drain", "a", seconds=10.0)
    world.answer("sleep", "a")
    assert world.state("b") is S.LOADING
    world.tick(20.0)
    world.demand("t2", "b")
    world.answer("start", "b", seconds=30.0)
    assert world.placed_on("t2").model == "b"
    assert world.effects.verbs("b") == ["start"]
    assert "t1" not in world.effects.resolved
    assert "t1" not in world.effects.rejected


def test_R38_a_failed_load_asked_for_again_fails_again() -> None:
    world = World({"a": 80})
    world.demand("t1", "a")
    world.fail("start", "a")
    world.answer("unload", "a")
    world.tick(8.0)
    world.demand("t2", "a")
    assert "t2" not in world.effects.resolved
    world.fail("start", "a")
    assert isinstance(world.error("t2"), LoadFailed)


def test_R49_all_pinned_and_full_is_said_at_once() -> None:
    world = World({"a": 80, "b": 80}, pinned=("a",))
    world.bring_up("a")
    world.demand("b1", "b")
    assert isinstance(world.error("b1"), CapacityPinned)
    assert "b needs 80 bytes, but pinned models keep 80 of the 100 bytes of d0" in world.error("b1").message
    assert world.state("a") is S.READY


def test_R52_the_victim_is_chosen_by_tier_before_recency() -> None:
    world = World({"high": 40, "low": 40, "new": 40}, 90, residual=0)
    world.demand("h", "high", Tier.INTERACTIVE)
    world.run()
    world.pool.on_redeemed("h", world.now)
    world.pool.on_report(world.ref("high"), world.report("high", S.READY), world.now)
    world.now += 5.0
    world.demand("l", "low", Tier.BATCH)
    world.run()
    world.demand("n", "new")
    assert (world.state("high"), world.state("low")) == (S.READY, S.DRAINING)


def test_R55_loads_overlap_where_memory_allows() -> None:
    world = World({"a": 40, "b": 40, "c": 40})
    for model in "abc":
        world.demand(f"{model}1", model)
    assert (world.state("a"), world.state("b"), world.state("c")) == (S.LOADING, S.LOADING, S.COLD)
    world.run()
    assert set(world.effects.resolved) == {"a1", "b1", "c1"}
