"""Block-wise attention on CPU tensors against the plain definition in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import reference
from engine.attention.kv import KVMemory, LayerShape, bytes_per_token
from engine.attention.torch_blocks import TorchStep
from tests.attention_cases import Case, Part, answers

BREAKS = {
    "test_every_shape_equals": ("engine/attention/torch_blocks.py", ".index_fill_(0, empty, 0.0)", ""),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


parts = st.builds(Part, st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 40)), st.booleans(), st.booleans())
cases = st.builds(
    Case,
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([8, 16, 24, 64]),
    value_dim=st.just(0),  # 0: as head_dim
    parts=st.lists(parts, min_size=1, max_size=4).map(tuple),
    window=st.one_of(st.none(), st.integers(1, 50)),
    softcap=st.sampled_from([None, None, 5.0]),
    sinks=st.sampled_from([False, False, True]),
    scale=st.sampled_from([0.1, 0.5]),
    seed=st.integers(0, 2**20),
)


@given(cases)
@settings(max_examples=400, deadline=None)
def test_every_shape_equals_the_definition_and_reads_no_slot_it_should_not(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("value_dim", [4, 32])
@pytest.mark.parametrize("window", [None, 6])
def test_values_may_be_narrower_or_wider_than_keys(value_dim: int, window: int | None) -> None:
    compare(
        Case(2, 2, 16, value_dim, (Part(0, 9, True), Part(5, 9, False), Part(9, 1, False)), window, None, False, 0.2, 1)
    )


@pytest.mark.parametrize("start", range(4, 9))
@pytest.mark.parametrize("count", [1, 2, 6, 7])
def test_chunks_that_begin_around_the_edge_of_the_window(start: int, count: int) -> None:
    for adjoining in (True, False):
        compare(Case(1, 4, 16, 0, (Part(start, count, adjoining),), 6, None, False, 0.25, start * 10 + count))


def compare(case: Case) -> None:
    torch.testing.assert_close(*answers(case, TorchStep), rtol=2e-5, atol=2e-5)


def test_the_reference_itself_against_torchs_attention() -> None:
    """The float64 oracle is ours, so it needs one from outside."""
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 7, 8).double(), torch.randn(2, 12, 8).double(), torch.randn(2, 12, 8).double()
    mask = torch.ones(7, 12, dtype=torch.bool).tril(5) & ~torch.ones(7, 12, dtype=torch.bool).tril(5 - 4)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=0.3, enable_gqa=True
    )[0]
    ours = reference.attend(query, key, value, start=5, scale=0.3, window=4)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # our softmax is float32 on purpose


def test_kv_memory_is_given_back_and_the_views_live_on() -> None:
    layers = {0: LayerShape(2, 8, 4), 1: LayerShape(1, 16, 16)}
    assert bytes_per_token(layers, torch.float32) == (2 * 12 + 32) * 4
    kv = KVMemory(layers, 6, torch.float32, "cpu")
    assert kv.nbytes == 6 * bytes_per_token(layers, torch.float32)
    view = kv.values[1]
    kv.give_back()
    kv.give_back()
    assert view.untyped_storage().nbytes() == 0
    kv.take_again()
    for number, tensor in enumerate((*kv.keys.values(), *kv.values.values())):
        tensor.fill_(number)
    for number, tensor in enumerate((*kv.keys.values(), *kv.values.values())):
        assert torch.all(tensor == number)  # no two views overlap
    assert view.data_ptr() == kv.values[1].data_ptr()
