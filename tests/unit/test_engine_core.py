"""The engine's step without a model: what is refused, delivered, counted, and what one failure costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from engine.fake import FakeEngine, reply_to
from engine.protocol import EngineLimits, EngineStats, GenerationRequest, LoadReport
from policies.errors import BadRequest, DeadlineExceeded, EngineError, HostUnavailable, LoadFailed, QueueFull
from tests.engine_helpers import drain, fake_engine, request, run

PROMPT = list(b"tell me a story")
WHOLE = reply_to(tuple(PROMPT), 8).decode()


def test_a_generation_says_its_reply_and_its_usage_adds_up() -> None:
    engine = fake_engine()
    said = run(engine, request("r", PROMPT, 200))["r"]
    assert said.text == WHOLE
    assert said.last.finish_reason == "stop"
    usage = said.last.usage
    assert usage is not None
    assert usage.completion_tokens == len(said.tokens) == len(WHOLE) + 1  # the end token is a token
    assert usage.prompt_tokens == len(PROMPT)
    assert min(usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds) >= 0
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (len(PROMPT), len(said.tokens))


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("r", []), "messages"),
        (request("r", [1, 256]), "messages"),
        (request("r", [-1, 5]), "messages"),
        (request("r", [1], delivered=[-1]), "messages"),
        (request("r", [1], delivered=[300]), "messages"),
        (request("r", [1], 2, delivered=[1, 2]), "max_tokens"),
        (request("r", [1] * 250, 7), "max_tokens"),
    ],
)
def test_what_cannot_run_is_refused_at_the_door(bad: GenerationRequest, param: str) -> None:
    engine = fake_engine()
    with pytest.raises(BadRequest) as raised:
        engine.add(bad)
    assert raised.value.param == param
    assert not engine.has_work()


def test_the_same_generation_twice_is_refused_and_the_next_attempt_is_not() -> None:  # E26
    engine = fake_engine()
    engine.add(request("r", PROMPT, 3))
    with pytest.raises(BadRequest, match="r/0 is live already"):
        engine.add(request("r", PROMPT, 3))
    assert engine.cancel("r", 0, "again")
    engine.add(request("r", PROMPT, 3, generation=1))
    assert {output.generation for output in drain(engine)["r"].outputs} == {1}


def test_the_queue_is_bounded() -> None:
    engine = fake_engine(EngineLimits(max_model_len=64, max_waiting=1))
    engine.add(request("a", PROMPT))
    with pytest.raises(QueueFull, match="limit 1"):
        engine.add(request("b", PROMPT))
    assert set(drain(engine)) == {"a"}


def test_a_deadline_that_passes_while_waiting_ends_the_generation_with_its_error() -> None:
    engine = fake_engine(EngineLimits(max_model_len=64, max_running=1))
    said = run(engine, request("a", PROMPT), request("late", PROMPT, arrival=1.0, deadline=1.0))
    assert isinstance(said["late"].last.error, DeadlineExceeded)
    assert said["late"].tokens == ()
    assert said["a"].last.finish_reason == "length"


def test_cancel_of_something_unknown_says_so() -> None:
    engine = fake_engine()
    assert engine.cancel("nobody", 0, "why") is False


def test_a_score_that_is_not_finite_fails_its_generation_and_leaves_no_kv() -> None:
    engine = fake_engine(nan_at_token=3)
    long = list(range(1, 101))
    said = run(engine, request("r", long, 20))["r"]
    assert isinstance(said.last.error, EngineError) and len(said.tokens) == 2
    assert engine.stats().kv_blocks_cached == 0


def test_E34_text_that_cannot_be_decoded_fails_its_generation_alone() -> None:
    engine = fake_engine()
    whole = engine._decoder

    class Broken:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            if 33 in ids:
                raise OverflowError("no such token")
            return whole.decode(ids, skip_special_tokens)

    engine._decoder = Broken()
    engine.add(request("bad", [*PROMPT, 40], 200))
    engine.add(request("good", PROMPT, 200))
    engine.step()
    engine._texts[("bad", 0)]._decoder._ids.append(33)
    said = drain(engine)
    error = said["bad"].last.error
    assert isinstance(error, EngineError) and "OverflowError" in error.message
    assert said["good"].last.finish_reason == "stop"


# -- going on elsewhere ----------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), (WHOLE[10:14],), (WHOLE[3:30],)])
@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_a_generation_taken_over_goes_on_as_if_undisturbed(cut: int, stop: tuple[str, ...]) -> None:
    undisturbed = run(fake_engine(), request("r", PROMPT, 40, stop=stop))["r"]
    first, second = fake_engine(), fake_engine()
    first.add(request("r", PROMPT, 40, stop=stop))
    before = [output for _ in range(cut) for output in first.step()]
    if before and before[-1].final:
        return
    delivered = [token for output in before for token in output.token_ids]
    after = run(second, request("r", PROMPT, 40, stop=stop, delivered=delivered, generation=1))["r"]
    assert (*delivered, *after.tokens) == undisturbed.tokens
    assert "".join(output.text for output in before) + after.text == undisturbed.text
    assert after.last.finish_reason == undisturbed.last.finish_reason
    assert after.last.usage is not None
    assert after.last.usage.completion_tokens == len(undisturbed.tokens)


# -- life --------------------------------------------------------------------------------------


def test_asleep_it_takes_nothing_and_awake_again_it_finds_no_old_kv() -> None:
    engine = fake_engine()
    prompt = list(range(1, 65))
    run(engine, request("a", prompt, 2))
    assert run(engine, request("b", prompt, 2))["b"].last.usage.cached_tokens == 48  # type: ignore[union-attr]
    engine.sleep()
    engine.sleep()
    with pytest.raises(HostUnavailable):
        engine.add(request("c", prompt, 2))
    engine.wake()
    engine.wake()
    assert run(engine, request("d", prompt, 2))["d"].last.usage.cached_tokens == 0  # type: ignore[union-attr]


def test_it_does_not_sleep_while_somebody_waits_for_an_answer() -> None:
    engine = fake_engine()
    engine.add(request("a", PROMPT, 2))
    with pytest.raises(EngineError, match="1 generations are live"):
        engine.sleep()
    assert drain(engine)["a"].last.finish_reason == "length"


def test_a_wake_without_memory_leaves_it_asleep_and_can_be_tried_again() -> None:
    class Tight(FakeEngine):
        given_back = 0
        short = True

        def _give_back(self) -> None:
            self.given_back += 1

        def _take_again(self) -> None:
            if self.short:
                raise MemoryError("short")

    engine = Tight(EngineLimits(max_model_len=64))
    engine.load()
    engine.warm()
    engine.sleep()
    with pytest.raises(HostUnavailable, match="short"):
        engine.wake()
    assert engine.given_back == 2
    with pytest.raises(HostUnavailable):
        engine.add(request("a", PROMPT, 2))
    engine.short = False
    engine.wake()
    assert run(engine, request("a", PROMPT, 2))["a"].last.finish_reason == "length"


@pytest.mark.parametrize(("error", "shown"), [(EngineError("wrong"), EngineError), (MemoryError(), HostUnavailable)])
def test_a_canary_that_fails_gives_the_memory_back(error: Exception, shown: type[Exception]) -> None:
    class Odd(FakeEngine):
        held = True

        def _give_back(self) -> None:
            self.held = False

        def _take_again(self) -> None:
            self.held = True

        def _canary(self) -> None:
            raise error

    engine = Odd(EngineLimits(max_model_len=64))
    engine.load()
    engine.warm()
    engine.sleep()
    with pytest.raises(shown):
        engine.wake()
    assert not engine.held


def test_a_load_that_fails_says_why_and_an_engine_without_load_has_nothing() -> None:
    engine = FakeEngine(EngineLimits(max_model_len=64))
    assert engine.stats() == EngineStats() and not engine.has_work()
    with pytest.raises(LoadFailed, match="no disk"):
        fake_engine(load_error="no disk")
    assert isinstance(engine.load(), LoadReport)


def test_the_torch_free_rooms_do_not_import_torch() -> None:
    code = (
        "import sys, engine.core, engine.fake, engine.loop, engine.scheduler, engine.protocol, engine.detokenizer;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
