"""Tensors are packed into buffers that are views of locked memory, and give them back once."""

import pytest
import torch

from offload.io import AsyncIOHandle
from offload.swap.swap_buffer import SwapBuffer, SwapBufferPool


@pytest.fixture
def handle():
    with AsyncIOHandle(backend="posix") as handle:
        yield handle


@pytest.fixture
def locked(handle):
    """Makes locked float32 tensors that are freed at the end."""
    made = []

    def new(numel):
        made.append(handle.new_cpu_locked_tensor(numel, torch.empty(0)))
        return made[-1]

    yield new
    for tensor in made:
        handle.free_cpu_locked_tensor(tensor)


def test_a_packed_tensor_is_a_copy_in_the_dtype_of_the_buffer():
    buffer = SwapBuffer(torch.zeros(8))
    source = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    swap_tensor, compute_tensor = buffer.insert_tensor(source, "a", aligned_numel=4)
    source.zero_()
    assert compute_tensor.tolist() == [1.5, 2.5]
    assert swap_tensor.numel() == 4
    assert swap_tensor.data_ptr() == compute_tensor.data_ptr()


def test_a_matrix_is_packed_flat_whatever_its_strides():
    buffer = SwapBuffer(torch.zeros(6))
    matrix = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(buffer.insert_tensor(matrix, None, 6)[1], matrix.reshape(-1))


def test_a_buffer_lists_what_was_packed_in_order():
    buffer = SwapBuffer(torch.zeros(8))
    buffer.insert_tensor(torch.ones(3), "a", 4)
    buffer.allocate_tensor("b", 2, 4)
    assert buffer.get_swap_paths() == ["a", "b"]
    assert [tensor.numel() for tensor in buffer.get_swap_tensors()] == [4, 4]
    assert [tensor.numel() for tensor in buffer.get_compute_tensors()] == [3, 2]
    assert buffer.get_num_elem() == 5
    assert not buffer.has_space(1)


def test_a_full_buffer_refuses_with_both_numbers():
    buffer = SwapBuffer(torch.zeros(8))
    buffer.allocate_tensor(None, 6, 6)
    with pytest.raises(ValueError, match=r"3 elements do not fit the 2"):
        buffer.allocate_tensor(None, 3, 3)


def test_reset_makes_all_room_again():
    buffer = SwapBuffer(torch.zeros(8))
    buffer.allocate_tensor(None, 8, 8)
    buffer.reset()
    assert buffer.has_space(8)
    assert buffer.get_swap_tensors() == []


def test_a_buffer_reads_its_bytes_as_any_dtype():
    buffer = SwapBuffer(torch.zeros(8, dtype=torch.uint8))
    buffer.view(2, torch.float32).fill_(1.0)
    assert buffer.view(4, torch.int16).tolist() == [0, 16256, 0, 16256]


def test_release_gives_back_once():
    calls = []
    with SwapBuffer(torch.zeros(1), release=lambda: calls.append(1)) as buffer:
        buffer.release()
    assert calls == [1]


def test_a_pool_fills_its_buffers_one_after_the_other(handle, locked):
    pool = SwapBufferPool([locked(4), locked(4)], handle)
    assert pool.insert_tensor(torch.ones(3), "a", 3)[1].tolist() == [1, 1, 1]
    assert pool.insert_tensor(torch.ones(3), "b", 3)[1].tolist() == [1, 1, 1]
    assert pool.get_swap_paths() == ["a", "b"]
    assert [len(buffer.get_swap_tensors()) for buffer in pool.buffers] == [1, 1]
    assert len(pool.get_swap_tensors()) == len(pool.get_compute_tensors()) == 2


def test_a_full_pool_gives_nothing_until_it_is_reset(handle, locked):
    pool = SwapBufferPool([locked(4)], handle)
    pool.allocate_tensor(4, None, 4)
    assert not pool.has_space(1)
    assert pool.allocate_tensor(1, None, 1) == (None, None)
    assert pool.insert_tensor(torch.ones(1), None, 1) == (None, None)
    pool.reset()
    assert pool.has_space(4)


def test_a_pool_refuses_memory_that_is_not_locked(handle):
    with pytest.raises(ValueError, match="page-locked"):
        SwapBufferPool([torch.zeros(4)], handle)
