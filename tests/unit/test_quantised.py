"""Weights in few bits: found again from their numbers alone, and multiplied with by native code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import native_code
from engine.native_code import NotNative
from engine.quantised import grid, native
from engine.quantised.grid import Layout

BREAKS = {
    "test_weights_on_a_grid": ("engine/quantised/grid.py", "codes[:, 0::2] | codes[:, 1::2] << 4", "codes[:, 0::2]"),
    "test_grids_whose_closest": ("engine/quantised/grid.py", "MOST_STEPS = 24", "MOST_STEPS = 1"),
    "test_products_equal": ("engine/quantised/native.cpp", "if (from)\n", "if (false)\n"),
    "test_an_output_is_the_same": (
        "engine/quantised/native.cpp",
        "LANES, read[n][v]);",
        "LANES, read[n][v] * 1.0000002f);",
    ),
    "test_numbers_next_to": ("engine/quantised/grid.py", "code.amax(1, keepdim=True)", "levels"),
    "test_a_kernel_that_is_wrong": ("engine/quantised/native.py", "if not off < TOLERANCE", "if off != off"),
}
AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
WIDTHS = [native_code.FLAGS, *([(*native_code.FLAGS, "-mno-avx512f")] if AVX512 else [])]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("code")


def kernel(code: Path, flags: tuple[str, ...] = native_code.FLAGS) -> native._Kernel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_code, "FLAGS", flags)
        return native._Kernel(native_code.library(code, native.SOURCE, {"TILE": grid.TILE}))


def quantised(outputs: int, inputs: int, bits: int, group: int, seed: int) -> torch.Tensor:
    """As a file of few bits has them: scales and offsets in float16."""
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (outputs, inputs // group, group), generator=made)
    scale, offset = ((torch.rand(2, outputs, inputs // group, 1, generator=made) + 0.01) * 0.05).half().double()
    return (codes * scale - (1 << bits - 1) * offset).float().view(outputs, inputs)


# -- grids --------------------------------------------------------------------------------------


@given(
    bits=st.sampled_from([1, 3, 4, 5, 6, 8]),
    group=st.sampled_from([16, 32]),
    groups=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_weights_on_a_grid_are_found_again_without_loss(bits: int, group: int, groups: int, seed: int) -> None:
    weight = quantised(64, group * groups, bits, group, seed)
    folded = grid.fold(weight)
    assert folded is not None
    bits_kept, group_kept = grid.layout(folded, weight.shape[1])
    assert bits_kept == (4 if bits <= 4 else 8)
    assert group_kept <= group or groups % 2 == 0
    assert folded.nbytes == 64 * weight.shape[1] * bits_kept // 8 + 64 * weight.shape[1] // group_kept * 8
    off = (grid.unfold(folded, weight.shape[1]) - weight).view(-1, 16).abs().amax(1)
    assert bool((off <= grid.TOLERANCE * weight.view(-1, 16).abs().amax(1) * 16).all())


def test_real_formats_come_back_bit_for_bit() -> None:
    weight = quantised(64, 128, 4, 32, 0)
    folded = grid.fold(weight)
    assert folded is not None and torch.equal(grid.unfold(folded, 128), weight)


def test_grids_whose_closest_numbers_lie_steps_apart() -> None:
    codes = torch.tensor([0, 3, 6, 9, 12, 17, 20, 23, 26, 30, 35, 40, 44, 50, 53, 63]).float()
    folded = grid.fold((codes * 0.125 - 2).expand(32, 16).contiguous())
    assert folded is not None
    assert grid.layout(folded, 16) == Layout(8, 16)


def test_what_lies_on_no_grid_stays_as_it_is() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    assert grid.fold(weight) is None
    on_grid = quantised(64, 64, 4, 32, 0)
    for row in (0, 63):  # one number is enough
        for value in (1.2345, float("nan"), float("inf")):
            one = on_grid.clone()
            one[row, 5] = value
            assert grid.fold(one) is None


@pytest.mark.parametrize("shape", [(40, 64), (64, 40), (16, 32)])
def test_shapes_that_fill_no_tiles_stay_as_they_are(shape: tuple[int, int]) -> None:
    assert grid.fold(torch.zeros(shape)) is None


def test_numbers_next_to_nothing_never_wrap_around() -> None:
    least = 2.0**-149
    weight = torch.tensor([0, 3 * least, 10 * least, 379 * least]).repeat(32, 8)
    folded = grid.fold(weight)
    assert folded is None or torch.equal(grid.unfold(folded, 32), weight)


def test_a_weight_of_no_numbers() -> None:
    assert grid.fold(torch.zeros(32, 0)) is None
    assert grid.fold(torch.zeros(0, 32)) is None


def test_a_weight_of_one_number() -> None:
    for value in (0.0, -1.5):
        folded = grid.fold(torch.full((32, 32), value))
        assert folded is not None
        assert bool((grid.unfold(folded, 32) == value).all())


def test_bfloat16_comes_back_bit_for_bit() -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 50).bfloat16()
    folded = grid.fold_bfloat16(weight)
    assert folded.nbytes == weight.nbytes
    assert torch.equal(grid.unfold(folded, 50), weight.float())


# -- products -------------------------------------------------------------------------------------

LAYOUTS = [Layout(4, 32), Layout(4, 16), Layout(8, 32), Layout(8, 16), grid.SIXTEEN]


def folded_weight(layout: Layout, outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    if layout == grid.SIXTEEN:
        return grid.fold_bfloat16(
            torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()
        )
    found = grid._find(quantised(outputs, inputs, layout.bits, layout.group, seed), layout.group)
    assert found is not None
    return grid._folded(found)


@pytest.mark.parametrize("flags", WIDTHS, ids=["native", "narrow"][: len(WIDTHS)])
@given(
    layout=st.sampled_from(LAYOUTS),
    tiles=st.integers(1, 4),
    inputs=st.sampled_from([32, 96, 768, 800, 1568]),
    rows=st.one_of(st.integers(0, 20), st.integers(21, 300)),
    biased=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=150, deadline=None)
def test_products_equal_the_definition(
    layout: Layout,
    tiles: int,
    inputs: int,
    rows: int,
    biased: bool,
    threads: int,
    seed: int,
    flags: tuple[str, ...],
    code: Path,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        folded = folded_weight(layout, 32 * tiles, inputs, seed)
        given_rows = torch.randn(rows, inputs)
        bias = torch.randn(32 * tiles) if biased else None
        said = native._multiply(kernel(code, flags), given_rows, folded, bias)
    finally:
        torch.set_num_threads(before)
    weight = grid.unfold(folded, inputs).double()
    right = given_rows.double() @ weight.T + (0 if bias is None else bias.double())
    allowed = 1e-6 * (given_rows.double().abs() @ weight.abs().T + 1)
    assert said.shape == right.shape
    assert bool(((said - right).abs() <= allowed).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flags", WIDTHS, ids=["native", "narrow"][: len(WIDTHS)])
def test_an_output_is_the_same_however_many_rows_there_are(layout: Layout, flags: tuple[str, ...], code: Path) -> None:
    """No answer depends on who else is being answered."""
    folded, rows = folded_weight(layout, 64, 1568), torch.randn(300, 1568)
    all_of_them = native._multiply(kernel(code, flags), rows, folded, None)
    for count in (1, 2, 3, 5, 8, 11, 16, 17, 100):
        assert torch.equal(native._multiply(kernel(code, flags), rows[:count], folded, None), all_of_them[:count]), (
            count
        )


def test_rows_that_do_not_adjoin(code: Path) -> None:
    folded, wide = folded_weight(LAYOUTS[0], 64, 64), torch.randn(2, 40, 128)
    weight = grid.unfold(folded, 64)
    for rows in (wide[:, :, :64], wide[:, :, 1:65], wide[:, :, ::2], wide[:1, :, 64:], torch.randn(64, 3).T):
        said = native._multiply(kernel(code), rows, folded, None)
        torch.testing.assert_close(said, rows @ weight.T, rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_stays_in_its_row(code: Path) -> None:
    rows = torch.randn(20, 64)
    rows[7, 3] = float("nan")
    said = native._multiply(kernel(code), rows, folded_weight(LAYOUTS[0], 64, 64), None)
    assert said.isnan().any(1).tolist() == [row == 7 for row in range(20)]


def test_a_kernel_that_is_wrong_on_this_machine_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text(native.SOURCE.read_text().replace("code & 15", "code & 7"))
    monkeypatch.setattr(native, "SOURCE", wrong)
    monkeypatch.setattr(native, "_kernel", None)
    with pytest.raises(NotNative, match="products are wrong by"):
        native.load(tmp_path / "code")
    assert native._kernel is None
