"""Tensors leave through a few staging buffers, exact, whatever their size, dtype and strides."""

import errno
import os
from pathlib import Path

import pytest
import torch
from drive_faults import file_size_limit, interrupted_wait

from offload.errors import OffloadIOError
from offload.swap import AsyncTensorSwapper
from offload.swap.layout import Extent

MIB = 1 << 20
STAGING_NUMEL = 4096


@pytest.fixture
def swapper(handle):
    """Two staging buffers of 16 KiB, float32."""
    swapper = AsyncTensorSwapper(handle, 1)
    swapper.add_buffers([torch.empty(STAGING_NUMEL) for _ in range(2)])
    return swapper


def stored(path, dtype=torch.float32):
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=dtype)


@pytest.mark.parametrize(
    "numel", [1, STAGING_NUMEL - 1, STAGING_NUMEL, STAGING_NUMEL + 1, 5 * STAGING_NUMEL + 3]
)
def test_a_tensor_of_any_size_arrives_exactly(swapper, tmp_path, numel):
    tensor = torch.randn(numel)
    swapper.swap_out_tensors([tensor], [str(tmp_path / "a")])
    swapper.wait()
    assert torch.equal(stored(tmp_path / "a"), tensor)


def test_the_tensor_may_change_at_once(swapper, tmp_path):
    tensor = torch.ones(10 * STAGING_NUMEL)
    swapper.swap_out_tensors([tensor], [str(tmp_path / "a")])
    tensor.zero_()
    swapper.wait()
    assert stored(tmp_path / "a").unique().tolist() == [1]


def test_a_tensor_is_converted_to_the_dtype_of_the_target(swapper, tmp_path):
    tensor = torch.randn(2 * STAGING_NUMEL).to(torch.bfloat16)
    swapper.swap_out(tensor, str(tmp_path / "a"), torch.float32)
    swapper.swap_out(tensor, str(tmp_path / "b"), torch.bfloat16)
    swapper.wait()
    assert torch.equal(stored(tmp_path / "a"), tensor.float())
    assert torch.equal(stored(tmp_path / "b", torch.bfloat16), tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(60, 50).t(),
        lambda: torch.randn(6000)[::2],
        lambda: torch.randn(1, 1).expand(40, 30),
        lambda: torch.randn(10, requires_grad=True),
        lambda: torch.nn.Parameter(torch.randn(3, 4)),
        lambda: torch.tensor(1.5),
        lambda: torch.empty(0),
    ],
    ids=["transposed", "strided", "expanded", "requires_grad", "parameter", "scalar", "empty"],
)
def test_a_tensor_of_any_shape_arrives_flat(swapper, tmp_path, make):
    tensor = make()
    (tmp_path / "a").touch()
    swapper.swap_out_tensors([tensor], [str(tmp_path / "a")])
    swapper.wait()
    assert torch.equal(
        stored(tmp_path / "a") if tensor.numel() else torch.empty(0), tensor.detach().reshape(-1)
    )


def test_an_extent_says_where_in_the_file(swapper, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(16))
    swapper.swap_out_tensors([torch.ones(2)], [Extent(str(path), 4, 8, "x")])
    swapper.wait()
    assert stored(path).tolist() == [0, 1, 1, 0]


def test_many_tensors_leave_through_two_buffers(swapper, tmp_path):
    tensors = [torch.randn(number + 1) for number in range(50)]
    swapper.swap_out_tensors(tensors, [str(tmp_path / str(number)) for number in range(50)])
    swapper.wait()
    assert all(torch.equal(stored(tmp_path / str(number)), tensor) for number, tensor in enumerate(tensors))


def test_released_buffers_are_those_that_were_lent(handle, tmp_path):
    swapper, buffers = AsyncTensorSwapper(handle, 1), [torch.empty(STAGING_NUMEL)]
    assert not swapper.has_buffers()
    swapper.add_buffers(buffers)
    swapper.swap_out_tensors([torch.ones(1)], [str(tmp_path / "a")])
    released = swapper.release_buffers()
    assert [buffer.data_ptr() for buffer in released] == [buffer.data_ptr() for buffer in buffers]
    assert not swapper.has_buffers()
    assert stored(tmp_path / "a").tolist() == [1]


@pytest.mark.parametrize("buffers", [[], [torch.empty(1)]], ids=["none", "too small"])
def test_useless_buffers_are_refused(handle, buffers):
    with pytest.raises(ValueError, match="buffer"):
        AsyncTensorSwapper(handle, 1).add_buffers(buffers)


def test_buffers_are_lent_once(swapper):
    with pytest.raises(ValueError, match="1 buffers for a swapper that holds 2"):
        swapper.add_buffers([torch.empty(STAGING_NUMEL)])


def test_without_buffers_or_paths_nothing_is_swapped(handle, swapper):
    with pytest.raises(ValueError, match="add_buffers first"):
        AsyncTensorSwapper(handle, 1).swap_out_tensors([torch.ones(1)], ["a"])
    with pytest.raises(ValueError, match="shorter"):
        swapper.swap_out_tensors([torch.ones(1)], [])


def test_a_write_that_cannot_start_names_its_tensor_and_costs_no_buffer(swapper, tmp_path):
    for _ in range(5):
        with pytest.raises(OffloadIOError, match=r"writing exp_avg: .*No such file") as caught:
            swapper.swap_out(
                torch.ones(9), Extent(str(tmp_path / "no" / "a"), 0, 36, "exp_avg"), torch.float32
            )
    assert caught.value.errno == errno.ENOENT
    swapper.swap_out_tensors([torch.ones(3 * STAGING_NUMEL)], [str(tmp_path / "a")])
    assert len(swapper.release_buffers()) == 2


def test_a_write_that_fails_is_reported_once_and_the_others_are_finished(swapper, tmp_path):
    with file_size_limit(4096):
        swapper.swap_out(torch.ones(9), Extent(str(tmp_path / "b"), MIB, 36, "exp_avg"), torch.float32)
        swapper.swap_out_tensors([torch.ones(9)], [str(tmp_path / "a")])
        with pytest.raises(OffloadIOError, match="writing exp_avg"):
            swapper.wait()
    swapper.wait()
    assert stored(tmp_path / "a").tolist() == [1] * 9


def test_a_failure_comes_up_when_its_buffer_is_needed(swapper, tmp_path):
    with file_size_limit(MIB):
        swapper.swap_out(torch.ones(9), Extent(str(tmp_path / "b"), MIB, 36, "exp_avg"), torch.float32)
        with pytest.raises(OffloadIOError, match="writing exp_avg"):
            swapper.swap_out_tensors([torch.ones(5 * STAGING_NUMEL)], [str(tmp_path / "a")])
    assert len(swapper.release_buffers()) == 2
    assert os.stat(tmp_path / "a").st_size < 5 * STAGING_NUMEL * 4


def test_after_ctrl_c_the_buffers_stay_in_use_until_a_wait_ends(swapper, tmp_path, monkeypatch):
    tensor = torch.randn(2 * STAGING_NUMEL)
    swapper.swap_out_tensors([tensor], [str(tmp_path / "a")])
    with interrupted_wait(monkeypatch), pytest.raises(KeyboardInterrupt):
        swapper.release_buffers()
    assert swapper.has_buffers()
    assert len(swapper.release_buffers()) == 2
    assert torch.equal(stored(tmp_path / "a"), tensor)
