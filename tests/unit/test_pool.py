"""The pool's behaviours one by one; scenarios of the bank are in tests/scenarios/test_residency_pool.py."""

from __future__ import annotations

import pytest

from model_pool.effects import HostRef, HostReport
from model_pool.states import MODEL_EDGES
from policies.errors import (
    CapacityPinned,
    IllegalTransition,
    LoadFailed,
    ModelDoesNotFit,
    ModelNotFound,
    QueueFull,
)
from policies.types import ModelState, Tier, check_edge
from tests.unit.fake_effects import World

S = ModelState


def test_every_state_has_its_edges() -> None:
    assert set(MODEL_EDGES) == set(ModelState)
    with pytest.raises(IllegalTransition, match="host:a:0: cold → ready is not an edge"):
        check_edge(MODEL_EDGES, S.COLD, S.READY, "host:a:0")


# --- demand


def test_a_ready_model_answers_at_once_and_the_ticket_counts_until_redeemed() -> None:
    world = World({"a": 80}, ticket_ttl_seconds=10.0)
    world.bring_up("a")
    world.demand("t1", "a")
    assert world.effects.resolved["t1"][0].expires == world.now + 10.0
    assert world.status("a").in_flight == 1
    world.pool.on_redeemed("t1", world.now)
    assert world.status("a").in_flight == 1  # it runs now; the next report says so too
    world.pool.on_report(world.ref("a"), world.report("a", S.READY, in_flight=0), world.now)
    assert world.status("a").in_flight == 0


def test_an_unredeemed_ticket_expires() -> None:
    world = World({"a": 80}, ticket_ttl_seconds=10.0)
    world.bring_up("a")
    world.demand("t1", "a")
    world.tick(9.9)
    assert world.status("a").in_flight == 1
    world.tick(0.1)
    assert world.status("a").in_flight == 0
    world.demand("t1", "a")  # unknown again: a new answer
    assert len(world.effects.resolved["t1"]) == 2


def test_a_report_redeems_tickets() -> None:
    world = World({"a": 80})
    world.bring_up("a")
    world.demand("t1", "a")
    world.pool.on_report(world.ref("a"), world.report("a", S.READY, 1, redeemed=("t1",)), world.now)
    assert world.status("a").in_flight == 1


def test_a_known_ticket_changes_nothing() -> None:
    world = World({"a": 80})
    world.demand("t1", "a")
    world.demand("t1", "a")
    assert world.status("a").waiting == 1
    world.run()
    world.demand("t1", "a")
    assert len(world.effects.resolved["t1"]) == 1


def test_waiters_are_served_by_tier_then_arrival() -> None:
    world = World({"a": 80})
    world.demand("batch", "a", Tier.BATCH)
    world.demand("late", "a", arrival=5.0)
    world.demand("early", "a", arrival=1.0)
    world.demand("person", "a", Tier.INTERACTIVE, arrival=9.0)
    world.run()
    assert list(world.effects.resolved) == ["person", "early", "late", "batch"]


def test_unknown_too_large_and_too_many_are_refused_at_once() -> None:
    world = World({"a": 80, "huge": 101}, max_waiting=2)
    world.demand("t0", "nope")
    assert isinstance(world.error("t0"), ModelNotFound)
    world.demand("t1", "huge")
    assert isinstance(world.error("t1"), ModelDoesNotFit)
    assert "huge needs 101 bytes, the largest device has a budget of 100" in world.error("t1").message
    for i in range(3):
        world.demand(f"a{i}", "a")
    assert isinstance(world.error("a2"), QueueFull)
    assert world.error("a2").retry_after_seconds == 2.0
    assert "2 requests wait for a (loading), the limit is 2" in world.error("a2").message


# --- eviction


def test_a_victim_is_unloaded_when_its_residual_must_go_too() -> None:
    world = World({"a": 80, "b": 95})
    world.bring_up("a")
    world.demand("b1", "b")
    world.answer("drain", "a")
    assert world.effects.verbs("a")[-1] == "unload"
    assert world.effects.verbs("b") == []
    world.answer("unload", "a")
    assert world.state("a") is S.COLD
    world.run()
    assert world.placed_on("b1").model == "b"


def test_a_sleeping_host_that_keeps_more_than_estimated_is_made_to_go() -> None:
    world = World({"a": 80, "b": 90})
    world.bring_up("a")
    world.residuals["a"] = 30  # estimated 10
    world.demand("b1", "b")
    world.run()
    assert world.placed_on("b1").model == "b"
    assert world.effects.verbs("a")[-3:] == ["drain", "sleep", "unload"]


