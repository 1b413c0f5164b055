"""Owns the plain data that goes to an engine host and comes from it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.fake import FakeSettings
from engine.protocol import NOWHERE, EngineLimits, EngineStats, LoadReport, Places
from model_pool.effects import HostRef, HostReport
from policies.errors import OrchestratorError


@dataclass(frozen=True, slots=True)
class HostSpec:
    """All that a host must know to load its model."""

    ref: HostRef
    path: str  # model directory; unused by the fake engine
    memory_bytes: int
    limits: EngineLimits
    dtype: str = "float32"
    problem: str = ""  # why the directory could not be prepared: the load fails with it
    device_index: int | None = None  # the CUDA device it may see; None: CPU
    places: Places = NOWHERE
    fake: FakeSettings | None = None  # the fake engine instead of a real one
    ticket_seconds: float = 10.0  # how long an unredeemed ticket holds up draining


@dataclass(frozen=True, slots=True)
class HostPicture:
    """Everything about a host, for its controller and for people."""

    spec: HostSpec
    report: HostReport
    stats: EngineStats
    loaded: LoadReport | None
    pid: int
    cause: OrchestratorError | None = None
    node: str = ""  # Ray's id of the machine the process runs on
    born: float = 0.0  # when the process began, seconds since the epoch: a pid may come to be another's
