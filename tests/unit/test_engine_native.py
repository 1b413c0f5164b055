"""Attention by native code: every shape against the definition, and what happens where it cannot be compiled."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import code_files, native_code
from engine.attention import native
from engine.attention.kv import KVMemory, LayerShape
from engine.attention.native import NativeAttention, NativeStep
from engine.attention.step import Score, Span
from engine.native_code import NotNative
from tests.attention_cases import Case, Part, answers

BREAKS = {
    "test_every_shape_equals": ("engine/attention/native.cpp", "panel.hide(from, to, piece, call.window);", ""),
    "test_a_long_history_that_threads_share": (
        "engine/attention/native.cpp",
        "* mine + load(&other.total[c]) * its",
        "",
    ),
    "test_damaged_code": ("engine/code_files.py", "== _digest(library)", "!= ''"),
    "test_code_that_others": ("engine/code_files.py", "return only_ours(library.parent) and", "return"),
    "test_a_kernel_that_is_wrong": ("engine/attention/native.py", "if not torch.allclose(", "if torch.isnan("),
}
NARROW = (*native_code.FLAGS, "-mno-avx512f")  # vectors of eight, as on a processor that has no wider ones
AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
WIDTHS = [native_code.FLAGS, *([NARROW] if AVX512 else [])]

parts = st.builds(Part, st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 90)), st.booleans(), st.booleans())
cases = st.builds(
    Case,
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([6, 64]),
    value_dim=st.sampled_from([0, 12]),  # 0: as head_dim
    parts=st.lists(parts, min_size=1, max_size=4).map(tuple),
    window=st.one_of(st.none(), st.integers(1, 170)),
    softcap=st.sampled_from([None, None, 5.0]),
    sinks=st.sampled_from([False, False, True]),
    scale=st.sampled_from([0.1, 0.5]),
    seed=st.integers(0, 2**20),
)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("code")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def step(code: Path, flags: tuple[str, ...] = native_code.FLAGS) -> object:
    def made(kv: KVMemory, spans: list[Span]) -> NativeStep:
        (layer,) = kv.keys
        shape = LayerShape(kv.keys[layer].shape[1], kv.keys[layer].shape[2], kv.values[layer].shape[2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_code, "FLAGS", flags)
            return NativeAttention(code, {layer: shape}, spans[0].block_size, torch.float32).step(kv, spans)

    return made


def compare(case: Case, code: Path, flags: tuple[str, ...] = native_code.FLAGS) -> None:
    torch.testing.assert_close(*answers(case, step(code, flags)), rtol=2e-5, atol=2e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", WIDTHS, ids=["native", "narrow"][: len(WIDTHS)])
@given(case=cases)
@settings(max_examples=100, deadline=None)
def test_every_shape_equals_the_definition_and_reads_no_slot_it_should_not(
    case: Case, flags: tuple[str, ...], code: Path
) -> None:
    torch.set_num_threads(1)
    compare(case, code, flags)


@given(case=cases, least=st.sampled_from([4, 30, 64]))
@settings(max_examples=100, deadline=None)
def test_a_long_history_that_threads_share_is_merged_right(case: Case, least: int, code: Path) -> None:
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LEAST_OF_A_PART", least)
        patch.setattr(native, "ITEMS_PER_THREAD", 30)
        compare(case, code)


@pytest.mark.parametrize("block", [1, 6, 16, 128])
def test_blocks_of_any_size(block: int, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.attention_cases.BLOCK", block)
    compare(Case(2, 2, 8, 0, (Part(0, 70, False), Part(150, 1, False)), None, None, False, 0.3, 5), code)


def test_scores_far_apart_neither_overflow_nor_vanish(code: Path) -> None:
    compare(Case(1, 1, 8, 0, (Part(100, 30, False),), None, None, False, 300.0, 3), code)


@pytest.mark.parametrize("softcap", [0.5, 50.0, 1e4, 1e9])
def test_softcaps_of_any_size(softcap: float, code: Path) -> None:
    compare(Case(1, 2, 64, 0, (Part(100, 30, False),), None, softcap, False, 0.5, 3), code)


def test_sinks_that_take_nothing_beside_parts_that_see_nothing(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose window lies in the later parts alone."""
    torch.set_num_threads(2)
    monkeypatch.setattr(native, "LEAST_OF_A_PART", 30)
    monkeypatch.setattr(native, "ITEMS_PER_THREAD", 30)
    monkeypatch.setattr(torch, "randn", _with_endless_sinks(torch.randn, heads=4))
    compare(Case(2, 2, 64, 0, (Part(150, 40, False),), 130, None, True, 0.3, 5), code)


def _with_endless_sinks(randn: Callable[..., torch.Tensor], heads: int) -> Callable[..., torch.Tensor]:
    return lambda *shape, **more: torch.full((heads,), -torch.inf) if shape == (heads,) else randn(*shape, **more)


