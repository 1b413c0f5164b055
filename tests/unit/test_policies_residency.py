"""The lru residency policy: a frozen view in, a plan with reasons out."""

from __future__ import annotations

from policies.residency import ActionKind, Lru
from policies.types import DemandView, HostView, ModelState, PoolView, Tier

S = ModelState
K = ActionKind
BREAKS = {
    "test_bytes_on_their_way": ("policies/residency.py", "if shortage > 0:  # what", "if True:  # what"),
    "test_a_sleeper_does_not": ("policies/residency.py", "room.spare - room.later.get(demand.host, 0)", "room.spare"),
    "test_a_short_minimum": (
        "policies/residency.py",
        "or _soon_without_ending(view, others, chosen, shortage)",
        "or False",
    ),
}


def host(model: str, resident: int = 40, residual: int = 5, **changes: object) -> HostView:
    fields: dict[str, object] = {"state": S.READY, "in_flight": 0, "last_used": 0.0, "ready_since": 0.0}
    return HostView(
        host=f"host:{model}:0",
        model=model,
        device="d0",
        resident_bytes=resident,
        residual_bytes=residual,
        **{**fields, **changes},  # type: ignore[arg-type]
    )


def want(model: str, need: int, arrival: float = 90.0, tier: Tier = Tier.STANDARD, **changes: object) -> DemandView:
    return DemandView(model, need, arrival, tier, 1, **changes)  # type: ignore[arg-type]


def plan(*parts: HostView | DemandView, budget: int = 100, dwell: float = 0.0, aging: float = 1e9):
    hosts = tuple(part for part in parts if isinstance(part, HostView))
    demand = tuple(part for part in parts if isinstance(part, DemandView))
    booked = sum(h.resident_bytes + h.residual_bytes for h in hosts)
    return Lru(aging).plan(PoolView(100.0, "d0", budget, booked, hosts, demand, dwell)).actions


def short(*parts: HostView | DemandView, **options: float) -> list[tuple[ActionKind, str]]:
    """(what, victim or model)."""
    return [(a.kind, a.host.split(":")[1] if a.host else a.model) for a in plan(*parts, **options)]  # type: ignore[arg-type]


def test_starts_all_that_fit_best_tier_first() -> None:
    asked = (want("a", 50, arrival=1.0), want("b", 50, tier=Tier.INTERACTIVE), want("c", 50, arrival=2.0))
    assert short(*asked) == [(K.START, "b"), (K.START, "a"), (K.WAIT, "c")]


def test_ageing_lifts_a_batch_request_over_newer_ones() -> None:
    asked = (want("old", 80, arrival=0.0, tier=Tier.BATCH), want("new", 80, arrival=99.0, tier=Tier.INTERACTIVE))
    assert short(*asked)[0] == (K.START, "new")
    assert short(*asked, aging=50.0)[0] == (K.START, "old")


def test_least_recently_used_goes_first_and_reasons_have_numbers() -> None:
    (action,) = plan(host("a", last_used=50.0), host("b", last_used=40.0), want("c", 45))
    assert action.host == "host:b:0"
    assert action.reason == (
        "c needs 45 more bytes, 10 free and 0 being freed on d0: short by 35; b frees 40 bytes, 0 in flight, "
        "tier standard, last used 60.0 s ago"
    )


def test_idle_goes_before_busy_and_low_tier_before_idle() -> None:
    busy, idle = host("busy", last_used=1.0, in_flight=2), host("idle", last_used=50.0)
    assert short(busy, idle, want("c", 45)) == [(K.SLEEP, "idle")]
    low = host("low", last_used=1.0, in_flight=2, tier=Tier.BATCH)
    assert short(low, idle, want("c", 45)) == [(K.SLEEP, "low")]


def test_no_victim_is_superfluous() -> None:
    small, large = host("small", 10, 0, last_used=1.0), host("large", 80, 0, last_used=2.0)
    assert short(small, large, want("c", 60)) == [(K.SLEEP, "large")]
    assert short(small, large, want("c", 95)) == [(K.SLEEP, "small"), (K.SLEEP, "large")]


def test_pinned_and_dwelling_hosts_stay() -> None:
    assert short(host("a", pinned=True), host("b"), want("c", 45)) == [(K.SLEEP, "b")]
    young = host("young", ready_since=95.0, last_used=0.0)
    assert short(young, host("b", last_used=50.0), want("c", 45), dwell=10.0) == [(K.SLEEP, "b")]
    (wait,) = plan(young, want("c", 80), dwell=10.0)
    assert (wait.kind, "young stays until t=105.0 s" in wait.reason) == (K.WAIT, True)