def test_a_failing_or_silent_sleep_ends_the_process() -> None:
    for silent in (False, True):
        world = World({"a": 80, "b": 80}, answer_timeout_seconds=60.0)
        world.bring_up("a")
        world.demand("b1", "b")
        world.answer("drain", "a")
        if silent:
            world.tick(60.0)
        else:
            world.fail("sleep", "a")
        world.answer("unload", "a")
        world.answer("start", "b")
        assert world.placed_on("b1").model == "b"


def test_an_unanswered_unload_is_asked_again() -> None:
    world = World({"a": 80}, answer_timeout_seconds=60.0)
    world.bring_up("a")
    world.pool.ask_unload("a", world.now)
    world.answer("drain", "a")
    world.tick(60.0)
    assert world.effects.verbs("a")[-2:] == ["unload", "unload"]


def test_constant_load_on_one_model_does_not_starve_the_other() -> None:
    world = World({"a": 80, "b": 80}, min_resident_seconds=30.0)
    world.bring_up("a")
    world.demand("b1", "b")
    for i in range(60):
        world.demand(f"a{i}", "a")
        world.pool.on_redeemed(f"a{i}", world.now)
        world.tick(1.0)
        if world.effects.pending:
            world.deliver(world.effects.pending[0])
    assert world.placed_on("b1").model == "b"
    assert world.now < 100.0


def test_routing_table_holds_ready_hosts_and_loses_a_host_before_it_drains() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    assert list(world.pool.routing_table().entries) == ["a"]
    version = world.pool.routing_table().version
    world.demand("b1", "b")
    assert world.effects.tables[-1].entries == {}
    assert world.effects.tables[-1].version == version + 1
    world.run()
    (entry,) = world.pool.routing_table().entries["b"]
    assert (entry.host, entry.state) == (HostRef("b", 0, 1), S.READY)


# --- failures


def test_a_load_that_never_answers_fails_by_its_timeout() -> None:
    world = World({"a": 80})
    world.demand("t1", "a")
    world.tick(99.0)
    assert not world.effects.rejected
    world.tick(1.0)
    assert isinstance(world.error("t1"), LoadFailed)
    assert world.effects.verbs("a") == ["start", "unload"]


def test_a_late_outcome_of_a_failed_load_is_ignored() -> None:
    world = World({"a": 80})
    world.demand("t1", "a")
    call = world.call("start", "a")
    world.tick(100.0)
    world.deliver(call)
    assert world.state("a") is S.FAILED
    assert "loaded, epoch 1; now failed, epoch 1" in world.effects.reasons("ignored")


def test_a_host_that_measures_more_than_the_device_has_is_a_failed_load() -> None:
    world = World({"a": 80})
    world.sizes["a"] = 120
    world.demand("t1", "a")
    world.answer("start", "a")
    assert "host:a:0 asks for 120 bytes on d0: budget 100" in world.error("t1").message
    assert world.held() == 80
    world.answer("unload", "a")
    assert world.held() == 0


def test_two_failed_wakes_end_the_process_and_the_next_try_is_cold() -> None:
    world = World({"a": 80})
    world.put_asleep("a")
    for i in range(2):
        world.demand(f"t{i}", "a")
        world.fail("wake", "a")
        world.tick(100.0)
    world.answer("unload", "a")
    world.demand("t9", "a")
    world.answer("start", "a")
    assert world.placed_on("t9") == HostRef("a", 0, 2)


def test_restoring_a_victim_evicts_nobody_and_yields_to_demand() -> None:
    world = World({"a": 80, "b": 80, "c": 60})
    world.bring_up("a")
    world.demand("b1", "b")
    world.answer("drain", "a")
    world.answer("sleep", "a")
    world.demand("c1", "c")
    world.fail("start", "b")
    world.answer("unload", "b")
    assert world.state("c") is S.LOADING
    assert world.state("a") is S.SLEEPING
    world.run()
    assert (world.state("c"), world.state("a")) == (S.READY, S.SLEEPING)
    world.pool.ask_unload("c", world.now)
    world.run()
    assert world.state("a") is S.READY


