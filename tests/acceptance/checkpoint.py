"""A generation survives the death of its process: checkpointed, killed -9, gone on with in a new one.

    python -m tests.acceptance.checkpoint            # SmolLM2-135M
    python -m tests.acceptance.checkpoint --quick    # a tiny model of random weights, made on the spot

Greedy and seeded, cut at several tokens: the new process must make the very tokens that an undisturbed run makes after
the cut, and compute (almost) nothing twice. Then every kind of damage to the file must be refused, before anything of
it is used, and the generation must come out the same from its tokens. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.protocol import EngineLimits, GenerationRequest, SamplingParams
from policies.errors import CheckpointRefused
from tests.engine_helpers import cached_model, tiny_llama

NEW_TOKENS = 24
CUTS = (1, 7, 16)
PROMPT_TOKENS = 100
TENANT = "acme"
LIMITS = EngineLimits(max_model_len=256, block_size=16, max_running=4)
CASES = (("greedy", 0.0), ("seeded", 0.9))


def request_of(name: str, temperature: float, tenant: str = TENANT) -> GenerationRequest:
    prompt = tuple(2 + (7 * n * n + 3 * n) % 300 for n in range(PROMPT_TOKENS))
    params = SamplingParams(NEW_TOKENS, 11, temperature=temperature, ignore_eos=True, stop=("\x07never",))
    return GenerationRequest(name, 0, prompt, params, tenant)


# -- damage --------------------------------------------------------------------------------------


def _edited(content: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with its record changed and all checksums of the record right again."""
    from safetensors.numpy import load, save

    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    record = json.loads(metadata["generation"])
    edit(record)
    text = json.dumps(record)
    return save(load(content), {"generation": text, "crc32": str(zlib.crc32(text.encode()))})


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def _identity(name: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda content: _edited(content, lambda record: record["identity"].update({name: value}))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated in its KV": lambda content: content[:-1000],
    "truncated in its header": lambda content: content[:200],
    "empty": lambda _: b"",
    "not a checkpoint": lambda _: b"hello" * 1000,
    "a bit flipped in its KV": lambda content: _flipped(content, len(content) - 5000),
    "a bit flipped in its record": lambda content: _flipped(content, content.index(b"temperature") + 20),
    "of a newer version": lambda content: _edited(content, lambda record: record.update(version=99)),
    "of other weights": _identity("fingerprint", "0" * 64),
    "of another dtype": _identity("dtype", "torch.bfloat16"),
    "of another block size": _identity("block_size", 32),
    "of another tenant": _identity("tenant", "globex"),
    "of another KV layout": _identity("layout_version", 2),
    "whose request is another tenant's": lambda content: _edited(
        content, lambda record: record["request"].update(tenant="globex")
    ),
    "without its request": lambda content: _edited(content, lambda record: record.pop("request")),
    "with an identity of nothing": lambda content: _edited(content, lambda record: record.update(identity=None)),
    "with fewer tokens than KV": lambda content: _edited(
        content, lambda record: record["request"].update(prompt_token_ids=[1, 2, 3], delivered_token_ids=[])
    ),
}


# -- the two processes ---------------------------------------------------------------------------


def loaded(path: Path) -> Any:
    from engine.torch_engine import TorchEngine

    engine = TorchEngine(path, 3 * 2**30, LIMITS)
    engine.load()
    engine.warm()
    return engine


def tokens_of(engine: Any, steps: int | None = None) -> list[int]:
    """What the engine's only generation says, in so many steps or to its end."""
    said: list[int] = []
    while engine.has_work() and (steps is None or len(said) < steps):
        for output in engine.step():
            said += output.token_ids
    return said


