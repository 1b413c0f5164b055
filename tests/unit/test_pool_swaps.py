"""Scheduled swaps: background loads, deep sleep, prepared processes, a last try when memory is short, drift."""

from __future__ import annotations

import itertools

from policies.errors import LoadFailed, OutOfMemory, SwapBudgetExceeded
from policies.types import ModelState, Tier
from tests.unit.fake_effects import PREPARED_BYTES, World

S = ModelState
BREAKS = {
    "test_a_cold_model_loads_asleep": (
        "policies/residency.py",
        "if demand.start_bytes is not None and",
        "if False and",
    ),
    "test_a_model_never_loaded_here": (
        "model_pool/lifecycle.py",
        "elif slot.state is _S.DEEP_SLEEP:",
        "elif False:",
    ),
    "test_one_that_keeps_more_asleep": (
        "model_pool/lifecycle.py",
        "        if report.state is _S.SLEEPING:\n            slot.residual",
        "        if False:\n            slot.residual",
    ),
    "test_a_restarted_controller_finds": ("model_pool/lifecycle.py", "held[state] = slot.residual_bytes", "pass"),
    "test_sleeping_models_are_cut_down": (
        "policies/residency.py",
        "steps += [victim for victim in deeper",
        "_ = [victim for victim in deeper",
    ),
    "test_nobody_wakes_a_model_on_its_way": ("model_pool/views.py", "if not slot.deepening]", "]"),
    "test_a_prepared_process_is_made": ("model_pool/planning.py", "self._prepared.take(device) if cold", '"" if cold'),
    "test_prepared_processes_end": ("model_pool/planning.py", "            self._prepared.give_way(device, now)\n", ""),
    "test_a_prepared_process_that_dies": ("model_pool/prepared.py", "and now >= self._not_before", ""),
    "test_a_load_that_finds_no_memory": (
        "model_pool/ladder.py",
        "isinstance(error, OutOfMemory)",
        "True or isinstance(error, OutOfMemory)",
    ),
    "test_the_second_failure_is_handed_on": ("model_pool/ladder.py", "or slot.climbed", "or False"),
    "test_other_failures_are_not_tried": ("model_pool/ladder.py", "not isinstance(error, OutOfMemory)", "False"),
    "test_a_host_that_holds_more": (
        "model_pool/pool.py",
        "if report.measured_bytes > self",
        "if False and report.measured_bytes > self",
    ),
    "test_a_host_that_keeps_more_asleep": (
        "model_pool/lifecycle.py",
        "if promised is not None and report.residual_bytes",
        "if False and report.residual_bytes",
    ),
    "test_one_that_was_loaded_in_the_background": (
        "model_pool/lifecycle.py",
        "promised = report.promised_residual_bytes",
        "promised = report.promised_residual_bytes if slot.load_seconds else None",
    ),
    "test_a_request_that_cannot_wait": (
        "model_pool/pool.py",
        "            self._want(slots, now)\n        elif",
        "            pass\n        elif",
    ),
    "test_a_model_pushed_out_wakes": ("model_pool/lifecycle.py", "slot.pushed_out = target is not None", "pass"),
    "test_a_model_put_to_sleep_by": (
        "model_pool/lifecycle.py",
        "slot.pushed_out = target is not None",
        "slot.pushed_out = True",
    ),
    "test_a_draining_host_is_told": ("model_pool/pool.py", "self._effects.forfeit(slot.ref, ticket_id)", "pass"),
}


def world(sizes: dict[str, int] | None = None, budget: int = 100, **options: object) -> World:
    return World(sizes or {"a": 60, "b": 60}, budget, background=True, process=6, **options)  # type: ignore[arg-type]


# -- background loads -------------------------------------------------------------------------


def test_a_cold_model_loads_asleep_while_the_one_it_will_replace_serves_on() -> None:
    w = world()
    w.bring_up("a")
    w.demand("t", "b")
    assert w.call("start", "b").asleep
    assert (w.state("a"), w.state("b")) == (S.READY, S.LOADING)
    w.demand("other", "a")
    assert w.placed_on("other") == w.ref("a")
    w.pool.on_redeemed("other", w.now)
    w.pool.on_report(w.ref("a"), w.report("a", S.READY), w.now)
    w.answer("start", "b", seconds=3.0)
    assert (w.state("a"), w.state("b")) == (S.DRAINING, S.SLEEPING)
    w.run()
    assert (w.state("a"), w.state("b")) == (S.SLEEPING, S.READY)
    assert w.placed_on("t") == w.ref("b")