def test_restoring_a_victim_does_not_take_the_bytes_of_a_waiter() -> None:
    world = World({"a": 40, "x": 50, "b": 45, "c": 60}, residual=5, min_resident_seconds=30.0)
    world.bring_up("a")
    world.now = 20.0
    world.bring_up("x")
    world.now = 30.0
    world.demand("b1", "b")  # a must go, x may not yet
    world.answer("drain", "a")
    world.answer("sleep", "a")
    world.demand("c1", "c")
    world.fail("start", "b")
    world.answer("unload", "b")
    assert (world.state("c"), world.state("a")) == (S.COLD, S.SLEEPING)  # a would fit, but c waits for x to go
    world.tick(20.0)
    world.run()
    assert world.placed_on("c1").model == "c"
    assert world.effects.verbs("a") == ["start", "drain", "sleep"]


def test_a_lost_host_requeues_its_tickets_and_loads_again_at_once() -> None:
    world = World({"a": 80})
    world.bring_up("a")
    world.demand("t1", "a", arrival=-3.0)
    old = world.ref("a")
    world.lose("a")
    assert world.state("a") is S.LOADING
    assert world.status("a").waiting == 1
    world.pool.on_lost(old, "said twice", world.now)
    world.pool.on_loaded(old, world.report("a", S.READY), world.now)
    assert world.state("a") is S.LOADING
    world.run()
    assert [placement.host.epoch for placement in world.effects.resolved["t1"]] == [1, 2]


def test_three_losses_in_the_window_are_a_failure() -> None:
    world = World({"a": 80}, losses_window_seconds=300.0)
    world.bring_up("a")
    for gap in (0.0, 400.0, 10.0):  # the first is forgotten by the third
        world.now += gap
        world.lose("a")
        world.run()
        assert world.state("a") is S.READY
    world.demand("t1", "a")
    world.lose("a", cause="signal 9")
    assert world.state("a") is S.FAILED
    assert "3 losses in 300 s" in world.error("t1").message
    assert "signal 9" in world.error("t1").message
    world.tick(8.0)
    assert world.state("a") is S.COLD


def test_a_lost_victim_frees_its_bytes_for_the_target() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    world.demand("b1", "b")
    world.demand("a1", "a", Tier.INTERACTIVE)
    world.lose("a")
    assert (world.state("a"), world.state("b")) == (S.COLD, S.LOADING)
    world.run()
    assert set(world.effects.resolved) >= {"a1", "b1"}


def test_drift_past_the_budget_restarts_the_host_when_idle() -> None:
    world = World({"a": 80})
    world.bring_up("a")
    world.pool.on_report(world.ref("a"), world.report("a", S.READY, 1, memory_bytes=130), world.now)
    world.tick(1.0)
    assert world.state("a") is S.READY
    assert len(world.effects.reasons("drift")) == 1
    world.pool.on_report(world.ref("a"), world.report("a", S.READY, 0, memory_bytes=130), world.now)
    world.tick(1.0)
    world.run()
    assert world.state("a") is S.READY
    assert world.status("a").epoch == 2


# --- devices


def test_models_spread_over_devices_and_wake_where_they_sleep() -> None:
    world = World({"a": 80, "b": 80}, {"d0": 100, "d1": 100})
    world.demand("a1", "a")
    world.demand("b1", "b")
    assert sorted(call.device for call in world.effects.calls) == ["d0", "d1"]
    world.run()
    home = world.status("b").device
    world.pool.ask_sleep("b", world.now)
    world.run()
    world.demand("b2", "b")
    assert world.status("b").device == home
    assert world.state("b") is S.WAKING


def test_a_model_asleep_beside_a_pinned_one_moves_to_another_device() -> None:
    world = World({"a": 80, "pin": 60}, {"d0": 100, "d1": 70}, pinned=("pin",))
    world.put_asleep("a")
    world.bring_up("pin")
    assert (world.status("a").device, world.status("pin").device) == ("d0", "d0")
    world.demand("a1", "a")  # needs 80, d1 has 70: nowhere to go
    assert isinstance(world.error("a1"), CapacityPinned)
    roomy = World({"a": 80, "pin": 60}, {"d0": 100, "d1": 90}, pinned=("pin",))
    roomy.put_asleep("a")
    roomy.bring_up("pin")
    roomy.demand("a1", "a")
    roomy.run()
    assert roomy.placed_on("a1").model == "a"


# --- admin


