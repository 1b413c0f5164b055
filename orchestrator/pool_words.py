"""Owns the plain data that goes to the controller and comes from it."""

from __future__ import annotations

from dataclasses import dataclass

from model_pool.effects import ModelSpec, ModelStatus
from model_pool.host_words import HostPicture, HostSpec
from model_pool.ledger import DeviceBooks
from model_pool.slot import PoolSettings


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """All that a controller must know; plain data, so that a restarted one has it again."""

    models: tuple[ModelSpec, ...]
    hosts: tuple[tuple[str, HostSpec], ...]  # model → spec with a placeholder ref
    devices: tuple[tuple[str, int, int | None], ...]  # name, budget bytes, CUDA index or None
    policy: str
    settings: PoolSettings
    preload: tuple[str, ...]
    log_path: str
    kv_disk: tuple[str, int] | None = None  # directory and bytes; None: there is no disk tier


@dataclass(frozen=True, slots=True)
class ModelPicture:
    """One host of a model for ``ps`` and ``/metrics``."""

    status: ModelStatus
    host: HostPicture | None

    @property
    def number(self) -> int:
        return int(self.status.host.rsplit(":", 1)[1])


@dataclass(frozen=True, slots=True)
class PoolPicture:
    models: tuple[ModelPicture, ...]
    books: tuple[DeviceBooks, ...]
    pid: int  # of the controller


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What became of the KV of sessions that are gone."""

    blocks: int  # on the devices and in host memory
    not_reached: tuple[str, ...]  # why, of each host
