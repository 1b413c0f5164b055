"""Why a model is where it is, in sentences."""

from __future__ import annotations

from typing import Any

from orchestrator.explain import explain, prepared

NOW = 1000.0
ENTRIES = [
    {"host": "host:(prepared):7", "held_bytes": 2**20},
    {"host": "host:a:0", "held_bytes": 79 * 2**20},
    {"host": "host:b:0", "held_bytes": 0},
]
DEVICE = {"device": "cpu0", "held_bytes": 80 * 2**20, "budget_bytes": 100 * 2**20, "entries": ENTRIES}


def host(model: str, state: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": model, "host": f"host:{model}:0", "state": state, "since": 940.0, "waiting": 0, "in_flight": 0,
        "cause": None, "cooldown_until": 0.0, "pinned": False, "keep_alive_seconds": None, "last_used": 950.0,
        "memory_bytes": 80 * 2**20 if state == "ready" else 0, "device": "cpu0", **changes,
    }  # fmt: skip


def event(kind: str, old: str, new: str, reason: str, at: float = 940.0) -> dict[str, Any]:
    return {"host": "host:b:0", "kind": kind, "old": old, "new": new, "reason": reason, "at": at}


def test_a_cold_model_says_who_holds_the_memory_and_what_a_request_would_do() -> None:
    plan = [{"kind": "sleep", "model": "b", "host": "host:a:0", "reason": "short by 60 bytes"}]
    events = [event("transition", "unloading", "cold", "process ended, freed 5 bytes")]
    said = explain("b", [host("a", "ready"), host("b", "cold")], [DEVICE], events, plan, NOW)
    assert said == [
        "host:b:0 is cold, 60 s ago: process ended, freed 5 bytes",
        "  keep_alive: none, it stays until another model needs its memory",
        "cpu0: 80 MiB of 100 MiB held by host:a:0 (ready, 79 MiB), host:(prepared):7 (no model, 1 MiB)",
        "if it was asked for now:",
        "  host:a:0 would be put to sleep: short by 60 bytes",
    ]


def test_a_waiting_model_says_what_was_decided_how_many_wait_and_for_what() -> None:
    events = [
        event("transition", "unloading", "cold", "process ended"),
        event("decision", "cold", "cold", "a stays until t=5 s", at=990.0),
    ]
    said = explain("b", [host("b", "cold", waiting=3, since=0.0)], [], events, [], NOW)
    assert said[1:3] == ["  decided 10 s ago: a stays until t=5 s", "  3 requests wait for it"]


def test_a_failure_its_cooldown_a_pin_and_a_keep_alive_are_named() -> None:
    failed = host("b", "failed", cause="no such file", cooldown_until=NOW + 7.4)
    said = explain("b", [failed], [], [], [], NOW)
    assert "  last failure: no such file" in said and "  no new try for 7 s" in said
    assert any("pinned" in line for line in explain("b", [host("b", "ready", pinned=True)], [], [], [], NOW))
    kept = explain("b", [host("b", "ready", keep_alive_seconds=300.0)], [], [], [], NOW)
    assert "  keep_alive: put to sleep after 300 s without a request, 250 s are left" in kept


def test_prepared_processes_and_the_times_of_the_last_load_are_named() -> None:
    assert prepared(DEVICE) == ", 1 MiB of it by 1 prepared process" and prepared({"entries": []}) == ""
    timed = host("b", "sleeping", load_seconds=3.64, wake_seconds=0.41)
    assert "  took 3.6 s to load and 0.4 s to wake, the last time" in explain("b", [timed], [], [], [], NOW)
