"""The controller's own part, without Ray: cores lent to loads, and the order in which a successor takes hosts over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from engine.protocol import EngineLimits, EngineStats
from model_pool.effects import HostRef, HostReport, ModelSpec
from model_pool.host import NAMESPACE
from model_pool.host_words import HostPicture, HostSpec
from model_pool.slot import PoolSettings
from orchestrator.controller import Controller
from orchestrator.pool_words import PoolPlan
from policies.errors import LoadFailed
from policies.types import ModelState

S = ModelState
BREAKS = {
    "test_hosts_lend_a_core_while": ("orchestrator/controller.py", "with self._cores_lent():", "if True:"),
    "test_hosts_lend_until_the_last": (
        "orchestrator/controller.py",
        "self._loading -= 1\n            self._lend_cores(self._loading > 0)",
        "self._loading -= 1\n            self._lend_cores(False)",
    ),
    "test_a_successor_takes_those": (
        "orchestrator/controller.py",
        "NEAREST_FIRST.index(one[1].report.state)",
        "one[1].spec.ref.name",
    ),
}


class Actor:
    """An engine host's actor: remembers what was asked of it."""

    def __init__(self, picture: HostPicture) -> None:
        self._picture = picture
        self.lent: list[bool] = []
        self.loads: list[asyncio.Future[Any]] = []

    def __getattr__(self, verb: str) -> Any:
        return Remote(lambda *args: self._ask(verb, *args))

    async def _ask(self, verb: str, *args: Any) -> Any:
        if verb == "lend_core":
            self.lent.append(*args)
        elif verb == "load":
            self.loads.append(asyncio.get_running_loop().create_future())
            return await self.loads[-1]
        elif verb == "watch":
            await asyncio.Event().wait()
        elif verb == "picture":
            return self._picture
        return None


class Remote:
    def __init__(self, ask: Callable[..., Any]) -> None:
        self.remote = ask


def picture(model: str, state: ModelState) -> HostPicture:
    spec = HostSpec(HostRef(model, 0, 1), "", 40, EngineLimits(100))
    return HostPicture(spec, HostReport(state, 40, 10), EngineStats(), None, pid=1)


def controller(tmp_path: Path, *models: str) -> Controller:
    specs = tuple(ModelSpec(name, 40, 10) for name in models)
    hosts = tuple((name, picture(name, S.COLD).spec) for name in models)
    settings = PoolSettings(prepared_bytes=0)
    return Controller(PoolPlan(specs, hosts, (("d0", 100, None),), "lru", settings, (), str(tmp_path / "log")))


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_hosts_lend_a_core_while_a_model_loads_and_take_it_back(tmp_path: Path) -> None:
    async def run() -> None:
        made = controller(tmp_path, "busy", "new")
        busy, new = Actor(picture("busy", S.READY)), Actor(picture("new", S.COLD))
        made._actors = {HostRef("busy", 0, 1): busy, HostRef("new", 0, 1): new}
        made.load(HostRef("new", 0, 1))
        await settled()
        assert busy.lent == [True]
        new.loads[0].set_result(LoadFailed("no such file"))
        await settled()
        assert busy.lent == [True, False]

    asyncio.run(run())


def test_hosts_lend_until_the_last_of_several_loads_has_ended(tmp_path: Path) -> None:
    async def run() -> None:
        made = controller(tmp_path, "busy", "one", "two")
        actors = {name: Actor(picture(name, S.COLD)) for name in ("busy", "one", "two")}
        made._actors = {HostRef(name, 0, 1): actor for name, actor in actors.items()}
        made.load(HostRef("one", 0, 1))
        made.load(HostRef("two", 0, 1))
        await settled()
        actors["one"].loads[0].set_result(LoadFailed("no such file"))
        await settled()
        assert actors["busy"].lent[-1] is True, "the other still loads"
        actors["two"].loads[0].set_result(LoadFailed("no such file"))
        await settled()
        assert actors["busy"].lent[-1] is False

    asyncio.run(run())


def test_a_successor_takes_those_that_serve_over_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both do not fit, the one that answers must not be ended for the one that loads."""
    actors = {"host:a:0": Actor(picture("a", S.LOADING)), "host:b:0": Actor(picture("b", S.READY))}
    entries = [{"namespace": NAMESPACE, "name": name} for name in actors]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: entries)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actors[name])

    async def run() -> None:
        made = controller(tmp_path, "a", "b")
        await made._adopt()
        assert next(event.model for event in made._events if event.kind == "adopted") == "b"

    asyncio.run(run())
