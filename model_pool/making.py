"""Owns how an engine comes into a host's process: what is imported, by which thread, what may not be there."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine.fake import FakeEngine
from engine.protocol import Engine
from model_pool.host_words import HostSpec

Result = TypeVar("Result")

LOWEST_PRIORITY = 19


def make_engine(spec: HostSpec) -> Engine:
    """Nothing is read yet."""
    if spec.fake is not None:
        return FakeEngine(spec.limits, spec.fake)
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if spec.device_index is None else str(spec.device_index)
    from engine.torch_engine import TorchEngine  # torch: only here, and only in a host's process

    return TorchEngine(Path(spec.path), spec.memory_bytes, spec.limits, spec.dtype, spec.places)


def prepare() -> int:
    """What every load needs first; bytes the process holds then."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # prepared processes are of the CPU
    from engine import process

    return process.prepare()


def assert_clean(spec: HostSpec) -> None:
    """EngineError that names what an earlier model has left here."""
    if spec.fake is None:
        from engine import process

        process.assert_clean()


async def in_load_thread(work: Callable[[], Result]) -> Result:
    """Run ``work`` in a thread of the lowest priority that ends with it: a priority given up is not given back."""
    future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 — carried to the awaiting task, whatever it is
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await future
