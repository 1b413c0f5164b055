"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest_redis import raw, redis_server, store
from tests.service import RunningService

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRITON_INTERPRET"] = "1"  # Triton decides when it is first imported, and transformers may be the first

__all__ = ["fake_service", "raw", "redis_server", "store"]


@pytest.fixture(scope="session")
def fake_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One whole service with fake models: real Ray, real Redis, real HTTP."""
    service = RunningService(Path(__file__).parent / "data" / "fake.yaml", tmp_path_factory.mktemp("service"))
    service.start()
    yield service
    service.stop()
