"""Owns ``bench sessions``: what a turn costs in the store, on a private Redis of its own."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.bench.report import Section, section
from orchestrator.turn import window_bytes
from session_store.embedded import EmbeddedRedis
from session_store.items import Item, message
from session_store.probe import ServerProbe, SlowCommand
from session_store.records import Begun
from session_store.store import SessionStore, Wish

TENANT = "bench"
QUESTION, ANSWER = "q" * 120, "a" * 480  # characters
SEAL = "0123456789ab"  # of an answer whose ids are what its text tokenizes to, as most are
WINDOW_BYTES = window_bytes(2048)
TURNS, MANY_TURNS = 10, 10_000
PAIRS = 400
SHORT_SESSIONS = 300
SESSIONS = 100_000
AT_ONCE = 64
PAGE = 1_000


def run(say: Callable[[str], None] = lambda _: None, sessions: int = SESSIONS) -> list[Section]:
    """All sections."""
    with tempfile.TemporaryDirectory() as directory:
        # everysec: the sync of each turn would hide what grows; what it costs has a section of its own
        server = EmbeddedRedis(Path(directory) / "lax", appendfsync="everysec")
        synced = EmbeddedRedis(Path(directory) / "synced", appendfsync="always")
        server.start()
        synced.start()
        probe = ServerProbe(server.url)
        try:
            return asyncio.run(_measure(SessionStore(server.url), SessionStore(synced.url), probe, say, sessions))
        finally:
            probe.close()
            server.stop()
            synced.stop()


async def _measure(
    store: SessionStore, synced: SessionStore, probe: ServerProbe, say: Callable[[str], None], count: int
) -> list[Section]:
    try:
        probe.forget_slow_commands()
        say("round trips and bytes of a turn")
        sections = [await _round_trips(store), await _bytes_per_turn(store, probe)]
        say(f"a turn of a session of {MANY_TURNS:,} turns beside one of {TURNS}")
        sections += [await _turn_cost_growth(store), await _turn_synced(store, synced)]
        say(f"{count:,} sessions")
        return [*sections, *await _many_sessions(store, probe, count)]
    finally:
        await store.close()
        await synced.close()


async def _round_trips(store: SessionStore) -> Section:
    trips = []
    for number in range(20):
        before = store.round_trips
        await _turn(store, "trips", number)
        trips.append(float(store.round_trips - before))
    return section(
        "round_trips",
        [(trips_of_one, 1.0) for trips_of_one in trips[1:]],  # the first one loads the scripts
        "one turn",
        "round trips",
        target="<=2",
        limit="begin and commit; a lease is renewed beside the turn, every third of its time, and is not in it",
    )


async def _bytes_per_turn(store: SessionStore, probe: ServerProbe) -> Section:
    before = probe.used_bytes()
    for number in range(SHORT_SESSIONS):
        for turn in range(TURNS):
            await _turn(store, f"bytes-{number}", turn)
    held = (probe.used_bytes() - before) / (SHORT_SESSIONS * TURNS)
    payload = len(QUESTION) + len(ANSWER)
    return section(
        "bytes_per_turn",
        [(held, 1.5 * payload + 512)],
        f"1.5 × a payload of {payload} bytes, and 512",
        "bytes",
        target="<=1",
        limit=f"sessions of {TURNS} turns; ids, places and times of two items, the turn's record, the keys' own books",
    )


async def _turn_cost_growth(store: SessionStore) -> Section:
    for turn in range(MANY_TURNS):
        await _turn(store, "long", turn)
    pairs = []
    for number in range(PAIRS):
        short, long = f"short-{number}", "long"
        for turn in range(TURNS):
            await _turn(store, short, turn)
        pairs.append((await _seconds(store, long, MANY_TURNS + number), await _seconds(store, short, TURNS)))
    return section(
        "turn_cost_growth",
        pairs,
        f"begin and commit of a session of {TURNS} turns",
        "s",
        target="<=1.5",
        limit=f"the window that begin reads: {WINDOW_BYTES // 1024} KiB at most, the short session has less",
    )


async def _turn_synced(store: SessionStore, synced: SessionStore) -> Section:
    pairs = [
        (await _seconds(synced, "synced", number), await _seconds(store, "not-synced", number))
        for number in range(PAIRS)
    ]
    return section(
        "turn_synced",
        pairs[10:],
        "the same turn with appendfsync everysec",
        "s",
        limit="begin and commit each wait for the disk with appendfsync always, which is the default",
    )


async def _many_sessions(store: SessionStore, probe: ServerProbe, count: int) -> list[Section]:
    begin = time.perf_counter()
    places = asyncio.Semaphore(AT_ONCE)

    async def make(number: int) -> None:
        async with places:
            await store.create_session("crowd", f"s{number}")

    for first in range(0, count, 5_000):
        await asyncio.gather(*map(make, range(first, min(count, first + 5_000))))
    made = time.perf_counter() - begin
    found, pages, cursor = set[str](), list[float](), None
    while True:
        begin = time.perf_counter()
        page = await store.list_sessions("crowd", cursor, PAGE)
        pages.append(time.perf_counter() - begin)
        found |= {session.session_id for session in page.sessions}
        cursor = page.cursor
        if cursor is None:
            break
    slow = probe.slow_commands()
    return [
        section(
            "sessions_listed",
            [(float(len(found)), float(count))],
            f"sessions created, {count / made:,.0f} a second",
            "sessions",
            target=">=1",
            limit=f"{len(pages)} pages of {PAGE}, {statistics.median(pages) * 1000:.0f} ms each",
        ),
        section(
            "list_page_growth",
            [(statistics.median(pages[-6:-1]), statistics.median(pages[:5]))] if len(pages) > 6 else [(1.0, 1.0)],
            "the first pages of the list",
            "s",
            target="<=1.5",
            limit="the last pages against the first: a cursor is a place, nothing before it is read",
        ),
        section("slow_commands", [(float(len(slow)), 1.0)], "one", "commands", target="<=0", limit=_said(slow)),
    ]


def _said(slow: list[SlowCommand]) -> str:
    worst = sorted(slow, key=lambda command: -command.microseconds)[:5]
    listed = ", ".join(f"{command.name} {command.microseconds / 1000:.0f} ms" for command in worst)
    return f"above 10 ms in the server's SLOWLOG, over all of the above{': ' + listed if listed else ''}"


async def _seconds(store: SessionStore, session_id: str, number: int) -> float:
    begin = time.perf_counter()
    await _turn(store, session_id, number)
    return time.perf_counter() - begin


async def _turn(store: SessionStore, session_id: str, number: int) -> None:
    """Begin and commit, as a gateway does for a model of 2,048 tokens."""
    turn_id = f"{number:032x}"
    begun = await store.begin_turn(
        TENANT,
        session_id,
        turn_id,
        owner="bench",
        reserve_tokens=2048,
        max_concurrent=64,
        max_reserved_tokens=1_000_000,
        wish=Wish(window_bytes=WINDOW_BYTES),
    )
    assert isinstance(begun, Begun)
    now = time.time()
    items = [
        Item(f"msg_{turn_id}_0", turn_id, now, message("user", QUESTION)),
        Item(f"msg_{turn_id}_a", turn_id, now, message("assistant", ANSWER), "smollm2-135m-instruct", ids=SEAL),
    ]
    reply = {
        "model": "smollm2-135m-instruct",
        "finish_reason": "stop",
        "prompt_tokens": 100,
        "completion_tokens": 100,
        "cached_tokens": 80,
    }
    await store.commit_turn(begun, items, {}, reply, 200)  # a record is kept when something was cut