def test_a_model_never_loaded_here_gets_as_far_as_its_process_and_then_loads_in_it() -> None:
    w = world()
    w.known.discard("b")
    w.bring_up("a")
    w.demand("t", "b")
    w.answer("start", "b")
    assert w.state("b") is S.DEEP_SLEEP
    w.answer("drain", "a")
    w.answer("sleep", "a")
    epoch = w.ref("b").epoch
    assert w.call("load", "b").ref.epoch == epoch, "the same process goes on"
    w.run()
    assert w.state("b") is S.READY


def test_where_its_process_does_not_fit_beside_the_others_the_swap_is_direct() -> None:
    w = world({"a": 95, "b": 60})
    w.bring_up("a")
    w.demand("t", "b")
    assert w.state("a") is S.DRAINING and w.state("b") is S.COLD
    w.run()
    assert not any(call.asleep for call in w.effects.calls) and w.state("b") is S.READY


def test_a_background_load_that_fails_costs_nobody_else_anything() -> None:
    w = world()
    w.bring_up("a")
    w.demand("t", "b")
    w.fail("start", "b", "bad file")
    assert isinstance(w.error("t"), LoadFailed) and "bad file" in w.error("t").message
    assert w.state("a") is S.READY and "drain" not in w.effects.verbs("a")


def test_it_stays_asleep_when_who_asked_has_left() -> None:
    w = world()
    w.bring_up("a")
    w.demand("t", "b")
    w.pool.on_abandoned("t", w.now)
    w.answer("start", "b")
    w.tick(1.0)
    assert (w.state("a"), w.state("b")) == (S.READY, S.SLEEPING)


def test_an_admins_load_goes_on_from_the_background() -> None:
    w = world()
    w.bring_up("a")
    w.pool.ask_load("b", w.now)
    w.run()
    assert (w.state("a"), w.state("b")) == (S.SLEEPING, S.READY)


def test_one_that_keeps_more_asleep_than_there_is_ends_and_is_promised_that_next_time() -> None:
    w = world({"a": 85, "b": 60})
    w.residuals["b"] = 30
    w.bring_up("a")
    w.demand("t", "b")
    w.answer("start", "b")
    assert w.state("b") is S.UNLOADING
    w.answer("unload", "b")
    assert w.state("a") is S.DRAINING, "30 do not fit beside: a direct swap"
    w.run()
    assert w.placed_on("t") == w.ref("b")


def test_a_restarted_controller_finds_a_background_load_and_goes_on_with_it() -> None:
    w = world()
    w.bring_up("a")
    ref = w.ref("b")
    w.pool.on_adopted(ref, w.report("b", S.LOADING, asleep=True), w.now)
    assert w.held() == 70, "what a sleeping process keeps, not what a ready one holds"
    w.demand("t", "b")
    w.pool.on_report(ref, w.report("b", S.SLEEPING), w.now)
    w.run()
    assert w.placed_on("t") == w.ref("b")


# -- deep sleep -----------------------------------------------------------------------------


def test_sleeping_models_are_cut_down_to_their_process_before_any_process_ends() -> None:
    w = World({"a": 50, "b": 50, "c": 84}, 100, residual=20, process=6)
    w.put_asleep("a")
    w.put_asleep("b")
    w.demand("t", "c")
    assert {call.ref.model for call in w.effects.pending if call.verb == "deep_sleep"} == {"a", "b"}
    w.run()
    assert w.placed_on("t") == w.ref("c")
    assert (w.state("a"), w.state("b")) == (S.DEEP_SLEEP, S.DEEP_SLEEP)
    assert w.held() == 84 + 12
    w.demand("u", "a")
    w.run()
    assert w.placed_on("u") == w.ref("a") and w.effects.verbs("a").count("start") == 1


def test_a_deep_sleep_that_fails_ends_the_process() -> None:
    w = World({"a": 50, "c": 90}, 100, residual=20, process=6)
    w.put_asleep("a")
    w.demand("t", "c")
    w.fail("deep_sleep", "a", "not clean")
    assert w.state("a") is S.UNLOADING
    w.run()
    assert w.placed_on("t") == w.ref("c") and w.state("a") is S.COLD


