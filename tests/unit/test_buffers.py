"""Buffers are cut to size from memory that the manager owns, within a budget, and all of it goes back."""

import gc
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import OffloadMemoryError, OffloadWarning
from offload.io import AsyncIOHandle, pinned
from offload.swap.arena import ALIGNMENT, align_up
from offload.swap.buffers import SLAB_NBYTES, SwapBufferManager

MIB = 1 << 20
NUMEL = MIB // 4


@pytest.fixture
def handle():
    with AsyncIOHandle(backend="posix") as handle:
        yield handle


@pytest.fixture
def manager(handle):
    """A budget of 4 MiB."""
    manager = SwapBufferManager(NUMEL, 4, torch.float32, handle)
    yield manager
    manager.close()


class RefusingHandle:
    """A handle whose system allows no locked memory."""

    def new_cpu_locked_tensor(self, num_elem, example_tensor):
        raise OffloadMemoryError("the limit is 0 B")

    def free_cpu_locked_tensor(self, tensor):
        pinned.free(tensor)
        return True

    def is_pinned(self, tensor):
        return False


def span(buffer):
    return buffer.buffer.data_ptr(), buffer.buffer.data_ptr() + buffer.buffer.nbytes


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, MIB])
def test_a_buffer_has_the_size_that_was_asked_for(manager, nbytes):
    with manager.lend(nbytes) as buffer:
        assert buffer.buffer.nbytes == nbytes
        assert buffer.buffer.data_ptr() % ALIGNMENT == 0
        assert manager.free_nbytes == manager.budget_nbytes - align_up(nbytes)
    assert manager.free_nbytes == manager.budget_nbytes


