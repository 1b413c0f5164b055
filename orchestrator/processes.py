"""Owns the end of a host's process: its bytes are free when it is gone, and not before."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError

from model_pool.host_words import HostPicture

DEATH_SECONDS = 10.0  # that a killed process may take to be gone
SAME_BIRTH_SECONDS = 2.0  # the system derives a process's birth from a clock that is set now and then


async def until_dead(actor: Any, picture: HostPicture | None) -> bool:
    """Wait until the process of a killed actor is gone, so that its memory is; False when it is not."""
    until = time.monotonic() + DEATH_SECONDS
    while time.monotonic() < until:
        try:
            await asyncio.wait_for(actor.picture.remote(), 1.0)
            await asyncio.sleep(0.05)
        except TimeoutError:
            continue
        except RayActorError:
            return await until_gone(picture)
    return False


async def until_gone(picture: HostPicture | None) -> bool:
    """Ray calls an actor dead as soon as it has decided so; its process, and its memory, may be there for seconds more.

    Only a process on our own machine can be looked at; of another's we have Ray's word.
    """
    if picture is None or picture.node != ray.get_runtime_context().get_node_id():
        return True
    until = time.monotonic() + DEATH_SECONDS
    while time.monotonic() < until:
        try:
            process = psutil.Process(picture.pid)
            another = abs(process.create_time() - picture.born) > SAME_BIRTH_SECONDS
            if another or process.status() == psutil.STATUS_ZOMBIE:
                return True
            process.kill()
        except psutil.Error:
            return True
        await asyncio.sleep(0.02)
    return False