def test_nobody_wakes_a_model_on_its_way_to_deep_sleep() -> None:
    w = World({"a": 50, "c": 90}, 100, residual=20, process=6)
    w.put_asleep("a")
    w.demand("t", "c")
    w.demand("u", "a")
    assert [demand.model for demand in w.pool._views.demand(w.now)["d0"]] == ["c"]
    w.run()
    assert w.placed_on("t") == w.ref("c") and w.placed_on("u") == w.ref("a")


# -- prepared processes -------------------------------------------------------------------------


def test_a_prepared_process_is_made_when_nobody_waits_and_a_cold_model_begins_in_it() -> None:
    w = world(prepared_hosts=1)
    w.bring_up("a")
    w.tick()
    w.answer("prepare", "(prepared)")
    assert w.held() == 60 + PREPARED_BYTES
    w.demand("t", "b")
    call = w.call("start", "b")
    assert call.ref.process == call.ref.actor and call.ref.process.startswith("host:(prepared)")
    assert w.held() == 60 + 10, "its bytes are the host's"
    w.run()
    assert w.placed_on("t").actor == call.ref.process
    w.tick()
    assert not w.effects.pending, "there is no cold model left that could use another"


def test_prepared_processes_end_when_their_bytes_are_wanted() -> None:
    w = World({"a": 60, "b": 38, "cold": 1}, 100, prepared_hosts=1)
    w.put_asleep("b")
    w.bring_up("a")
    w.tick()
    w.answer("prepare", "(prepared)")
    w.demand("t", "b")
    assert w.call("unload", "(prepared)") and w.state("b") is S.SLEEPING
    w.run()
    assert w.placed_on("t") == w.ref("b") and w.state("a") is S.READY
    w.tick(30.0)
    assert "prepare" not in [call.verb for call in w.effects.pending], "it costs a core: not again at once"


def test_a_prepared_process_that_dies_is_made_again_later_and_later() -> None:
    w = world(prepared_hosts=1, cooldown_seconds=8.0)
    made = []
    for _ in range(100):
        w.tick(1.0)
        for call in [c for c in w.effects.pending if c.verb == "prepare"]:
            w.lose("(prepared)", call.ref.number)
            made.append(w.now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(made)]
    assert gaps == [8.0, 16.0, 32.0]
    assert w.held() == 0


# -- memory shorter than the books say -------------------------------------------------------------


def test_a_load_that_finds_no_memory_is_tried_once_more_when_the_others_have_given_back() -> None:
    w = World({"a": 30, "busy": 30, "b": 30}, 100)
    w.bring_up("a")
    w.bring_up("busy")
    w.pool.on_report(w.ref("busy"), w.report("busy", S.READY, in_flight=1), w.now)
    w.demand("t", "b")
    call = w.call("start", "b")
    w.effects.pending.remove(call)
    w.pool.on_failed(call.ref, OutOfMemory("DefaultCPUAllocator"), w.now)
    assert "t" not in w.effects.rejected and w.state("a") is S.DRAINING
    assert w.effects.resized == [(w.ref("busy"), False)]
    w.answer("unload", "b")
    assert w.state("b") is S.COLD, "it waits until the others have given back"
    w.run()
    assert w.placed_on("t") == w.ref("b") and w.state("a") is S.SLEEPING
    assert w.effects.resized[-1] == (w.ref("busy"), True)


def test_the_second_failure_is_handed_on_and_the_victim_comes_back() -> None:
    w = World({"a": 30, "b": 30}, 100)
    w.bring_up("a")
    w.demand("t", "b")
    for _ in range(2):
        call = w.call("start", "b")
        w.effects.pending.remove(call)
        w.pool.on_failed(call.ref, OutOfMemory("DefaultCPUAllocator: 30 bytes"), w.now)
        if call.ref.epoch == 1:
            w.run_until_pending("start", "b")
    assert isinstance(w.error("t"), LoadFailed) and "DefaultCPUAllocator: 30 bytes" in w.error("t").message
    w.run()
    w.tick()
    w.run()
    assert w.state("a") is S.READY


def test_a_wake_without_memory_is_tried_again_too() -> None:
    w = World({"a": 30, "b": 30}, 100)
    w.put_asleep("b")
    w.bring_up("a")
    w.demand("t", "b")
    call = w.call("wake", "b")
    w.effects.pending.remove(call)
    w.pool.on_wake_failed(call.ref, OutOfMemory("not enough memory to wake"), w.now)
    w.demand("late", "b")
    assert not w.effects.rejected
    w.run()
    assert w.placed_on("t") == w.placed_on("late") == w.ref("b")


