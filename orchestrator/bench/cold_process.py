"""Owns the processes whose start ``bench swap`` measures. What they tell are moments of ``time.monotonic()``, which all
processes share: when the imports were done, the model was loaded, it was warm, and the first token was there.

They import what they need when they need it, and nothing else: each import counts.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 12

Moments = dict[str, float]


def first(path: Path, recipes: Path) -> Moments:
    """The first load of a model on a machine; leaves its recipe, as a service's first life does."""
    shutil.rmtree(recipes)
    engine, moments = _load_and_answer(path, recipes)
    engine.sleep()  # writes into the recipe which steps there were
    assert list(recipes.iterdir()), "the load has left no recipe"
    return moments


def known(path: Path, recipes: Path) -> Moments:
    """By the recipe of an earlier load, which must be there."""
    assert list(recipes.iterdir()), "there is no recipe to load by"
    return _load_and_answer(path, recipes)[1]


def floor(path: Path, recipes: Path) -> Moments:
    """Imports, and the same bytes read into memory."""
    import tokenizers  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    AutoModelForCausalLM._model_mapping[type(config)]  # the model's own module is an import too
    for file in sorted(path.glob("*.safetensors")):
        buffer = bytearray(file.stat().st_size)
        with file.open("rb", buffering=0) as source:
            view = memoryview(buffer)
            while view and (count := source.readinto(view)):
                view = view[count:]
    return {"token": time.monotonic()}


def prepared(path: Path, recipes: Path) -> None:
    """Everything imported as in a prepared host; the model when it is told to."""
    from engine import process
    from orchestrator.bench.asking import obey
    from orchestrator.bench.engines import in_thread

    in_thread(process.prepare)
    obey({"load": lambda _: in_thread(lambda: known(path, recipes))})


def _load_and_answer(path: Path, recipes: Path) -> tuple[Any, Moments]:
    from engine.protocol import Places
    from engine.torch_engine import TorchEngine
    from orchestrator.bench import engines

    moments = {"imports": time.monotonic()}
    engine = TorchEngine(path, engines.MEMORY_BYTES, engines.limits(), places=Places(recipes=str(recipes)))
    engine.load()
    moments["load"] = time.monotonic()
    engine.warm()
    moments["warm-up"] = time.monotonic()
    engines.answer(engine, engines.tokens(1, PROMPT_TOKENS), 1)
    moments["token"] = time.monotonic()
    return engine, moments


def main(what: str, path: Path, recipes: Path) -> None:
    from orchestrator.bench.engines import in_thread

    if what == "prepared":
        prepared(path, recipes)
    else:
        work = {"first": first, "known": known, "floor": floor}[what]
        print(json.dumps(in_thread(lambda: work(path, recipes))))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
