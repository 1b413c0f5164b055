"""What the pool does with models that nobody asks for: keep_alive, minimum residence, default models that come back."""

from __future__ import annotations

from policies.residency import ActionKind
from policies.types import ModelState
from tests.unit.fake_effects import World

S = ModelState


def test_an_idle_model_is_put_to_sleep_after_its_keep_alive_and_not_before() -> None:
    world = World({"a": 80}, keep_alive={"a": 10.0})
    world.bring_up("a")
    world.tick(9.9)
    assert world.state("a") is S.READY
    world.tick(0.2)
    world.run()
    assert world.state("a") is S.SLEEPING
    assert any("keep_alive is 10 s" in reason for reason in world.effects.reasons("transition"))


def test_a_busy_or_pinned_model_or_one_without_keep_alive_stays() -> None:
    world = World({"a": 20, "b": 20, "c": 20}, keep_alive={"a": 1.0, "b": 1.0}, pinned=("b",))
    for name in "abc":
        world.bring_up(name)
    world.pool.on_report(world.ref("a"), world.report("a", S.READY, in_flight=1), world.now)
    world.tick(60.0)
    assert {world.state(name) for name in "abc"} == {S.READY}


def test_the_last_request_s_keep_alive_counts_until_it_is_up_again() -> None:
    world = World({"a": 80}, keep_alive={"a": 10.0})
    world.bring_up("a")
    for asked, stays in ((30.0, True), (2.0, False)):
        world.pool.on_report(world.ref("a"), world.report("a", S.READY, keep_alive_seconds=asked), world.now)
        world.tick(15.0)
        assert (world.state("a") is S.READY) is stays
    world.run()
    world.bring_up("a")
    world.pool.on_report(world.ref("a"), world.report("a", S.READY), world.now)
    world.tick(5.0)
    assert world.state("a") is S.READY  # its own ten seconds again
    assert world.status("a").keep_alive_seconds == 10.0


def test_keep_alive_waits_for_the_minimum_residence() -> None:
    world = World({"a": 80}, keep_alive={"a": 0.0}, min_resident={"a": 5.0})
    world.bring_up("a")
    world.tick(4.0)
    assert world.state("a") is S.READY
    world.tick(1.5)
    assert world.state("a") is S.DRAINING


def test_a_model_s_own_minimum_residence_protects_it_from_others() -> None:
    world = World({"a": 80, "b": 80}, min_resident={"a": 20.0})
    world.bring_up("a")
    world.demand("b1", "b")
    assert world.state("a") is S.READY
    world.tick(19.0)
    assert world.state("a") is S.READY
    world.tick(1.5)
    assert world.state("a") is S.DRAINING


def displaced() -> World:
    """A default model that has made room for another."""
    world = World({"home": 80, "guest": 80}, preload=("home",), reclaim_after_seconds=30.0)
    world.bring_up("home")
    world.demand("g", "guest")
    world.run()
    world.pool.on_redeemed("g", world.now)
    world.pool.on_report(world.ref("guest"), world.report("guest", S.READY), world.now)
    assert (world.state("home"), world.state("guest")) == (S.SLEEPING, S.READY)
    return world


def test_R53_a_displaced_default_model_returns_when_the_others_have_been_idle() -> None:
    world = displaced()
    world.tick(29.0)
    assert world.state("guest") is S.READY
    world.tick(1.5)
    world.run()
    assert (world.state("home"), world.state("guest")) == (S.READY, S.SLEEPING)
    assert any("wanted back" in reason for reason in world.effects.reasons("decision"))
    world.tick(300.0)
    assert world.state("home") is S.READY  # and stays: the guest was no default model


def test_R53_while_the_burst_lasts_it_does_not_return() -> None:
    world = displaced()
    for _ in range(10):
        world.now += 20.0
        world.pool.on_report(world.ref("guest"), world.report("guest", S.READY), world.now)
        world.tick()
    world.pool.on_report(world.ref("guest"), world.report("guest", S.READY, in_flight=1, last_used=0.0), world.now)
    world.tick(60.0)
    assert world.state("guest") is S.READY