def test_many_small_buffers_come_from_a_budget_of_few_large_ones(manager):
    lent = [manager.lend(ALIGNMENT) for _ in range(4 * MIB // ALIGNMENT)]
    assert all(lent)
    assert manager.lend(1) is None


def test_one_buffer_may_take_the_whole_budget(manager):
    assert manager.lend(4 * MIB).buffer.nbytes == 4 * MIB


def test_buffers_are_locked_memory(handle, manager):
    assert handle.is_pinned(manager.lend(5000).buffer)


@pytest.mark.filterwarnings("ignore::offload.errors.OffloadWarning")
def test_without_locking_not_one_byte_is_locked(handle):
    before = pinned.totals().locked_bytes
    manager = SwapBufferManager(NUMEL, 4, torch.float32, handle, lock=False)
    assert not handle.is_pinned(manager.lend(MIB).buffer)
    assert manager.lend(8 * MIB, grow=True).buffer.data_ptr() % ALIGNMENT == 0
    assert pinned.totals().locked_bytes == before
    manager.close()


def test_a_used_up_budget_gives_nothing(manager):
    lent = manager.lend(3 * MIB)
    assert manager.lend(2 * MIB) is None
    lent.release()
    assert manager.lend(2 * MIB) is not None


def test_growing_warns_once_with_the_numbers_and_the_key(handle):
    manager = SwapBufferManager(NUMEL, 1, torch.float32, handle, key="some.key")
    manager.lend(MIB)
    with pytest.warns(OffloadWarning, match=r"4096 B more.*1048576 of 1048576 B.*some\.key") as caught:
        first, second = manager.lend(4096, grow=True), manager.lend(MIB, grow=True)
    assert len(caught) == 1
    assert first.buffer.nbytes == 4096
    assert second.buffer.nbytes == MIB
    manager.close()


def test_memory_is_taken_in_slabs_as_it_is_needed(handle):
    manager = SwapBufferManager(SLAB_NBYTES, 3, torch.uint8, handle)
    assert manager.nbytes == SLAB_NBYTES
    first = manager.lend(SLAB_NBYTES)
    assert manager.nbytes == SLAB_NBYTES
    second = manager.lend(1)
    assert manager.nbytes == 2 * SLAB_NBYTES
    first.release()
    second.release()
    manager.close()


def test_a_buffer_larger_than_a_slab_takes_the_place_of_idle_slabs(handle):
    manager = SwapBufferManager(SLAB_NBYTES, 2, torch.uint8, handle)
    manager.lend(1).release()
    manager.lend(2 * SLAB_NBYTES)
    assert manager.nbytes == 2 * SLAB_NBYTES
    manager.close()


def test_an_idle_manager_of_a_large_budget_holds_one_slab(handle):
    manager = SwapBufferManager(1 << 30, 100, torch.float32, handle)
    assert manager.nbytes == SLAB_NBYTES
    assert manager.budget_nbytes == 400 << 30
    manager.close()


def test_staging_is_added_to_the_budget(handle):
    manager = SwapBufferManager(1, 1, torch.float32, handle, staging_nbytes=5000)
    assert manager.budget_nbytes == ALIGNMENT + 2 * ALIGNMENT
    manager.close()


def test_allocate_is_all_or_nothing(manager):
    assert manager.allocate(NUMEL, 5, torch.float32) is None
    assert manager.free_nbytes == manager.budget_nbytes
    buffers = manager.allocate(NUMEL, 4, torch.float32)
    assert [buffer.numel() for buffer in buffers] == [NUMEL] * 4
    manager.free(buffers)
    assert manager.free_nbytes == manager.budget_nbytes


def test_allocate_all_takes_the_whole_budget(manager):
    buffers = manager.allocate_all(NUMEL, torch.bfloat16)
    assert len(buffers) == 8
    manager.free(buffers)


@pytest.mark.parametrize("numel", [0, -1])
def test_buffers_of_no_elements_are_refused(manager, numel):
    for attempt in (manager.allocate_all, lambda numel, dtype: manager.allocate(numel, 1, dtype)):
        with pytest.raises(ValueError, match=str(numel)):
            attempt(numel, torch.float32)
    assert manager.free_nbytes == manager.budget_nbytes


def test_freeing_twice_a_view_or_foreign_memory_is_an_error(manager):
    (buffer,) = manager.allocate(NUMEL, 1, torch.float32)
    with pytest.raises(ValueError, match="nothing is allocated"):
        manager.free([buffer[ALIGNMENT:]])
    manager.free([buffer])
    with pytest.raises(ValueError, match="nothing is allocated"):
        manager.free([buffer])
    with pytest.raises(ValueError, match="does not come from this manager"):
        manager.free([torch.zeros(8)])


def test_close_frees_through_the_handle_and_may_be_called_twice(handle, monkeypatch):
    before = pinned.totals()
    freed = []
    free = handle.free_cpu_locked_tensor
    monkeypatch.setattr(handle, "free_cpu_locked_tensor", lambda tensor: freed.append(tensor) or free(tensor))
    manager = SwapBufferManager(NUMEL, 4, torch.float32, handle)
    manager.close()
    manager.close()
    assert [tensor.nbytes for tensor in freed] == [4 * MIB]
    assert pinned.totals() == before


def test_a_closed_manager_lends_nothing(manager):
    manager.close()
    with pytest.raises(ValueError, match="closed"):
        manager.lend(1, grow=True)
    assert manager.nbytes == 0


def test_a_buffer_may_be_released_after_its_manager_was_closed(manager):
    buffer = manager.lend(1)
    manager.close()
    buffer.release()


def test_a_dropped_manager_frees_its_memory(handle):
    before = pinned.totals()
    SwapBufferManager(NUMEL, 4, torch.float32, handle).lend(1)
    gc.collect()
    assert pinned.totals() == before


@pytest.mark.filterwarnings("error")
def test_memory_under_a_forgotten_transfer_goes_with_its_last_view(handle, monkeypatch):
    def refuse(tensor):
        raise ValueError("a transfer of this memory is in flight")

    before = pinned.totals()
    monkeypatch.setattr(handle, "free_cpu_locked_tensor", refuse)
    manager = SwapBufferManager(NUMEL, 1, torch.float32, handle)
    buffer = manager.lend(MIB)
    del manager
    gc.collect()
    assert pinned.totals() != before
    del buffer
    assert pinned.totals() == before


def test_what_can_be_given_back_is_reclaimed_before_the_memory_grows(manager):
    class Owner:
        def __init__(self):
            self.kept = manager.lend(4 * MIB)

        def give_back(self):
            self.kept.release()

    owner = Owner()
    manager.reclaim_with(owner.give_back)
    assert manager.lend(2 * MIB) is None, "what can wait does not reclaim"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.lend(2 * MIB, grow=True) is not None
        assert manager.lend(2 * MIB, grow=True) is not None
    del owner
    with pytest.warns(OffloadWarning, match="more memory is taken"):
        manager.lend(1, grow=True)


@pytest.mark.filterwarnings("ignore::offload.errors.OffloadWarning")
def test_a_hundred_managers_leave_no_locked_memory(handle):
    before = pinned.totals()
    for number in range(100):
        manager = SwapBufferManager(NUMEL, 2, torch.float32, handle, lock=number % 2 == 0)
        manager.lend(3 * MIB, grow=True) if number < 2 else manager.lend(MIB)
    del manager
    gc.collect()
    assert pinned.totals() == before


def test_memory_beyond_the_lock_limit_is_used_unlocked(monkeypatch):
    before = pinned.totals()
    manager = SwapBufferManager(NUMEL, 4, torch.float32, RefusingHandle())
    manager.lend(MIB).buffer.fill_(1)
    manager.close()
    assert pinned.totals() == before


def test_random_sequences_never_overlap_and_everything_comes_back(handle):
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(["lend", "grow", "free"]), st.integers(0, 40 * ALIGNMENT))))
    def check(commands):
        manager = SwapBufferManager(8 * ALIGNMENT, 4, torch.uint8, handle, lock=False)
        lent = []
        for command, number in commands:
            if command == "free" and lent:
                lent.pop(number % len(lent)).release()
            elif (buffer := manager.lend(number, grow=command == "grow")) is not None:
                buffer.buffer.fill_(1)
                lent.append(buffer)
            spans = sorted(span(buffer) for buffer in lent if buffer.buffer.numel())
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        for buffer in lent:
            buffer.release()
        assert manager.free_nbytes == manager.budget_nbytes
        manager.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        check()