def test_admin_sleep_ignores_dwell_and_load_wakes() -> None:
    world = World({"a": 80}, min_resident_seconds=60.0)
    world.bring_up("a")
    assert world.pool.ask_sleep("a", world.now) is S.DRAINING
    world.run()
    assert world.pool.ask_load("a", world.now) is S.WAKING
    world.run()
    assert world.pool.ask_load("a", world.now) is S.READY
    with pytest.raises(ModelNotFound):
        world.pool.ask_load("nope", world.now)


def test_admin_load_cuts_the_cooldown_short() -> None:
    world = World({"a": 80})
    world.demand("t1", "a")
    world.fail("start", "a")
    world.pool.ask_load("a", world.now)
    assert world.state("a") is S.FAILED
    world.answer("unload", "a")
    assert world.state("a") is S.LOADING


# --- adoption


@pytest.mark.parametrize("state", [S.LOADING, S.WARMING, S.WAKING])
def test_an_adopted_host_on_its_way_is_waited_for(state: ModelState) -> None:
    world = World({"a": 80})
    ref = HostRef("a", 0, 7)
    world.pool.on_adopted(ref, world.report("a", state), world.now)
    world.demand("t1", "a")
    assert (world.state("a"), world.effects.verbs()) == (state, [])
    world.pool.on_report(ref, world.report("a", S.READY), world.now)
    assert world.placed_on("t1") == ref


def test_an_adopted_ready_host_serves_at_once_and_its_next_life_has_the_next_epoch() -> None:
    world = World({"a": 80})
    ref = HostRef("a", 0, 7)
    world.pool.on_adopted(ref, world.report("a", S.READY, in_flight=2), world.now)
    world.pool.on_adopted(ref, world.report("a", S.READY, in_flight=2), world.now)
    assert (world.status("a").in_flight, world.held()) == (2, 80)
    world.demand("t1", "a")
    assert world.placed_on("t1") == ref
    world.lose("a")
    assert world.ref("a").epoch == 8


def test_adopted_sleeping_draining_and_unloading_hosts() -> None:
    world = World({"a": 80, "b": 80, "c": 80}, 300)
    world.pool.on_adopted(HostRef("a", 0, 3), world.report("a", S.SLEEPING), world.now)
    world.pool.on_adopted(HostRef("b", 0, 3), world.report("b", S.DRAINING, in_flight=1), world.now)
    world.pool.on_adopted(HostRef("c", 0, 3), world.report("c", S.UNLOADING), world.now)
    assert world.held() == 170
    assert (world.effects.verbs("b"), world.effects.verbs("c")) == (["drain"], ["unload"])
    world.run()
    assert [world.state(model) for model in "abc"] == [S.SLEEPING, S.SLEEPING, S.COLD]
    world.demand("a1", "a")
    assert world.effects.verbs("a") == ["wake"]


def test_an_adopted_host_that_does_not_fit_the_books_is_ended() -> None:
    world = World({"a": 80, "b": 80})
    world.pool.on_adopted(HostRef("a", 0, 1), world.report("a", S.READY), world.now)
    world.pool.on_adopted(HostRef("b", 0, 1), world.report("b", S.READY), world.now)
    assert world.state("b") is S.UNLOADING
    assert world.effects.verbs("b") == ["unload"]


def test_a_host_of_no_configured_model_is_ended_and_its_bytes_are_booked_till_then() -> None:
    world = World({"a": 80})
    ref = HostRef("old", 0, 1)
    world.pool.on_adopted(ref, HostReport(S.READY, 50, 5), world.now)
    world.demand("a1", "a")
    assert (world.held(), world.effects.verbs()) == (50, ["unload"])
    world.pool.on_unloaded(ref, world.now)
    assert world.state("a") is S.LOADING


# --- explanation


def test_every_transition_is_recorded_with_a_reason() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    world.demand("b1", "b")
    world.run()
    moves = [event for event in world.effects.events if event.kind == "transition"]
    path = [(event.model, event.new) for event in moves]
    ups = [S.LOADING, S.WARMING, S.READY]
    assert path == ([("a", s) for s in ups] + [("a", S.DRAINING), ("a", S.SLEEPING)] + [("b", s) for s in ups])
    assert all(any(char.isdigit() for char in event.reason) for event in moves)


def test_a_waiting_decision_is_recorded_once() -> None:
    world = World({"a": 80, "b": 80}, min_resident_seconds=60.0)
    world.bring_up("a")
    world.demand("b1", "b")
    for _ in range(5):
        world.tick(1.0)
    assert len([r for r in world.effects.reasons("decision") if "a stays until t=60.0 s" in r]) == 1


