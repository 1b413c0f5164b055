"""Engine entries of the scenario bank: checkpoints, turns that went wrong, and the identity of KV.

What kills a process in between is ``tests.acceptance.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.fake import FakeEngine
from engine.prefix import KVIdentity, chain
from engine.protocol import EngineLimits
from engine.torch_engine import TorchEngine
from policies.errors import BadRequest, CheckpointRefused, NotFound, RequestTooLarge
from tests.acceptance.checkpoint import DAMAGE, TENANT
from tests.engine_helpers import fake_engine, request, run, tiny_llama, torch_engine

BLOCK = 16
LIMITS = EngineLimits(max_model_len=256, block_size=BLOCK, max_running=4, kv_host_bytes=2**20)
PROMPT = [2 + (7 * n * n + 3 * n) % 300 for n in range(70)]
BYTES = [token % 250 for token in PROMPT]  # what the fake engine's vocabulary has
VERSION_1 = Path(__file__).parents[1] / "data" / "checkpoint-v1.safetensors"

BREAKS = {
    "test_E38": (
        "engine/scheduler.py",
        "self.kv.fail(context)\n        self.kv.release(context)",
        "self.kv.fail(context)",
    ),
    "test_E40": (
        "engine/kv_cache.py",
        "            if worked:\n                self.pool",
        "            if False:\n                self.pool",
    ),
    "test_E41": ("engine/checkpoint.py", "if found.get(name) != expected:", "if False:"),
    "test_E07": ("engine/core.py", "return KVIdentity(tenant,", 'return KVIdentity("",'),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engines(path: Path) -> Iterator[tuple[TorchEngine, TorchEngine]]:
    """Two engines of the same weights, as two processes would have them."""
    import torch

    before = torch.get_num_threads()
    yield torch_engine(path, LIMITS), torch_engine(path, LIMITS)
    torch.set_num_threads(before)


def said_in(engine: TorchEngine | FakeEngine, steps: int) -> list[int]:
    said: list[int] = []
    while len(said) < steps:
        said += [token for output in engine.step() for token in output.token_ids]
    return said


@pytest.mark.parametrize("state", ["running", "preempted", "swapped"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_E40_saved_in_the_middle_and_gone_on_with_elsewhere(
    engines: tuple[TorchEngine, TorchEngine], tmp_path: Path, temperature: float, state: str
) -> None:
    first, second = engines
    for engine in engines:
        engine._kv_cache.pool.clear_cache()
        engine._kv_cache.host.clear()
    whole = run(first, request("whole", PROMPT, 20, temperature=temperature, seed=3, tenant="else"))["whole"]
    first.add(request("cut", PROMPT, 20, temperature=temperature, seed=3))
    said = said_in(first, 9)
    if state != "running":
        first._scheduler._preempt(first._scheduler.running[0], 0.0, "test", keep=state == "swapped")
    if state == "swapped":  # others take its blocks
        blocks = first._kv_cache.pool.allocate(first._kv_cache.pool.num_free)
        first._move(first._scheduler.kv.planned_moves())
        first._kv_cache.pool.release(blocks, 0)
        first._kv_cache.pool.complete(0)
    first.save("cut", 0, tmp_path / "cut")
    assert (tmp_path / "cut").stat().st_mode & 0o777 == 0o600
    first.cancel("cut", 0, "saved")
    restored = second.restore(tmp_path / "cut", TENANT)
    assert list(restored.delivered_token_ids) == said
    found = second._kv_cache.find(second._contexts["cut", 0])
    assert len(found) * BLOCK > len(PROMPT) + len(said) - BLOCK - 1  # not a restore in name only
    rest = said_in(second, 11)
    assert tuple(said + rest) == whole.tokens
    second.check()


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_E41_a_damaged_or_foreign_checkpoint_is_refused_before_anything_of_it_is_used(
    engines: tuple[TorchEngine, TorchEngine], tmp_path: Path, damage: str
) -> None:
    first, second = engines
    first.add(request("cut", PROMPT, 20))
    said_in(first, 5)
    first.save("cut", 0, tmp_path / "cut")
    first.cancel("cut", 0, "saved")
    (tmp_path / "cut").write_bytes(DAMAGE[damage]((tmp_path / "cut").read_bytes()))
    second._kv_cache.pool.clear_cache()
    with pytest.raises(CheckpointRefused):
        second.restore(tmp_path / "cut", TENANT)
    assert not second.has_work() and second.stats().kv_blocks_cached == 0
    usage = run(second, request("again", PROMPT, 4))["again"].last.usage
    assert usage is not None and usage.cached_tokens == 0


def test_E41_a_checkpoint_that_cannot_be_read_or_is_live_already(tmp_path: Path) -> None:
    engine = fake_engine(LIMITS)
    with pytest.raises(CheckpointRefused, match="cannot read"):
        engine.restore(tmp_path / "nowhere", TENANT)
    with pytest.raises(NotFound):
        engine.save("nobody", 0, tmp_path / "nobody")
    engine.add(request("twice", BYTES, 40))
    said_in(engine, 2)
    engine.save("twice", 0, tmp_path / "twice")
    with pytest.raises(BadRequest, match="is live already"):
        engine.restore(tmp_path / "twice", TENANT)
    with pytest.raises(OSError, match="No such file"):
        engine.save("twice", 0, tmp_path / "missing" / "twice")
    assert [entry.name for entry in tmp_path.iterdir()] == ["twice"]


def test_a_checkpoint_of_version_1_is_still_read() -> None:
    engine = fake_engine(EngineLimits(max_model_len=256, block_size=BLOCK))
    restored = engine.restore(VERSION_1, TENANT)
    whole = run(fake_engine(LIMITS), replace(restored, delivered_token_ids=()))["cut"]
    rest = run(engine)["cut"]
    assert restored.delivered_token_ids + rest.tokens == whole.tokens
    assert engine.stats().cached_tokens == len(restored.prompt_token_ids) // BLOCK * BLOCK


def test_E38_after_a_turn_that_was_aborted_or_too_long_the_next_finds_what_was_there_before() -> None:
    engine = fake_engine(EngineLimits(max_model_len=256, block_size=BLOCK), kv_capacity_tokens=512, reply_words=40)
    history = [*BYTES, *run(engine, request("1", BYTES, 20))["1"].tokens]
    engine.add(request("2 aborted", [*history, *range(60, 90)], 40))
    said_in(engine, 7)
    engine.cancel("2 aborted", 0, "the client went away")
    with pytest.raises(RequestTooLarge):
        engine.add(request("2 too long", [*history, *range(90)], 100))
    assert engine.stats().kv_blocks_used == 0
    usage = run(engine, request("2", [*history, 7, 8, 9], 5))["2"].last.usage
    assert usage is not None and usage.cached_tokens == (len(history) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    "other",
    [
        {"adapter": "digest of other weights"},  # E01, E02: a name would have been the same
        {"fingerprint": "other"},  # E04, E05
        {"dtype": "bfloat16"},
        {"block_size": 8},
        {"layout_version": 99},
        {"tenant": "globex"},
    ],
)
def test_E01_E02_E04_E05_whatever_kv_depends_on_is_in_its_key(other: dict[str, object]) -> None:
    one = KVIdentity("acme", "weights", "float32", 4, adapter="digest")
    tokens = list(range(16))
    mine = set(chain(one.namespace(), tokens, 4))
    assert mine == set(chain(replace(one).namespace(), tokens, 4))
    assert not mine & set(chain(replace(one, **other).namespace(), tokens, 4))  # type: ignore[arg-type]


def test_E07_E08_a_tenant_learns_nothing_of_another_s_prompt_and_finds_its_own() -> None:
    engine = fake_engine(EngineLimits(max_model_len=256, block_size=BLOCK), kv_capacity_tokens=2048)
    secret = BYTES[:50]
    run(engine, request("secret", secret, 4, tenant="acme"))
    for probe in range(50):
        guess = [*secret[: 1 + probe % 50], *range(10)]
        usage = run(engine, request(f"probe{probe}", guess, 1, tenant=f"globex{probe}"))[f"probe{probe}"].last.usage
        assert usage is not None and usage.cached_tokens == 0
    usage = run(engine, request("own", secret, 1, tenant="acme"))["own"].last.usage
    assert usage is not None and usage.cached_tokens == 48