def _first_life(path: Path, directory: Path) -> None:
    """Undisturbed runs, then checkpoints in the middle of others; waits to be killed."""
    engine = loaded(path)
    expected = {}
    for case, temperature in CASES:
        engine.add(request_of("whole", temperature, tenant="undisturbed"))
        expected[case] = tokens_of(engine)
        for cut in CUTS:
            engine.add(request_of(f"{case}-{cut}", temperature))
            tokens_of(engine, cut)
            engine.save(f"{case}-{cut}", 0, directory / f"{case}-{cut}.safetensors")
            engine.cancel(f"{case}-{cut}", 0, "on to the next")
    engine.add(request_of("running", 0.0))
    tokens_of(engine, 3)
    print(json.dumps(expected), flush=True)
    while True:
        time.sleep(1)  # in the middle of a generation


def _second_life(path: Path, directory: Path) -> None:
    engine = loaded(path)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        name = line.strip()
        request = engine.restore(directory / f"{name}.safetensors", TENANT)
        found = len(engine._kv_cache.find(engine._contexts[request.request_id, 0])) * LIMITS.block_size
        known = len(request.prompt_token_ids) + len(request.delivered_token_ids)
        said = tokens_of(engine)
        answer = {"delivered": request.delivered_token_ids, "said": said, "recomputed": known - found}
        print(json.dumps(answer), flush=True)


# -- the program -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    what: str
    outcome: str
    good: bool


def run(path: Path) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        expected = _kill_the_first(path, directory)
        return [*_continued(path, directory, expected), *_refused(path, directory, expected)]


def _life(which: str, path: Path, directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.acceptance.checkpoint", which, str(path), str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _said(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"the process ended with {process.wait()}")


def _kill_the_first(path: Path, directory: Path) -> dict[str, list[int]]:
    with _life("first", path, directory) as first:
        expected: dict[str, list[int]] = _said(first)
        os.kill(first.pid, signal.SIGKILL)
        if first.wait(10) != -signal.SIGKILL:
            raise RuntimeError("the first process was not killed")
    return expected


def _continued(path: Path, directory: Path, expected: dict[str, list[int]]) -> list[Row]:
    with _life("second", path, directory) as second:
        _said(second)
        rows = [_gone_on(second, case, cut, expected[case]) for case, _ in CASES for cut in CUTS]
        second.kill()
    return rows


def _gone_on(second: subprocess.Popen[str], case: str, cut: int, expected: list[int]) -> Row:
    assert second.stdin is not None
    second.stdin.write(f"{case}-{cut}\n")
    second.stdin.flush()
    life = _said(second)
    same = life["delivered"] == expected[:cut] and life["said"] == expected[cut:]
    outcome = f"{len(life['said'])} more tokens, {life['recomputed']} computed again"
    return Row(f"{case}, cut after {cut}", outcome, same and life["recomputed"] <= LIMITS.block_size)


def _refused(path: Path, directory: Path, expected: dict[str, list[int]]) -> list[Row]:
    engine = loaded(path)
    cut = CUTS[1]
    whole = (directory / f"greedy-{cut}.safetensors").read_bytes()
    damaged = directory / "damaged.safetensors"
    rows = []
    for what, damage in DAMAGE.items():
        damaged.write_bytes(damage(whole))
        try:
            engine.restore(damaged, TENANT)
        except CheckpointRefused as refusal:
            untouched = engine.stats().kv_blocks_cached == 0 and not engine.has_work()
            rows.append(Row(what, refusal.message, untouched))
        else:
            rows.append(Row(what, "taken", False))
    engine.add(request_of("again", 0.0))
    rows.append(Row("from its tokens", "the same answer", tokens_of(engine) == expected["greedy"]))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model instead of SmolLM2")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as directory:
        rows = run(tiny_llama(Path(directory)) if quick else cached_model("smollm2-135m-instruct"))
    table = Table("WHAT", "OUTCOME", "GOOD")
    for row in rows:
        table.add_row(row.what, row.outcome, "yes" if row.good else "[red]NO[/red]")
    Console(width=140).print(table)
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    if len(sys.argv) == 4:
        {"first": _first_life, "second": _second_life}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    sys.exit(main())