def test_an_admins_pin_keeps_a_model_until_it_is_taken_off() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    assert world.pool.ask_pin("a", True, world.now) is S.READY
    world.demand("b1", "b")
    assert isinstance(world.error("b1"), CapacityPinned)
    assert next(s for s in world.pool.status(world.now) if s.model == "a").pinned
    world.pool.ask_pin("a", False, world.now)
    world.demand("b2", "b")
    world.run()
    assert world.placed_on("b2").model == "b"


# --- several hosts of a model


def test_further_hosts_start_when_bytes_are_to_spare_and_all_are_routed_to() -> None:
    world = World({"a": 30}, 100, replicas={"a": 4})
    world.bring_up("a")
    world.run()
    hosts = {entry.host.name for entry in world.pool.routing_table().entries["a"]}
    assert hosts == {"host:a:0", "host:a:1", "host:a:2"}  # the fourth would take 120 of 100 bytes
    assert world.state("a", 3) is S.COLD


def test_a_further_host_evicts_nobody_and_gives_way() -> None:
    world = World({"a": 40, "b": 50}, 100, replicas={"a": 2})
    world.bring_up("b")
    world.bring_up("a")
    world.run()
    assert (world.state("b"), world.state("a", 1)) == (S.READY, S.COLD)
    world.pool.ask_unload("b", world.now)
    world.run()
    assert world.state("a", 1) is S.READY  # now there is room
    world.bring_up("b")
    assert world.state("b") is S.READY
    assert [world.state("a", n) for n in (0, 1)].count(S.READY) == 1


def test_tickets_go_to_the_host_with_the_fewest_in_flight() -> None:
    world = World({"a": 30}, 100, replicas={"a": 2})
    world.bring_up("a")
    world.run()
    for number, in_flight in ((0, 3), (1, 1)):
        world.pool.on_report(world.ref("a", number), world.report("a", S.READY, in_flight), world.now)
    for ticket in ("t1", "t2", "t3"):
        world.demand(ticket, "a")
    assert [world.placed_on(t).number for t in ("t1", "t2", "t3")] == [1, 1, 0]


def test_a_lost_hosts_tickets_go_to_its_sibling_at_once() -> None:
    world = World({"a": 30}, 100, replicas={"a": 2})
    world.bring_up("a")
    world.run()
    world.pool.on_report(world.ref("a", 0), world.report("a", S.READY, 5), world.now)
    world.demand("t", "a")
    assert world.placed_on("t").number == 1
    world.lose("a", 1)
    assert [placement.host.number for placement in world.effects.resolved["t"]] == [1, 0]
    world.run()
    assert world.state("a", 1) is S.READY  # loaded again


def test_a_further_host_that_fails_harms_nobody() -> None:
    world = World({"a": 30}, 100, replicas={"a": 2})
    world.demand("t1", "a")
    world.answer("start", "a")
    assert world.state("a", 1) is S.LOADING
    world.fail("start", "a")
    assert world.state("a", 1) is S.FAILED
    world.demand("t2", "a")
    assert {world.placed_on(t).number for t in ("t1", "t2")} == {0}
    assert not world.effects.rejected


def test_sleep_and_load_by_an_admin_mean_the_whole_model() -> None:
    world = World({"a": 30}, 100, replicas={"a": 2})
    world.bring_up("a")
    world.run()
    assert world.pool.ask_sleep("a", world.now) is S.DRAINING
    world.run()
    assert [world.state("a", n) for n in (0, 1)] == [S.SLEEPING, S.SLEEPING]
    world.pool.ask_load("a", world.now)
    world.run()
    assert [world.state("a", n) for n in (0, 1)] == [S.READY, S.READY]


def test_a_model_whose_source_is_not_there_fails_at_once_and_evicts_nobody() -> None:
    world = World({"a": 80, "b": 80}, problems={"b": "no such directory"})
    world.bring_up("a")
    assert (world.state("b"), world.status("b").cause) == (S.FAILED, "no such directory")
    world.demand("t", "b")
    error = world.error("t")
    assert isinstance(error, LoadFailed) and "no such directory" in error.message
    assert error.retry_after_seconds is None
    world.tick(1e6)
    assert world.state("a") is S.READY and not world.effects.pending
