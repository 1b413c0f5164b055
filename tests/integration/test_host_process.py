"""The process of an engine host: prepared, loaded in the background, cut down in deep sleep, used again only if clean.

Each test has a process of its own: what earlier models left in this one is what they look for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engine.memory import PROCESS_ENVIRONMENT
from tests.engine_helpers import save_tiny

MIB = 2**20
BREAKS = {
    "test_background_load": (
        "model_pool/host.py",
        "self._engine = self._loop = self._loaded = None",
        "self._loop = self._loaded = None",
    ),
    "test_a_prepared_process": (
        "model_pool/host.py",
        "if self._state is not S.COLD or self._engine",
        "if False and self._engine",
    ),
    "test_everything_a_model": (
        "engine/process.py",
        "EngineCore, Weights, Runner, KVMemory,",
        "EngineCore, Weights, Runner,",
    ),
}
BEGIN = """
    import asyncio, gc, json, sys
    from pathlib import Path
    from engine.memory import held_bytes
    from engine.protocol import EngineLimits, Places
    from model_pool.effects import HostRef
    from model_pool.host import EngineHost
    from model_pool.host_words import HostPicture, HostSpec
    from policies.errors import OrchestratorError
    from tests.engine_helpers import request

    LIMITS = EngineLimits(256, max_running=4)
    SPEC = HostSpec(HostRef("m", 0, 1), sys.argv[1], 4 * 2**30, LIMITS, places=Places(recipes=sys.argv[2]))
    EMPTY = HostSpec(HostRef("(prepared)", 1, 0), "", 0, LIMITS)

    def good(picture):
        assert isinstance(picture, HostPicture), picture
        return str(picture.report.state), picture.report

    async def answer(host, name):
        outputs = host.open("gateway")
        await anext(outputs)
        refused = await host.submit("gateway", request(name, range(20, 50), 8, ignore_eos=True), None)
        assert refused is None, refused
        said = []
        async for batch in outputs:
            said += [token for output in batch for token in output.token_ids]
            if any(output.final for output in batch):
                return said

    async def down(host):
        assert await host.drain(()) is None
        return good(await host.sleep())
"""


def in_process(code: str, *arguments: Path) -> Any:
    """What a coroutine ``main`` returns that is run in a fresh process."""
    program = textwrap.dedent(BEGIN) + textwrap.dedent(code) + "\nprint(json.dumps(asyncio.run(main())))"
    ended = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, **PROCESS_ENVIRONMENT}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """110 MB of weights: what stays of them is seen in the process's memory."""
    sizes = {"vocab_size": 320, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    return save_tiny(AutoConfig.for_model("llama", **sizes, **heads), tmp_path_factory.mktemp("model"))


def test_background_load_deep_sleep_and_back_with_the_same_answers(model: Path, tmp_path: Path) -> None:
    told = in_process(
        """
        async def main():
            host = EngineHost(SPEC)
            states, held, said = [], [], []

            def saw(picture):
                state, report = good(picture)
                gc.collect()
                states.append(state)
                held.append([held_bytes(), report.memory_bytes, report.residual_bytes])

            saw(await host.load(True))  # the first load here: it can only get as far as the process
            saw(await host.load())
            said.append(await answer(host, "a"))
            await down(host)
            saw(await host.picture())
            saw(await host.deep_sleep())
            saw(await host.load(True))  # known now
            saw(await host.wake())
            said.append(await answer(host, "b"))
            await down(host)
            saw(await host.deep_sleep())
            saw(await host.load())
            said.append(await answer(host, "c"))
            return states, held, said
        """,
        model,
        tmp_path,
    )
    states, held, said = told
    assert states == ["deep_sleep", "ready", "sleeping", "deep_sleep", "sleeping", "ready", "deep_sleep", "ready"]
    assert said[0] == said[1] == said[2] and len(said[0]) == 8
    empty = held[0][0]
    for state, (now, booked, residual) in zip(states, held, strict=True):
        if state == "ready":
            assert now - empty > 90 * MIB, "its weights are there"
        else:
            assert now - empty < 60 * MIB, (state, told)
            assert booked == residual and abs(booked - now) < 20 * MIB


def test_a_prepared_process_becomes_the_host_of_one_model_once(model: Path, tmp_path: Path) -> None:
    held, states, refused = in_process(
        """
        async def main():
            host = EngineHost(EMPTY)
            held = await host.prepare()
            assert await host.become(SPEC) is None
            states = [good(await host.load())[0]]
            assert (await host.picture()).spec.ref == SPEC.ref
            assert len(await answer(host, "a")) == 8
            again = await host.become(SPEC)
            return held, states, again.message
        """,
        model,
        tmp_path,
    )
    assert 100 * MIB < held < 500 * MIB
    assert states == ["ready"] and "it has a model already" in refused


def test_a_process_with_something_stale_in_it_is_not_used_again(model: Path, tmp_path: Path) -> None:
    message, state = in_process(
        """
        async def main():
            host = EngineHost(SPEC)
            good(await host.load())
            await down(host)
            left = host._engine
            error = await host.deep_sleep()
            return error.message, good(await host.picture())[0]
        """,
        model,
        tmp_path,
    )
    assert "not clean: it holds" in message and "1 TorchEngine" in message and "2 KVMemory" in message
    assert state == "sleeping", "the pool ends it"


def test_everything_a_model_could_leave_behind_is_found(tmp_path: Path) -> None:
    found = in_process(
        """
        import torch
        from transformers.modeling_utils import AttentionInterface
        from engine import process
        from engine.attention import kv, paged
        from engine.context import Context
        from engine.detokenizer import TextStream
        from policies.errors import EngineError

        def said():
            try:
                process.assert_clean()
            except EngineError as error:
                return error.message
            return "clean"

        async def main():
            found = [said()]
            left = kv.KVMemory({0: kv.LayerShape(1, 8, 8)}, 16, torch.float32, "cpu")
            found.append(said())
            left = Context(request("x", [1, 2]), b"", 0.0)
            found.append(said())
            left = TextStream.__new__(TextStream)
            found.append(said())
            left = None
            token = paged.current_step.set(paged.Probe())
            found.append(said())
            paged.current_step.reset(token)
            torch.set_default_dtype(torch.bfloat16)
            found.append(said())
            torch.set_default_dtype(torch.float32)
            AttentionInterface.register(paged.NAME, print)
            found.append(said())
            AttentionInterface.register(paged.NAME, paged.paged_attention)
            return [*found, said()]
        """,
        tmp_path,
        tmp_path,
    )
    wanted = ["KVMemory", "1 Context", "1 TextStream", "masks and blocks", "dtype torch.bfloat16", "another attention"]
    assert found[0] == found[-1] == "clean"
    assert all(name in message for name, message in zip(wanted, found[1:-1], strict=True)), found
