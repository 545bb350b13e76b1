"""Gradients go out as they arrive and come back exactly, at their places, for the step they belong to."""

from itertools import pairwise

import pytest
import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle
from offload.swap.buffers import SwapBufferManager
from offload.swap.gradients import READ_STAGING_NBYTES, GradientStore
from offload.swap.stats import METER
from offload.swap.sub_group import SubGroup

MIB = 1 << 20
NUMEL = 3 * READ_STAGING_NBYTES // 4 + 5


@pytest.fixture
def handle():
    with AsyncIOHandle(backend="posix") as handle:
        yield handle


@pytest.fixture
def manager(handle):
    manager = SwapBufferManager(32 * MIB, 1, torch.uint8, handle, lock=False)
    yield manager
    manager.close()


@pytest.fixture
def store(handle, manager):
    store = GradientStore(handle, manager, min_nbytes=4096)
    yield store
    store.close()
    assert manager.free_nbytes == manager.budget_nbytes


@pytest.fixture
def group(tmp_path):
    return SubGroup(0, torch.empty(0), NUMEL, tmp_path)


def fetched(store, group, dtype=torch.float32):
    destination = torch.full((group.numel,), float("nan"), dtype=dtype)
    store.swap_in(group, destination)
    return destination


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_comes_back_converted_after_the_trip_and_not_before(store, group, dtype):
    gradient = torch.randn(NUMEL).to(dtype)
    before = METER.snapshot()["bytes_written"]["gradients"]
    store.swap_out(group, [0], [gradient])
    assert METER.snapshot()["bytes_written"]["gradients"] - before == gradient.nbytes
    assert torch.equal(fetched(store, group), gradient.float())


def test_parts_in_any_order_and_size_make_the_whole(store, group):
    gradient = torch.randn(NUMEL)
    cuts = [0, 1, 1000, 4000, NUMEL // 2 + 1, NUMEL]
    for start, end in reversed(list(pairwise(cuts))):
        store.swap_out(group, [start], [gradient[start:end].clone()])
    assert torch.equal(fetched(store, group), gradient)


def test_where_no_gradient_arrived_it_is_zero(store, group):
    store.swap_out(group, [10_000, 5], [torch.ones(8192), torch.ones(2)])
    found = fetched(store, group)
    assert found.sum() == 8194
    assert found[10_000:18_192].unique().tolist() == found[5:7].unique().tolist() == [1]


def test_a_small_gradient_stays_in_memory(store, group, tmp_path):
    store.swap_out(group, [0], [torch.ones(1023)])
    assert list(tmp_path.iterdir()) == []
    assert fetched(store, group)[:1024].sum() == 1023


def test_the_last_gradient_of_a_place_counts(store, group):
    for value in range(5):
        store.swap_out(group, [0], [torch.full((NUMEL,), float(value))])
    assert fetched(store, group).unique().tolist() == [4]


def test_a_written_back_gradient_replaces_all_parts(store, group):
    store.swap_out(group, [0, NUMEL - 2000], [torch.ones(2000), torch.ones(2000)])
    changed = torch.randn(NUMEL)
    store.write_back(group, changed)
    assert torch.equal(fetched(store, group), changed)


def test_strided_gradients_are_written_in_order(store, group):
    matrix = torch.randn(200, 100)
    store.swap_out(group, [0], [matrix.t()])
    assert torch.equal(fetched(store, group)[:20_000], matrix.t().reshape(-1))


def test_after_a_flush_no_memory_is_lent(store, group, manager):
    store.swap_out(group, [0], [torch.ones(NUMEL)])
    assert manager.free_nbytes < manager.budget_nbytes
    store.flush()
    assert manager.free_nbytes == manager.budget_nbytes


def test_a_gradient_that_did_not_get_out_fails_every_fetch_of_its_window(store, group, monkeypatch):
    store.swap_out(group, [0], [torch.ones(NUMEL)])
    store.flush()
    with monkeypatch.context() as patch:
        patch.setattr(group, "folder", group.folder / "missing")
        patch.setattr(group, "gradient_file", None)
        patch.setattr(group, "gradient_extents", {})
        with pytest.raises(OffloadIOError, match="missing"):
            store.swap_out(group, [0], [torch.zeros(NUMEL)])
    with pytest.raises(OffloadIOError, match="missing"):
        fetched(store, group)
    store.begin_window()
    assert fetched(store, group).unique().tolist() == [1]
