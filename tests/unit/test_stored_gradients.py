"""Gradients on storage, in pieces through a few buffers: what is put is what is read, however it is cut."""

import pytest
import torch
from drive_faults import file_size_limit
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle, pinned
from offload.swap.stored_gradients import StoredGradients, sum_of_squares
from offload.swap.sub_group import SubGroup
from offload.swap.swap_buffer import SwapBuffer

PIECE_NBYTES = 1 << 17
NUMEL = 300_000


@pytest.fixture
def handle():
    with AsyncIOHandle(block_size=1 << 16, queue_depth=8) as handle:
        yield handle


def store_on(handle, dtype=torch.bfloat16):
    buffers = [SwapBuffer(pinned.new(PIECE_NBYTES, lock=False)) for _ in range(3)]
    return StoredGradients(handle, buffers, dtype)


def group_in(folder, index=0):
    return SubGroup(index, torch.empty(0), NUMEL, folder)


def random(numel, seed):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@settings(max_examples=25, deadline=None)
@given(
    puts=st.lists(
        st.tuples(st.integers(0, NUMEL - 1), st.integers(1, NUMEL), st.booleans()), min_size=1, max_size=8
    )
)
def test_what_is_read_is_what_was_put_or_added(tmp_path_factory, puts):
    expected = torch.zeros(NUMEL, dtype=torch.bfloat16)
    with AsyncIOHandle(block_size=1 << 16, queue_depth=8) as handle:
        store, group = store_on(handle), group_in(tmp_path_factory.mktemp("swap"))
        for seed, (offset, numel, add) in enumerate(puts):
            gradient = random(min(numel, NUMEL - offset), seed)
            place = expected[offset : offset + gradient.numel()]
            place.copy_(place + gradient if add else gradient)
            total = store.put(group, offset, gradient, add=add)
            assert total == sum_of_squares(place.clone())
        assert torch.equal(store.read(group, 0, NUMEL), expected)


def test_a_wider_gradient_is_rounded_as_torch_rounds_it(handle, tmp_path):
    store, group = store_on(handle), group_in(tmp_path)
    gradient = torch.randn(1000)
    store.put(group, 7, gradient.view(10, 100), add=False)
    assert torch.equal(store.read(group, 7, 1000), gradient.to(torch.bfloat16))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows_in_its_sum(handle, tmp_path, value):
    gradient = random(NUMEL, 0)
    gradient[-1] = value
    assert not torch.tensor(store_on(handle).put(group_in(tmp_path), 0, gradient, add=False)).isfinite()


@pytest.mark.parametrize("add", [False, True])
def test_what_could_not_be_written_is_told_until_the_next_window(handle, tmp_path, add):
    store, group = store_on(handle), group_in(tmp_path)
    store.put(group, 0, random(NUMEL, 0), add=False)
    store.flush()
    with file_size_limit(PIECE_NBYTES), pytest.raises(OffloadIOError, match="writing gradient at 0"):
        store.put(group, 0, random(NUMEL, 1), add=add)
        store.flush()
    for _ in range(2):
        with pytest.raises(OffloadIOError, match="writing gradient at 0"):
            store.read(group, 0, NUMEL)
    store.begin_window()
    store.put(group, 0, random(NUMEL, 2), add=False)
    assert torch.equal(store.read(group, 0, NUMEL), random(NUMEL, 2))