def test_what_is_not_a_number_stays_so(code: Path) -> None:
    """Whoever samples looks for it, and ends that request alone."""
    kv = KVMemory({0: LayerShape(1, 8, 8)}, 64, torch.float32, "cpu")
    spans = [Span(0, 20, 0, (0, 1), 16, 0), Span(20, 1, 0, (2,), 16, 0)]
    query, key, value = torch.randn(3, 1, 21, 8)
    query[0, 7, 3] = float("nan")
    out = step(code)(kv, spans).attend(0, query, key, value, Score(0.3))  # type: ignore[operator]
    assert out.isnan().flatten(1).any(1).tolist() == [row == 7 for row in range(21)]


def test_it_computes_with_torchs_threads_and_starts_no_others(code: Path) -> None:
    """Two pools of threads would spin against each other."""
    torch.set_num_threads(2)
    compare(Case(2, 2, 64, 0, (Part(0, 80, False),), None, None, False, 0.3, 5), code)
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in lines if "libgomp" in line}) == 1


LAYERS = {0: LayerShape(1, 8, 8), 1: LayerShape(1, 8, 8), 2: LayerShape(2, 8, 8)}


def test_each_geometry_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NativeAttention(tmp_path / "code", LAYERS, 16, torch.float32)
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "code").glob("attention/*.so")}
    assert len(kept) == 2
    monkeypatch.setenv("CXX", "no-such-compiler")
    NativeAttention(tmp_path / "code", LAYERS, 16, torch.float32)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert len(list((tmp_path / "code" / "attention").iterdir())) == 4  # each with its seal, and nothing left over


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotNative, match=r"no C\+\+ compiler"):
        NativeAttention(tmp_path, LAYERS, 16, torch.float32)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_code, "FLAGS", ("-no-such-flag",))
    with pytest.raises(NotNative, match=r"ended with 1: .*no-such-flag"):
        NativeAttention(tmp_path, LAYERS, 16, torch.float32)
    assert not list((tmp_path / "attention").iterdir())


def test_other_types_are_torchs(tmp_path: Path) -> None:
    with pytest.raises(NotNative, match="only float32 has a kernel, not bfloat16"):
        NativeAttention(tmp_path, LAYERS, 16, torch.bfloat16)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotNative, match=r"NotADirectoryError|FileExistsError"):
        NativeAttention(tmp_path / "file", LAYERS, 16, torch.float32)


def compiled(tmp_path: Path) -> Path:
    NativeAttention(tmp_path, {0: LAYERS[0]}, 16, torch.float32)
    (library,) = tmp_path.glob("attention/*.so")
    return library


def test_damaged_code_is_compiled_again(tmp_path: Path) -> None:
    library = compiled(tmp_path)
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[: len(content) // 2])
    assert not code_files.is_as_put(library)
    NativeAttention(tmp_path, {0: LAYERS[0]}, 16, torch.float32)
    assert library.read_bytes() == content


def test_code_that_others_could_have_written_is_not_loaded(tmp_path: Path) -> None:
    library = compiled(tmp_path)
    assert code_files.is_as_put(library)
    library.parent.chmod(0o777)
    assert not code_files.is_as_put(library)
    with pytest.raises(NotNative, match="others can write"):
        NativeAttention(tmp_path, {0: LAYERS[0]}, 16, torch.float32)


def test_a_kernel_that_is_wrong_on_this_machine_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text(native.SOURCE.read_text().replace("6.9314718e-1f", "6.8e-1f"))
    monkeypatch.setattr(native, "SOURCE", wrong)
    with pytest.raises(NotNative, match="the kernel is wrong by"):
        NativeAttention(tmp_path / "code", LAYERS, 16, torch.float32)


def test_two_that_compile_at_once_both_have_it(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def load() -> None:
        try:
            NativeAttention(tmp_path, LAYERS, 16, torch.float32)
        except BaseException as error:  # noqa: BLE001 — boundary: told to the test
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(code_files.is_as_put(library) for library in tmp_path.glob("attention/*.so"))


def test_what_is_shared_covers_every_token_once() -> None:
    spans = [Span(0, 1, 999, tuple(range(63)), 16, 0), Span(1, 40, 300, tuple(range(12)), 16, 160)]
    for threads in (1, 2, 8):
        items, places = native._items(spans, group=3, kv_heads=1, panel_rows=48, threads=threads)
        assert places == sum(item[6] for item in items if item[6] > 1 and item[5] == 0)
        for number, span in enumerate(spans):
            for row in range(span.count * 3):
                mine = sorted(item[3:5] for item in items if item[0] == number and item[1] <= row < item[1] + item[2])
                assert mine[0][0] == span.hidden
                assert mine[-1][1] > span.start + row // 3
                assert all(a[1] == b[0] for a, b in itertools.pairwise(mine))
