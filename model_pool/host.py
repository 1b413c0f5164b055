"""Owns the engine host: the Ray actor around one engine. It keeps its own state, and outlives the controller.

Methods answer with an OrchestratorError as a value instead of raising it: Ray would wrap it in classes of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil
import ray

from engine.loop import EngineLoop
from engine.memory import PROCESS_ENVIRONMENT, held_bytes
from engine.protocol import Engine, EngineLimits, EngineStats, GenerationRequest, LoadReport, Output
from engine.snapshot import EngineSnapshot
from model_pool.channels import Channels
from model_pool.effects import HostRef, HostReport
from model_pool.host_words import HostPicture, HostSpec
from model_pool.making import assert_clean, in_load_thread, make_engine, prepare
from model_pool.states import MODEL_EDGES
from policies.errors import EngineError, HostUnavailable, LoadFailed, NotKnownYet, OrchestratorError
from policies.types import ModelState, check_edge

Result = TypeVar("Result")

NAMESPACE = "orchestrator"
SILENCE_SECONDS = 3.0  # a gateway that has not been heard of for this long is dead
REPORT_SECONDS = 1.0  # how long a watch call waits for a change
LOWEST_PRIORITY = 19
REDEEMED_KEPT = 512
CLEAN_SECONDS = 2.0  # that what a model has left may take to go

S = ModelState
UP = (S.READY, S.DRAINING, S.SLEEPING)
NO_ENGINE = (S.COLD, S.LOADING, S.FAILED, S.DEEP_SLEEP)


@dataclass(slots=True)
class _Draining:
    """What a draining host still waits for."""

    tickets: set[str]
    until: float  # monotonic seconds; tickets not redeemed by then are forfeit
    done: asyncio.Event = field(default_factory=asyncio.Event)


class EngineHost:
    """See the module's text. One asyncio loop owns all state here; the engine has a thread of its own."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec
        self._state = S.COLD
        self._engine: Engine | None = None  # from the load on, until deep sleep
        self._loop: EngineLoop | None = None
        self._loaded: LoadReport | None = None
        self._cause: OrchestratorError | None = None
        self._channels = Channels(SILENCE_SECONDS)
        self._redeemed: deque[str] = deque(maxlen=REDEEMED_KEPT)
        self._last_used = time.time()
        self._keep_alive_seconds: float | None = None  # of the last request
        self._born = psutil.Process().create_time()
        self._node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        self._stats = EngineStats()
        self._looked_at = time.monotonic()
        self._residual_bytes = 0
        self._process_bytes: int | None = None  # with everything imported and no model
        self._in_background = False
        self._busy = False  # since it last said that it is idle
        self._draining: _Draining | None = None
        self._changed = asyncio.Event()
        self._submitting: set[asyncio.Future[OrchestratorError | None]] = set()
        self._unknown: set[tuple[str, int]] = set()  # owned by a gateway, but not the engine's when last looked
        self._reaper: asyncio.Future[None] | None = None

    # -- life ---------------------------------------------------------------------

    async def prepare(self) -> int:
        """Without a model yet: do what every load needs first. Bytes the process holds now."""
        return await in_load_thread(prepare)

    async def become(self, spec: HostSpec) -> OrchestratorError | None:
        """A prepared process is the host of a model from now on."""
        if self._state is not S.COLD or self._engine is not None:
            return HostUnavailable(f"{self._spec.ref.name} is {self._state}: it has a model already")
        try:
            assert_clean(spec)
        except EngineError as error:
            return error
        self._spec = spec
        return None

    async def load(self, asleep: bool = False) -> HostPicture | OrchestratorError:
        """Read the weights and measure, at the lowest OS priority so that neighbours do not feel it.

        Args:
            asleep: take no memory of a ready host. Ends SLEEPING; or, when this is the first load here and would have
                to measure, in DEEP_SLEEP with everything imported.
        """
        self._move(S.LOADING)
        self._in_background = asleep
        self._asyncio = asyncio.get_running_loop()
        if self._reaper is None:
            self._reaper = asyncio.ensure_future(self._watch_gateways())
        try:
            if self._spec.problem:
                raise LoadFailed(self._spec.problem)
            self._loaded = await in_load_thread(lambda: self._make_and_load(asleep))
            if self._loaded is None or asleep:
                return await self._loaded_asleep()
            self._residual_bytes = self._loaded.residual_bytes
            self._move(S.WARMING)
            self._start_loop()
            await self._call(lambda engine: engine.warm())
        except OrchestratorError as error:
            return self._failed(error)
        except Exception as error:  # noqa: BLE001 — boundary: whatever a model's loading raises fails this model alone
            return self._failed(LoadFailed(f"{type(error).__name__}: {error}"))
        self._move(S.READY)
        return await self.picture()

    def _make_and_load(self, asleep: bool) -> LoadReport | None:
        """In the load's thread. None: it cannot be loaded asleep, and there is no engine."""
        engine = make_engine(self._spec)
        self._process_bytes = self._measure()
        try:
            report = engine.load(asleep=asleep)
        except NotKnownYet:
            return None
        self._engine = engine
        return report

    async def _loaded_asleep(self) -> HostPicture:
        self._in_background = False
        self._residual_bytes = self._measure()
        if self._loaded is not None:
            self._start_loop()
        self._move(S.DEEP_SLEEP if self._loaded is None else S.SLEEPING)
        return await self.picture()

    def _start_loop(self) -> None:
        assert self._engine is not None
        self._loop = EngineLoop(self._engine, self._from_engine, self._crash)
        self._loop.start()

    async def drain(self, tickets: tuple[str, ...]) -> OrchestratorError | None:
        """Take nothing new but these tickets; returns when everything taken is finished."""
        if self._state is S.READY:
            self._move(S.DRAINING)
            unredeemed = set(tickets) - set(self._redeemed)
            self._draining = _Draining(unredeemed, time.monotonic() + self._spec.ticket_seconds)
        elif self._state is not S.DRAINING:
            return HostUnavailable(f"{self._spec.ref.name} is {self._state}: nothing to drain")
        draining = self._draining
        if draining is not None:  # None: drained already, and asked again by a restarted controller
            self._look_drained()
            await draining.done.wait()
        return None

    async def forfeit(self, ticket: str) -> None:
        """Draining: this ticket's caller has left; do not wait for it."""
        if self._draining is not None:
            self._draining.tickets.discard(ticket)
            self._look_drained()

    async def sleep(self) -> HostPicture | OrchestratorError:
        """Give weights and KV back, and measure what is left."""
        if self._state is S.SLEEPING:
            return await self.picture()
        if self._state is not S.DRAINING or self._channels.in_flight:
            return HostUnavailable(f"{self._spec.ref.name} is {self._state}, {self._channels.in_flight} in flight")
        try:
            await self._call(lambda engine: engine.sleep())
        except OrchestratorError as error:
            return error
        self._residual_bytes = self._measure()
        self._stats = await self._call(lambda engine: engine.stats())  # else the last busy ones stand till it wakes
        self._move(S.SLEEPING)
        return await self.picture()

    async def wake(self) -> HostPicture | OrchestratorError:
        if self._state is S.READY:
            return await self.picture()
        if self._state is not S.SLEEPING:
            return HostUnavailable(f"{self._spec.ref.name} is {self._state}: cannot wake")
        self._move(S.WAKING)
        try:
            await self._call(lambda engine: engine.wake())
        except HostUnavailable as error:
            self._move(S.SLEEPING)
            return error
        except EngineError as error:  # a wrong canary, or worse: these weights must not answer anybody
            self._cause = error
            self._move(S.QUARANTINED)
            return error
        self._move(S.READY)
        return await self.picture()

    async def deep_sleep(self) -> HostPicture | OrchestratorError:
        """Let go of the model: what KV is worth it goes to disk, and the process is as before its load."""
        if self._state is S.DEEP_SLEEP:
            return await self.picture()
        if self._state is not S.SLEEPING or self._loop is None:
            return HostUnavailable(f"{self._spec.ref.name} is {self._state}: no deep sleep from there")
        await self._call(lambda engine: engine.close())
        await asyncio.to_thread(self._loop.stop)
        self._engine = self._loop = self._loaded = None
        error = await self._until_clean()
        if error is not None:
            return error
        self._stats = EngineStats()
        self._residual_bytes = self._measure()
        self._move(S.DEEP_SLEEP)
        return await self.picture()

    async def lend_core(self, lent: bool) -> None:
        """A load runs on this machine, or none any more."""
        if self._loop is not None:
            await self._call(lambda engine: engine.lend_core(lent))

    async def _until_clean(self) -> EngineError | None:
        """A thread that has just done its last work may hold that for a moment more."""
        until = time.monotonic() + CLEAN_SECONDS
        while True:
            try:
                assert_clean(self._spec)
                return None
            except EngineError as error:
                if time.monotonic() >= until:
                    return error
            await asyncio.sleep(0.1)

    async def resize_kv(self, full: bool) -> OrchestratorError | None:
        """Let the KV pool have all that was promised, or no more than it needs now."""
        try:
            if self._state is S.READY and self._loaded is not None:
                num_bytes = self._loaded.kv_bytes if full else 0
                await self._call(lambda engine: engine.resize_kv(num_bytes))
        except OrchestratorError as error:
            return error
        return None

    async def check(self) -> OrchestratorError | None:
        """Do the engine's books balance?"""
        try:
            await self._call(lambda engine: engine.check())
        except OrchestratorError as error:
            return error
        return None

    # -- what gateways call ---------------------------------------------------------

    async def open(self, gateway: str) -> AsyncIterator[list[Output]]:
        """The one stream of a gateway: a list of outputs per step, until the gateway falls silent."""
        channel = self._channels.open(gateway, time.monotonic())
        yield []  # tells the gateway that the channel is open
        async for batch in channel.batches():
            yield batch

    async def heartbeat(self, gateway: str) -> bool:
        return self._channels.beat(gateway, time.monotonic())

    async def submit(self, gateway: str, request: GenerationRequest, ticket: str | None) -> OrchestratorError | None:
        """Begin a generation; its outputs come through the gateway's stream.

        When its client leaves, Ray cancels this call, at any of its awaits. What has begun is carried through all the
        same: the gateway's ``cancel`` finds it then. Cut off half way, a generation that the engine never heard of
        stayed in flight for ever, and the model could not drain.
        """
        work = asyncio.ensure_future(self._submit(gateway, request, ticket))
        self._submitting.add(work)  # the loop keeps weak references only
        work.add_done_callback(self._submitting.discard)
        return await asyncio.shield(work)

    async def _submit(self, gateway: str, request: GenerationRequest, ticket: str | None) -> OrchestratorError | None:
        refusal = self._refuse(gateway, ticket)
        if refusal is not None:
            return refusal
        key = (request.request_id, request.generation)
        self._redeem(ticket)
        self._busy = True
        self._channels.own(gateway, key)  # before the engine can answer; it also holds up draining
        try:
            await self._call(lambda engine: engine.add(request))
        except OrchestratorError as error:
            self._channels.disown(key)
            self._look_drained()
            return error
        self._last_used = time.time()
        self._keep_alive_seconds = request.keep_alive_seconds
        return None

    async def cancel(self, request_id: str, generation: int, reason: str) -> bool:
        self._channels.disown((request_id, generation))
        known: bool = await self._call(lambda engine: engine.cancel(request_id, generation, reason))
        self._look_drained()
        return known

    # -- what the controller and people read -------------------------------------------

    async def picture(self) -> HostPicture:
        return HostPicture(
            self._spec, self._report(), self._stats, self._loaded, os.getpid(), self._cause, self._node, self._born
        )

    async def watch(self) -> HostPicture:
        """The picture, after the next change of state, the end of the last generation, or ``REPORT_SECONDS``."""
        self._changed.clear()
        due = self._looked_at + REPORT_SECONDS - time.monotonic()
        try:
            await asyncio.wait_for(self._changed.wait(), max(0.0, due))
        except TimeoutError:  # looked at by the clock: at the end of generations it would always be idle
            self._looked_at = time.monotonic()
            if self._state in (S.READY, S.DRAINING):
                self._stats = await self._call(lambda engine: engine.stats())
        return await self.picture()

    async def snapshot(self) -> EngineSnapshot | OrchestratorError:
        """Who holds this engine's memory; asleep too. HostUnavailable while there is no engine to ask."""
        if self._state in NO_ENGINE:
            return HostUnavailable(f"{self._spec.ref.name} is {self._state}: there is no engine to ask")
        try:
            snapshot: EngineSnapshot = await self._call(lambda engine: engine.snapshot())
        except OrchestratorError as error:
            return error
        return snapshot

    async def kv_sessions(self) -> tuple[str, ...]:
        """Whose KV may be here, or on this node's disk."""
        if self._state in NO_ENGINE:
            return ()
        found: tuple[str, ...] = await self._call(lambda engine: engine.sessions())
        return found

    async def forget_sessions(self, sessions: tuple[str, ...]) -> int | OrchestratorError:
        """Drop the KV that only these sessions (``tenant/session``) left; asleep too. How many blocks there were."""
        if self._state in NO_ENGINE:
            return 0
        try:
            dropped: int = await self._call(lambda engine: sum(map(engine.forget_session, sessions)))
        except OrchestratorError as error:
            return error
        return dropped

    async def close(self) -> None:
        """The process is about to be ended: put on disk what KV is worth it."""
        if self._state in UP:
            await self._call(lambda engine: engine.close())

    def _report(self) -> HostReport:
        awake = self._state in (S.READY, S.DRAINING)
        held = (awake or self._state in (S.LOADING, S.WARMING, S.WAKING)) and not self._in_background
        return HostReport(
            state=self._state,
            memory_bytes=self._promised() if held else self._residual_bytes,
            measured_bytes=held_bytes() if awake and self._spec.fake is None else 0,
            process_bytes=self._process_bytes,
            promised_residual_bytes=None if self._loaded is None else self._loaded.residual_bytes,
            asleep=self._in_background,
            residual_bytes=self._residual_bytes,
            in_flight=self._channels.in_flight,
            last_used=self._last_used,
            redeemed=tuple(self._redeemed),
            keep_alive_seconds=self._keep_alive_seconds,
        )

    def _promised(self) -> int:
        """Device bytes this host may come to hold: KV is booked whole, whether filled or not."""
        loaded = self._loaded
        if loaded is None:
            return self._spec.memory_bytes
        return loaded.weight_bytes + loaded.kv_bytes + loaded.peak_bytes + loaded.residual_bytes

    def _measure(self) -> int:
        return self._spec.fake.residual_bytes if self._spec.fake is not None else held_bytes()

    # -- inside -------------------------------------------------------------------------

    def _refuse(self, gateway: str, ticket: str | None) -> OrchestratorError | None:
        if not self._channels.knows(gateway):
            return HostUnavailable(f"gateway {gateway} has no open stream on {self._spec.ref.name}")
        if self._state is S.READY:
            return None
        if self._draining is not None and self._state is S.DRAINING and ticket in self._draining.tickets:
            return None
        return HostUnavailable(f"{self._spec.ref.name} is {self._state}")

    def _redeem(self, ticket: str | None) -> None:
        if ticket is not None:
            self._redeemed.append(ticket)
            if self._draining is not None:
                self._draining.tickets.discard(ticket)

    def _look_drained(self) -> None:
        """After anything ended: an idle host says so at once, for it may be wanted as a victim."""
        if self._channels.in_flight:
            return
        if self._busy:
            self._busy = False
            self._changed.set()
        draining = self._draining
        if draining is None:
            return
        if not draining.tickets or time.monotonic() >= draining.until:
            draining.done.set()
            self._draining = None

    def _move(self, new: ModelState) -> None:
        check_edge(MODEL_EDGES, self._state, new, self._spec.ref.name)
        self._state = new
        self._changed.set()

    def _failed(self, error: OrchestratorError) -> OrchestratorError:
        self._cause = error
        self._in_background = False
        self._move(S.FAILED)
        return error

    async def _call(self, command: Callable[[Engine], Any]) -> Any:
        if self._loop is None:
            raise HostUnavailable(f"{self._spec.ref.name} is {self._state}: there is no engine to ask")
        return await asyncio.wrap_future(self._loop.call(command))

    def _from_engine(self, outputs: Sequence[Output]) -> None:
        self._asyncio.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: Sequence[Output]) -> None:
        self._last_used = time.time()
        self._channels.deliver(outputs)
        self._look_drained()

    def _crash(self, error: BaseException) -> None:
        """The engine's thread died: so must we, and the controller will see it."""
        print(f"{self._spec.ref.name}: engine crashed: {type(error).__name__}: {error}", flush=True)
        os._exit(1)

    async def _watch_gateways(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_SECONDS / 6)
            for request_id, generation in self._channels.reap(time.monotonic()):
                await self.cancel(request_id, generation, f"its gateway was silent for {SILENCE_SECONDS} s")
            if self._channels.in_flight:
                await self._reconcile()
            self._look_drained()

    async def _reconcile(self) -> None:
        """Let go of generations that the engine has not known at two looks: they never end, and would hold up draining.

        There should be none; should a path be missed, it costs a second, not the model.
        """
        live = set(await self._call(lambda engine: engine.live()))
        unknown = self._channels.owned() - live
        for key in unknown & self._unknown:
            self._channels.disown(key)
        self._unknown = unknown


def start_host(spec: HostSpec) -> Any:
    """Create the detached, named actor. It requests no resources: the controller's ledger is the only accountant."""
    actor = ray.remote(EngineHost).options(
        name=spec.ref.actor,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        num_gpus=0,
        max_restarts=0,
        max_concurrency=10_000,
        runtime_env={} if spec.fake else {"env_vars": PROCESS_ENVIRONMENT},  # a process of its own: half a second more
    )
    return actor.remote(spec)


def start_prepared(ref: HostRef) -> Any:
    """The same for a process without a model; it is to ``prepare``, and later to ``become`` the host of one."""
    return start_host(HostSpec(ref, "", 0, EngineLimits(max_model_len=16)))