def test_it_returns_at_once_when_there_is_room() -> None:
    world = displaced()
    world.pool.ask_unload("guest", world.now)
    world.run()
    world.tick(0.1)
    world.run()
    assert world.state("home") is S.READY


def test_what_the_admin_put_down_stays_down() -> None:
    world = World({"home": 80, "guest": 80}, preload=("home",), reclaim_after_seconds=30.0)
    world.bring_up("home")
    world.pool.ask_sleep("home", world.now)
    world.run()
    world.tick(300.0)
    assert world.state("home") is S.SLEEPING


def test_default_models_that_do_not_fit_together_do_not_push_each_other_out_for_ever() -> None:
    world = World({"a": 80, "b": 80}, preload=("a", "b"), reclaim_after_seconds=10.0)
    world.bring_up("a")
    world.bring_up("b")
    before = len(world.effects.calls)
    for _ in range(20):
        world.tick(15.0)
        world.run()
    assert len(world.effects.calls) == before


def test_R44_a_model_that_woke_as_something_else_answers_nobody_and_is_loaded_cold() -> None:
    world = World({"a": 80})
    world.put_asleep("a")
    world.demand("t", "a")
    world.quarantine("a")
    moves = [(event.old, event.new) for event in world.effects.events if event.kind == "transition"][-2:]
    assert moves == [(S.WAKING, S.QUARANTINED), (S.QUARANTINED, S.UNLOADING)]
    assert "t" not in world.effects.resolved and not world.effects.rejected
    world.run()
    assert world.effects.verbs("a")[-2:] == ["unload", "start"]
    assert world.placed_on("t") == world.ref("a")


def test_what_a_request_would_cause_is_said_and_not_done() -> None:
    world = World({"a": 80, "b": 80})
    world.bring_up("a")
    before = list(world.effects.calls)
    plan = world.pool.dry_run("b", world.now)
    assert [(action.kind, action.host) for action in plan.actions] == [(ActionKind.SLEEP, "host:a:0")]
    assert world.effects.calls == before and world.state("a") is S.READY


def test_several_hosts_of_a_model_with_a_keep_alive_come_to_rest() -> None:
    world = World({"a": 20}, replicas={"a": 3}, keep_alive={"a": 0.0})
    world.bring_up("a")
    for _ in range(10):
        world.tick(1.0)
        world.run()
    before = len(world.effects.calls)
    for _ in range(10):
        world.tick(1.0)
        world.run()
    assert len(world.effects.calls) == before
    assert {world.state("a", number) for number in range(3)} <= {S.SLEEPING, S.COLD}


def test_two_displaced_default_models_are_not_promised_the_same_bytes() -> None:
    world = World(
        {"one": 40, "two": 40, "guest": 95}, 110, preload=("one", "two"), reclaim_after_seconds=60.0, residual=3
    )
    world.bring_up("one")
    world.bring_up("two")
    world.demand("g", "guest")
    world.run()
    world.pool.on_redeemed("g", world.now)
    world.sizes["guest"] = 60  # measured, it is smaller: there is room for one of the two
    world.pool.on_report(world.ref("guest"), world.report("guest", S.READY, in_flight=1), world.now)
    world.tick(0.25)
    world.run()
    world.tick(0.25)
    assert world.state("guest") is S.READY
    assert sum(world.state(name) is S.READY for name in ("one", "two")) == 1


def test_an_idle_host_of_a_model_in_use_stays_up() -> None:
    world = World({"a": 20}, replicas={"a": 3}, keep_alive={"a": 0.0})
    world.bring_up("a")
    world.pool.on_report(world.ref("a"), world.report("a", S.READY, in_flight=1), world.now)
    world.tick()
    world.run()
    before = len(world.effects.calls)
    for _ in range(10):
        world.tick(1.0)
        world.run()
    assert {world.state("a", number) for number in range(3)} == {S.READY}
    assert len(world.effects.calls) == before