def test_all_pinned_is_refused_with_numbers() -> None:
    (action,) = plan(host("a", 80, 5, pinned=True), want("c", 45))
    assert action.kind is K.REFUSE
    assert "c needs 45 bytes, but pinned models keep 85 of the 100 bytes of d0" in action.reason


def test_a_refused_demand_does_not_hold_up_the_next() -> None:
    assert short(host("a", 80, 5, pinned=True), want("c", 45), want("d", 15, arrival=95.0)) == [
        (K.REFUSE, "c"),
        (K.START, "d"),
    ]


def test_waking_counts_the_residual_it_already_holds() -> None:
    asleep = host("a", 0, 10, state=S.SLEEPING)
    other = host("b", 40, 0)
    assert short(asleep, other, want("a", 60)) == [(K.START, "a")]


def test_a_process_is_ended_only_when_sleeping_is_not_enough() -> None:
    asleep = host("old", 0, 10, state=S.SLEEPING)
    assert short(asleep, host("a", 80, 10), want("c", 80)) == [(K.SLEEP, "a")]
    assert short(asleep, host("a", 80, 10), want("c", 90)) == [(K.SLEEP, "a"), (K.UNLOAD, "old")]
    assert short(asleep, host("a", 80, 10), want("c", 100)) == [(K.UNLOAD, "a"), (K.UNLOAD, "old")]


def test_bytes_being_given_back_are_waited_for_not_freed_twice() -> None:
    going = host("a", 40, 5, state=S.DRAINING)
    assert short(going, host("b"), want("c", 45)) == [(K.WAIT, "c")]


def test_free_bytes_are_given_away_once() -> None:
    going = host("a", 40, 45, state=S.DRAINING)
    assert short(going, want("b", 10, arrival=1.0), want("c", 10, arrival=2.0)) == [(K.START, "b"), (K.WAIT, "c")]


def test_room_is_made_for_one_at_a_time_and_not_taken_away() -> None:
    asked = (want("first", 60, arrival=1.0), want("second", 10, arrival=2.0), want("third", 40, arrival=3.0))
    # free 15, a gives 80: first takes 60 of 95, second fits into what is free and left, third has to wait
    assert short(host("a", 80, 5), *asked) == [(K.SLEEP, "a"), (K.START, "second"), (K.WAIT, "third")]
    greedy = (want("first", 90, arrival=1.0), want("second", 10, arrival=2.0))
    assert short(host("a", 80, 5), *greedy) == [(K.SLEEP, "a"), (K.WAIT, "second")]


def test_a_committed_demand_owns_the_next_bytes() -> None:
    asked = (want("late", 60, committed=True), want("vip", 60, arrival=1.0, tier=Tier.INTERACTIVE))
    assert short(*asked) == [(K.START, "late"), (K.WAIT, "vip")]


def test_loading_hosts_are_no_victims() -> None:
    (wait,) = plan(host("a", 80, 5, state=S.LOADING), want("c", 45))
    assert (wait.kind, "waiting for a" in wait.reason) == (K.WAIT, True)


def test_bytes_on_their_way_to_a_demand_are_not_lent_to_another() -> None:
    going = host("going", 60, 0, state=S.DRAINING)
    sleeper = host("next", 0, 20, state=S.SLEEPING)
    asked = (
        want("first", 80, arrival=1.0),
        want("next", 35, arrival=2.0),
    )  # 20 free, 60 coming: all of it is spoken for
    assert short(going, sleeper, *asked) == [(K.WAIT, "first"), (K.WAIT, "next")]


def test_a_sleeper_does_not_borrow_on_its_own_residual() -> None:
    dwelling = host("young", 60, 0, ready_since=99.9)
    sleeper = host("next", 0, 30, state=S.SLEEPING)
    asked = (want("first", 80, arrival=1.0), want("next", 38, arrival=2.0, host="host:next:0"))
    assert short(dwelling, sleeper, *asked, dwell=20.0) == [(K.WAIT, "first"), (K.WAIT, "next")]


def test_a_short_minimum_residence_is_waited_out_before_a_process_ends() -> None:
    young, sleeper = host("young", 50, 5, ready_since=99.5), host("old", 0, 40, state=S.SLEEPING)
    asked = want("new", 40)
    assert short(young, sleeper, asked, dwell=1.0) == [(K.WAIT, "new")]
    assert short(young, sleeper, asked, dwell=30.0) == [(K.UNLOAD, "old")], "half a minute is longer than a load"
