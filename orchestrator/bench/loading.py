"""Owns ``bench engine``'s sections on what a fast step costs at the load: measuring, reordering, compiling.

Every load is one of a fresh process, as a host's is.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orchestrator.bench.report import Section, section
from orchestrator.bench.workers import measured

SAMPLES = 3


def run(path: Path, shared: Path) -> list[Section]:
    """For the model in ``path``; afterwards its compiled layers are in ``shared``."""
    first = _load(path, shared, compiled=True, settle=True)
    with tempfile.TemporaryDirectory(prefix="orchestrator-bench-") as directory:
        colds = [_load(path, Path(directory) / str(number)) for number in range(SAMPLES)]
        plain = [_load(path, Path(directory) / "0") for _ in range(SAMPLES)]
        cached = [_load(path, shared, compiled=True) for _ in range(SAMPLES)]
    colds_s, plain_s, cached_s = ([each["load"] for each in loads] for loads in (colds, plain, cached))
    return [
        section(
            "load_cost_cold",
            list(zip(colds_s, plain_s, strict=True)),
            "a load that goes by what an earlier one found",
            "s",
            limit=f"measuring forms, threads and peak; compiling layers takes another process {first['settle']:.0f} s "
            "beside the requests",
        ),
        section(
            "load_cost_cached",
            list(zip(cached_s, plain_s, strict=True)),
            "the same with plain layers",
            "s",
            limit=f"loading the library; layers {cached[0]['layers']}",
        ),
    ]


def _load(path: Path, shared: Path, *, compiled: bool = False, settle: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = measured(
        "orchestrator.bench.loading", str(path), str(shared), "compiled" if compiled else "", "settle" if settle else ""
    )
    return found


# -- in the subprocess ------------------------------------------------------------------------


def _measure(path: Path, shared: Path, compiled: str, settle: str) -> dict[str, Any]:
    from engine.protocol import Places
    from engine.torch_engine import TorchEngine
    from orchestrator.bench import engines

    places = Places(recipes=str(shared / "recipes"), code=str(shared / "layers") if compiled else "")
    begin = time.monotonic()
    engine = TorchEngine(path, engines.MEMORY_BYTES, engines.limits(), places=places)
    engine.load()
    engine.warm()
    loaded = time.monotonic()
    layers = engine.settle() if settle else engine.stats().layers
    engine.close()
    return {"load": loaded - begin, "settle": time.monotonic() - loaded, "layers": layers}


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])))
