"""Owns the controller: the detached Ray actor around ``model_pool.pool.Pool``, the single writer of residency.

It may die at any time: hosts go on, gateways keep their last routing table, and its successor (Ray restarts it) adopts
the living hosts by name. Methods answer with an OrchestratorError as a value, as hosts do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from engine.disk import DiskStore
from model_pool import prepared
from model_pool.effects import HostRef, Placement, PoolEvent, RoutingTable, Wait
from model_pool.host import NAMESPACE, start_host, start_prepared
from model_pool.host_words import HostPicture, HostSpec
from model_pool.pool import Pool
from model_pool.states import NEAREST_FIRST
from orchestrator.aggregator import push
from orchestrator.detached import start_detached
from orchestrator.logs import event_logger
from orchestrator.metrics import ControllerMetrics
from orchestrator.node_disk import NodeDisk
from orchestrator.pool_words import Forgotten, ModelPicture, PoolPicture, PoolPlan
from orchestrator.processes import until_dead, until_gone
from orchestrator.ray_errors import said
from policies.errors import EngineError, HostLost, LoadFailed, ModelLoading, OrchestratorError
from policies.registry import RESIDENCY
from policies.residency import Plan
from policies.types import ModelState, Tier

NAME = "controller"
TICK_SECONDS = 0.25
ROUTES_SECONDS = 10.0  # how long a long poll for routes waits
EVENTS_KEPT = 2_000
ANSWER_SECONDS = 5.0  # a host that is up and says nothing for this long is looked at; for as long again: ended
CLOSE_SECONDS = 8.0  # that a host gets to put KV on disk before it is ended
UP = (ModelState.READY, ModelState.DRAINING, ModelState.SLEEPING)


class Controller:
    """See the module's text."""

    def __init__(self, plan: PoolPlan) -> None:
        self._plan = plan
        self._hosts_by_model = dict(plan.hosts)
        self._log = event_logger(plan.log_path)
        self._disk = NodeDisk(plan.kv_disk, self._log)
        self._actors: dict[HostRef, Any] = {}
        self._pictures: dict[HostRef, HostPicture] = {}
        self._answers: dict[str, asyncio.Future[Placement | OrchestratorError]] = {}
        self._first_version = time.time_ns()
        self._routes = RoutingTable(self._first_version, {})
        self._routes_changed = asyncio.Event()
        self._events: deque[PoolEvent] = deque(maxlen=EVENTS_KEPT)
        self._metrics = ControllerMetrics()
        self._name = f"controller-{os.getpid()}"
        self._loading = 0  # loads that run now
        self._ending: dict[HostRef, tuple[Any, HostPicture | None]] = {}  # killed, and not seen gone yet
        self._pool = Pool(
            plan.models,
            {name: budget for name, budget, _ in plan.devices},
            RESIDENCY.make(plan.policy),
            self,
            replace(plan.settings, first_epoch=int(time.time())),
        )
        self._started = False
        self._starting: asyncio.Future[None] | None = None

    # -- what others call ------------------------------------------------------------

    async def start(self) -> None:
        """Adopt what lives, preload what is wanted, begin ticking. Idempotent; every other method awaits it."""
        if self._started:
            return
        if self._starting is None:
            self._starting = start_detached(self._begin())
        await asyncio.shield(self._starting)

    async def ensure_ready(
        self, ticket: str, model: str, arrival: float, deadline: float, tier: Tier
    ) -> Placement | OrchestratorError:
        """A host for this request, when there is one. Idempotent by ticket; the load goes on if the caller leaves."""
        await self.start()
        future = self._answers.get(ticket)
        if future is None:
            future = self._answers[ticket] = asyncio.get_running_loop().create_future()
            self._pool.on_demand(ticket, model, arrival, deadline, tier, time.time())
        try:
            return await asyncio.wait_for(asyncio.shield(future), max(0.0, deadline - time.time()) + 5.0)
        except TimeoutError:
            return ModelLoading(f"model {model} was not ready before the deadline", retry_after_seconds=2.0)
        finally:
            self._answers.pop(ticket, None)

    async def waits(self, models: tuple[str, ...]) -> dict[str, Wait]:
        """What those may be told who wait for these models, by ticket."""
        now = time.time()
        return {ticket: wait for model in models for ticket, wait in self._pool.waits(model, now).items()}

    async def abandon(self, ticket: str) -> None:
        self._answers.pop(ticket, None)
        self._pool.on_abandoned(ticket, time.time())

    async def routes(self, known_version: int) -> RoutingTable:
        """The routing table, once it differs from ``known_version`` or after ``ROUTES_SECONDS``."""
        await self.start()
        if known_version == self._routes.version:
            self._routes_changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._routes_changed.wait(), ROUTES_SECONDS)
        return self._routes

    async def suspect(self, ref: HostRef) -> None:
        """A gateway could not speak to this host. Look for ourselves; losses are decided here alone."""
        actor = self._actors.get(ref)
        if actor is None:
            return
        try:
            await asyncio.wait_for(actor.picture.remote(), ANSWER_SECONDS)
        except RayActorError as error:
            self._lost(ref, error)
        except TimeoutError:  # it hangs: left alive, it would keep its name and its memory from its successor
            ray.kill(actor)
            await until_dead(actor, self._pictures.get(ref))
            self._lost(ref, TimeoutError(f"ended: no answer for {ANSWER_SECONDS:.0f} s"))

    async def picture(self) -> PoolPicture:
        await self.start()
        pictures = {(ref.name, ref.epoch): picture for ref, picture in self._pictures.items()}
        models = tuple(ModelPicture(s, pictures.get((s.host, s.epoch))) for s in self._pool.status(time.time()))
        return PoolPicture(models, self._pool.books(), os.getpid())

    async def events(self, model: str | None = None, most: int = 100, after: float = 0.0) -> list[PoolEvent]:
        """The last ones, oldest first. All of one moment are recorded together: none is missed by ``after``."""
        chosen = [event for event in self._events if model in (None, event.model) and event.at > after]
        return chosen[-most:]

    async def dry_run(self, model: str) -> Plan | OrchestratorError:
        """What would be done for a request for this model that came now."""
        await self.start()
        try:
            return self._pool.dry_run(model, time.time())
        except OrchestratorError as error:
            return error

    async def ask(self, verb: str, model: str) -> ModelState | OrchestratorError:
        """What an operator may ask of a model (``api.admin.VERBS``); answers with its state now."""
        await self.start()
        asks: dict[str, Callable[[str, float], ModelState]] = {
            "load": self._pool.ask_load,
            "wake": self._pool.ask_load,
            "sleep": self._pool.ask_sleep,
            "unload": self._pool.ask_unload,
            "pin": lambda name, now: self._pool.ask_pin(name, True, now),
            "unpin": lambda name, now: self._pool.ask_pin(name, False, now),
        }
        try:
            return asks[verb](model, time.time())
        except OrchestratorError as error:
            return error

    async def kv_sessions(self) -> list[str]:
        """Every session whose KV may be somewhere, ``tenant/session``; the disk's without any host too."""
        answers = await self._ask_all("kv_sessions")
        held = {name for answer in answers if not isinstance(answer, OrchestratorError) for name in answer}
        return sorted(held | set(await self._disk.do(DiskStore.sessions) or ()))

    async def forget_sessions(self, sessions: Sequence[str]) -> Forgotten:
        """Have every host, and the disk, drop the KV that only these sessions left."""
        answers = await self._ask_all("forget_sessions", tuple(sessions))
        await self._disk.do(lambda store: [store.forget(session) for session in sessions])
        lost = tuple(answer.message for answer in answers if isinstance(answer, OrchestratorError))
        return Forgotten(sum(answer for answer in answers if isinstance(answer, int)), lost)

    async def close_hosts(self) -> None:
        """The service is about to end: every host puts on disk what KV is worth it."""
        await self._ask_all("close", seconds=CLOSE_SECONDS)

    # -- Effects: fire-and-forget ------------------------------------------------------

    def start_host(self, ref: HostRef, device: str, asleep: bool) -> None:
        self._spawn(self._start(ref, device, asleep))

    def load(self, ref: HostRef) -> None:
        self._spawn(self._load(ref, time.time(), asleep=False))

    def prepare(self, ref: HostRef, device: str) -> None:
        self._spawn(self._prepare(ref))

    def drain(self, ref: HostRef, tickets: tuple[str, ...]) -> None:
        self._spawn(self._drain(ref, tickets))

    def forfeit(self, ref: HostRef, ticket_id: str) -> None:
        self._spawn(self._ask_host(ref, "forfeit", ticket_id))

    def sleep(self, ref: HostRef) -> None:
        self._spawn(self._sleep(ref))

    def deep_sleep(self, ref: HostRef) -> None:
        self._spawn(self._deep_sleep(ref))

    def resize_kv(self, ref: HostRef, full: bool) -> None:
        self._spawn(self._ask_host(ref, "resize_kv", full))

    def wake(self, ref: HostRef) -> None:
        self._spawn(self._wake(ref))

    def unload(self, ref: HostRef) -> None:
        self._spawn(self._unload(ref))

    def resolve(self, ticket_id: str, placement: Placement) -> None:
        self._answer(ticket_id, placement)

    def reject(self, ticket_id: str, error: OrchestratorError) -> None:
        self._answer(ticket_id, error)

    def publish(self, table: RoutingTable) -> None:
        # the pool counts from 0 in each life; a gateway must never take our table for our predecessor's
        self._routes = replace(table, version=self._first_version + table.version)
        self._routes_changed.set()

    def record(self, event: PoolEvent) -> None:
        self._events.append(event)
        self._log.info(event.kind, model=event.model, host=event.host, old=event.old, new=event.new,
                       reason=event.reason, bytes=event.bytes, seconds=round(event.seconds, 3),
                       waiting=event.waiting)  # fmt: skip

    # -- effects, the slow part --------------------------------------------------------

    async def _start(self, ref: HostRef, device: str, asleep: bool) -> None:
        """A new process, or the prepared one that the ref names, becomes the host."""
        begin = time.time()
        index = next(cuda for name, _, cuda in self._plan.devices if name == device)
        spec = replace(self._hosts_by_model[ref.model], ref=ref, device_index=index)
        refused = None
        try:
            if ref.process:
                former = next(other for other in self._actors if other.name == ref.process)
                actor = self._actors[ref] = self._actors.pop(former)
                self._pictures.pop(former, None)
                refused = await actor.become.remote(spec)
            else:
                actor = self._actors[ref] = start_host(spec)
        except (RayError, ValueError, StopIteration) as error:  # ValueError: the actor's name is still taken
            refused = LoadFailed(f"its process ended: {said(error)}")
        if refused is not None:
            self._pool.on_failed(ref, refused, time.time())
            return
        self._spawn(self._watch(ref, actor))
        await self._load(ref, begin, asleep=asleep)

    async def _load(self, ref: HostRef, begin: float, *, asleep: bool) -> None:
        try:
            with self._cores_lent():
                answer = await self._actors[ref].load.remote(asleep)
        except (RayError, KeyError) as error:
            self._pool.on_failed(ref, LoadFailed(f"its process ended: {said(error)}"), time.time())
            return
        if isinstance(answer, OrchestratorError):
            self._pool.on_failed(ref, answer, time.time())
            return
        self._count(ref.model, "background" if asleep else "load", time.time() - begin)
        self._took(ref, answer)
        self._pool.on_loaded(ref, answer.report, time.time())

    @contextlib.contextmanager
    def _cores_lent(self) -> Iterator[None]:
        """While a load runs, the hosts that compute leave it a core: it has the lowest priority."""
        self._loading += 1
        self._lend_cores(self._loading > 0)
        try:
            yield
        finally:
            self._loading -= 1
            self._lend_cores(self._loading > 0)

    def _lend_cores(self, lent: bool) -> None:
        for ref in self._actors:
            self._spawn(self._ask_host(ref, "lend_core", lent))

    async def _prepare(self, ref: HostRef) -> None:
        try:
            actor = self._actors[ref] = start_prepared(ref)
            self._spawn(self._watch(ref, actor))
            held = await actor.prepare.remote()
        except (RayError, ValueError) as error:
            self._lost(ref, error)
            return
        self._pool.on_prepared(ref, held, time.time())

    async def _deep_sleep(self, ref: HostRef) -> None:
        answer = await self._ask_host(ref, "deep_sleep")
        if isinstance(answer, HostPicture):
            self._took(ref, answer)
            self._pool.on_deep_slept(ref, answer.report, time.time())
        elif not isinstance(answer, HostLost):
            self._pool.on_failed(ref, answer, time.time())

    async def _drain(self, ref: HostRef, tickets: tuple[str, ...]) -> None:
        answer = await self._ask_host(ref, "drain", tickets)
        if answer is None:
            self._pool.on_drained(ref, time.time())
        elif not isinstance(answer, HostLost):
            self._pool.on_failed(ref, answer, time.time())

    async def _sleep(self, ref: HostRef) -> None:
        answer = await self._ask_host(ref, "sleep")
        if isinstance(answer, HostPicture):
            self._took(ref, answer)
            self._pool.on_slept(ref, answer.report, time.time())
        elif not isinstance(answer, HostLost):
            self._pool.on_failed(ref, answer, time.time())

    async def _wake(self, ref: HostRef) -> None:
        begin = time.time()
        answer = await self._ask_host(ref, "wake")
        if isinstance(answer, HostPicture):
            self._count(ref.model, "wake", time.time() - begin)
            self._took(ref, answer)
            self._pool.on_woken(ref, answer.report, time.time())
        elif isinstance(answer, EngineError):
            self._pool.on_quarantined(ref, answer, time.time())
        elif not isinstance(answer, HostLost):
            self._pool.on_wake_failed(ref, answer, time.time())

    async def _unload(self, ref: HostRef) -> None:
        actor = self._actors.pop(ref, None)
        picture = self._pictures.pop(ref, None)
        if actor is None:  # asked again: what is left of it?
            actor, picture = self._ending.get(ref, (None, None))
        if actor is not None:
            self._ending[ref] = (actor, picture)
            with contextlib.suppress(RayError, TimeoutError):  # it knows whether there is anything to keep
                await asyncio.wait_for(actor.close.remote(), CLOSE_SECONDS)
            ray.kill(actor)
            if not await until_dead(actor, picture):
                return  # its bytes stay booked; the pool will ask again
            del self._ending[ref]
        self._pool.on_unloaded(ref, time.time())

    async def _ask_host(self, ref: HostRef, verb: str, *args: Any) -> Any:
        """Call a host; HostLost (and the pool told) when its process is gone."""
        actor = self._actors.get(ref)
        try:
            if actor is None:
                raise ActorDiedError
            return await getattr(actor, verb).remote(*args)
        except RayActorError as error:
            self._lost(ref, error)
            return HostLost(f"{ref.name}: {said(error)}")
        except RayError as error:
            return LoadFailed(f"{ref.name}: {verb}: {said(error)}")

    async def _ask_all(self, verb: str, *args: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """The answers of all hosts; an error as a value where there is none.

        Whatever their last picture says: it may be of a moment before they were up.
        """

        async def one(ref: HostRef) -> Any:
            try:
                return await asyncio.wait_for(getattr(self._actors[ref], verb).remote(*args), seconds)
            except (RayError, TimeoutError, KeyError) as error:
                return HostLost(f"{ref.name}: {verb}: {said(error)}")

        return await asyncio.gather(*map(one, list(self._actors)))

    # -- watching ------------------------------------------------------------------------

    async def _watch(self, ref: HostRef, actor: Any) -> None:
        """Follow one host's reports until it dies. One call is always open, so death is noticed at once."""
        while ref in self._actors and self._actors[ref] is actor:
            try:
                picture: HostPicture = await asyncio.wait_for(actor.watch.remote(), ANSWER_SECONDS)
            except TimeoutError:
                if ref in self._pictures and self._pictures[ref].report.state in UP:
                    await self.suspect(ref)
                continue
            except RayActorError as error:
                await until_gone(self._pictures.get(ref))
                self._lost(ref, error)
                return
            if self._actors.get(ref) is actor:
                self._took(ref, picture)
                if picture.report.state is ModelState.WARMING:
                    self._pool.on_warming(ref, time.time())
                self._pool.on_report(ref, picture.report, time.time())

    def _took(self, ref: HostRef, picture: HostPicture) -> None:
        self._pictures[ref] = picture

    def _lost(self, ref: HostRef, cause: BaseException) -> None:
        if self._actors.pop(ref, None) is not None:
            self._pictures.pop(ref, None)
            self._pool.on_lost(ref, said(cause), time.time())

    async def _begin(self) -> None:
        await self._adopt()
        self._lend_cores(False)  # our predecessor may have died in a load
        if not self._actors:  # else we are a successor: what is resident now is what was wanted since
            for model in self._plan.preload:
                self._pool.ask_load(model, time.time())
        self._started = True
        self._spawn(self._tick())

    async def _adopt(self) -> None:
        """Take over the hosts that outlived our predecessor; those that serve first: nothing may cost them a place."""
        found: list[tuple[Any, HostPicture]] = []
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] != NAMESPACE or not entry["name"].startswith("host:"):
                continue
            try:
                actor = ray.get_actor(entry["name"], namespace=NAMESPACE)
                picture: HostPicture = await asyncio.wait_for(actor.picture.remote(), ANSWER_SECONDS)
            except (RayError, ValueError, TimeoutError):
                continue
            if picture.spec.ref.model == prepared.MODEL:  # made again when there is time
                ray.kill(actor)
            else:
                found.append((actor, picture))
        for actor, picture in sorted(found, key=lambda one: NEAREST_FIRST.index(one[1].report.state)):
            ref = picture.spec.ref
            self._actors[ref] = actor
            self._took(ref, picture)
            self._pool.on_adopted(ref, picture.report, time.time(), self._device_of(picture.spec))
            self._spawn(self._watch(ref, actor))

    def _device_of(self, spec: HostSpec) -> str:
        return next(name for name, _, cuda in self._plan.devices if cuda == spec.device_index)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self._pool.on_tick(time.time())
            except Exception as error:  # noqa: BLE001 — boundary: one tick that fails must not be the last one
                self._log.error("tick_failed", error=repr(error))

    # -- small ---------------------------------------------------------------------------

    def _answer(self, ticket: str, answer: Placement | OrchestratorError) -> None:
        future = self._answers.get(ticket)
        if future is not None and not future.done():
            future.set_result(answer)

    def _count(self, model: str, kind: str, seconds: float) -> None:
        self._metrics.switches.labels(model, kind).inc()
        self._metrics.switch_seconds.labels(model, kind).inc(seconds)
        self._spawn(push(self._name, self._metrics.registry))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = start_detached(work)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._log.error("task_failed", error=repr(task.exception()))


def close_hosts() -> None:
    """Have the running controller's hosts put their KV on disk, if there is one; within ``CLOSE_SECONDS``."""
    with contextlib.suppress(RayError, ValueError, TimeoutError):
        ray.get(ray.get_actor(NAME, namespace=NAMESPACE).close_hosts.remote(), timeout=CLOSE_SECONDS + 1)


def get_controller(plan: PoolPlan) -> Any:
    """The controller's handle; started if there is none. Ray restarts it whenever it dies."""
    return (
        ray.remote(Controller)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=10_000,
        )
        .remote(plan)
    )