def test_other_failures_are_not_tried_again() -> None:
    w = World({"a": 30, "b": 30}, 100)
    w.bring_up("a")
    w.demand("t", "b")
    w.fail("start", "b", "bad file")
    assert "t" in w.effects.rejected and w.state("a") is S.READY


# -- drift ---------------------------------------------------------------------------------------


def test_a_host_that_holds_more_than_it_promised_is_restarted_when_idle() -> None:
    w = World({"a": 40}, 100)
    w.bring_up("a")
    w.pool.on_report(w.ref("a"), w.report("a", S.READY, in_flight=1, measured_bytes=44), w.now)
    assert not w.effects.reasons("drift"), "2 bytes and a twentieth are allowed"
    w.pool.on_report(w.ref("a"), w.report("a", S.READY, in_flight=1, measured_bytes=45), w.now)
    assert w.effects.reasons("drift") == ["holds 45 bytes, promised 40; restarted when idle"]
    w.tick()
    assert w.state("a") is S.READY, "not while it answers somebody"
    w.pool.on_report(w.ref("a"), w.report("a", S.READY, measured_bytes=45), w.now)
    w.tick()
    w.run()
    w.tick()
    w.run()
    assert w.state("a") is S.READY and w.ref("a").epoch == 2


def test_a_host_that_keeps_more_asleep_than_its_load_promised_is_recycled() -> None:
    w = World({"a": 40}, 100)
    w.bring_up("a")
    w.residuals["a"] = 13
    w.pool.ask_sleep("a", w.now)
    w.run()
    assert w.state("a") is S.COLD
    assert w.effects.reasons("drift") == ["asleep it keeps 13 bytes, its load promised 10"]


def test_one_that_was_loaded_in_the_background_is_held_to_its_promise_too() -> None:
    w = world()
    w.bring_up("a")
    w.demand("t", "b")
    w.answer("start", "b")
    w.run()
    w.pool.on_redeemed("t", w.now)
    w.pool.on_report(w.ref("b"), w.report("b", S.READY), w.now)
    w.residuals["b"] = 13
    w.pool.ask_sleep("b", w.now)
    w.run()
    assert w.state("b") is S.COLD
    assert w.effects.reasons("drift") == ["asleep it keeps 13 bytes, its load promised 10"]


# -- patience ------------------------------------------------------------------------------------


def test_a_request_that_cannot_wait_so_long_is_told_at_once_and_the_model_comes_up() -> None:
    w = World({"b": 60}, 100)
    w.demand("first", "b")
    w.answer("start", "b", seconds=8.0)
    w.pool.ask_unload("b", w.now)
    w.run()
    w.demand("hasty", "b", deadline=w.now + 3.0)
    error = w.error("hasty")
    assert isinstance(error, SwapBudgetExceeded) and error.code == "swap_budget_exceeded"
    assert error.retry_after_seconds == 8.0 and "8.0 s until it is ready" in error.message and "3.0 s" in error.message
    assert w.state("b") is S.LOADING, "a retry finds it"
    w.tick(6.0)
    w.demand("retry", "b", deadline=w.now + 3.0)
    w.run()
    assert w.placed_on("retry") == w.ref("b")


def test_a_model_never_timed_refuses_nobody() -> None:
    w = World({"b": 60}, 100)
    w.demand("t", "b", deadline=0.5)
    w.run()
    assert w.placed_on("t") == w.ref("b")


def test_who_waits_is_told_state_place_and_time() -> None:
    w = World({"b": 60}, 100)
    w.demand("old", "b")
    w.answer("start", "b", seconds=4.0)
    w.pool.ask_unload("b", w.now)
    w.run()
    w.demand("low", "b", Tier.BATCH)
    w.demand("high", "b", Tier.INTERACTIVE)
    w.now += 1.0
    waits = w.pool.waits("b", w.now)
    assert {ticket: (wait.state, wait.position, wait.waiting, wait.eta_seconds) for ticket, wait in waits.items()} == {
        "high": (S.LOADING, 1, 2, 3.0),
        "low": (S.LOADING, 2, 2, 3.0),
    }


# -- idle memory -------------------------------------------------------------------------------------


def test_a_model_pushed_out_wakes_when_its_memory_is_idle_again() -> None:
    w = World({"a": 60, "b": 60}, 100)
    w.bring_up("a")
    w.bring_up("b")
    assert w.state("a") is S.SLEEPING
    w.tick(1.0)
    assert w.state("a") is S.SLEEPING, "there is no room"
    w.pool.ask_unload("b", w.now)
    w.run()
    used = w.status("a").last_used
    w.tick(1.0)
    call = w.call("wake", "a")
    w.effects.pending.remove(call)
    w.pool.on_woken(call.ref, w.report("a", S.READY, last_used=used), w.now)
    assert w.state("a") is S.READY and w.status("a").last_used == used
    assert "promoted: needs 50 more bytes, 90 idle" in [event.reason for event in w.effects.events]


def test_a_model_put_to_sleep_by_its_keep_alive_or_an_admin_stays_asleep() -> None:
    w = World({"a": 40, "b": 40}, 100, keep_alive={"a": 5.0})
    w.bring_up("a")
    w.put_asleep("b")
    for _ in range(20):
        w.tick(1.0)
        w.run()
    assert (w.state("a"), w.state("b")) == (S.SLEEPING, S.SLEEPING)


def test_a_promoted_model_is_the_next_victim_and_no_model_ping_pongs() -> None:
    w = World({"a": 60, "b": 60, "c": 30}, 110)
    w.bring_up("a")
    w.bring_up("c")
    w.tick(5.0)
    w.bring_up("b")
    assert w.state("a") is S.SLEEPING
    moves = len(w.effects.calls)
    for _ in range(10):
        w.tick(1.0)
        w.run()
    assert len(w.effects.calls) == moves


# -- who leaves ----------------------------------------------------------------------------------------


def test_a_draining_host_is_told_that_a_ticket_it_waits_for_has_been_given_up() -> None:
    w = World({"a": 60}, 100)
    w.demand("stays", "a")
    w.demand("leaves", "a")
    w.run()
    w.pool.ask_sleep("a", w.now)
    assert set(w.call("drain", "a").tickets) == {"stays", "leaves"}
    w.pool.on_abandoned("leaves", w.now)
    w.pool.on_abandoned("unknown", w.now)
    assert w.effects.forfeited == [(w.ref("a"), "leaves")]


def test_a_model_that_nobody_waited_for_is_not_protected_from_those_who_wait() -> None:
    w = World({"a": 60, "b": 60}, 100, min_resident_seconds=10.0)
    w.put_asleep("b")
    w.pool.ask_load("a", w.now)
    w.run()
    w.demand("t", "b")
    assert w.state("a") is S.DRAINING
    w.run()
    w.demand("u", "a")
    assert w.state("b") is S.READY, "t waited for it: it stays ten seconds"


# -- a controller that dies meanwhile ----------------------------------------------------------------------


def test_a_process_that_had_not_begun_its_load_costs_no_serving_host_its_place() -> None:
    w = world({"a": 60, "b": 60})
    w.pool.on_adopted(w.ref("b"), w.report("b", S.COLD, memory_bytes=0, residual_bytes=0), w.now)
    assert w.state("b") is S.UNLOADING and w.held() == 10, "what its process may hold, until it is gone"
    w.pool.on_adopted(w.ref("a"), w.report("a", S.READY), w.now)
    assert w.state("a") is S.READY
    w.run()
    assert w.state("b") is S.COLD and w.held() == 60


def test_the_bytes_of_a_host_that_does_not_fit_stay_booked_until_it_is_gone() -> None:
    w = World({"a": 60, "b": 60}, 100)
    w.pool.on_adopted(w.ref("a"), w.report("a", S.READY), w.now)
    w.pool.on_adopted(w.ref("b"), w.report("b", S.READY), w.now)
    assert w.state("b") is S.UNLOADING and w.held() == 100
    w.run()
    assert w.held() == 60


def test_nobody_is_told_that_it_is_ready_in_no_time() -> None:
    w = world()
    w.known.discard("b")
    w.bring_up("a")
    w.demand("t", "b")
    w.answer("start", "b", seconds=0.5)  # its process is up: that is no load
    for verb in ("drain", "sleep"):
        w.answer(verb, "a")
    assert w.pool.waits("b", w.now)["t"].eta_seconds is None
    w.answer("load", "b", seconds=5.0)
    w.pool.ask_unload("b", w.now)
    w.run()
    w.demand("u", "b")
    w.run_until_pending("start", "b")
    w.now += 60.0
    assert w.pool.waits("b", w.now)["u"].eta_seconds is None, "it takes longer this time"
