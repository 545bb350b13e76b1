"""Whole tensors pass through a little memory, which goes back however it ends."""

import errno
import os

import pytest
import torch
from drive_faults import file_size_limit, interrupted_wait

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle
from offload.swap.buffers import SwapBufferManager
from offload.swap.layout import Extent
from offload.swap.staging import pieces, staging_writer

MIB = 1 << 20


@pytest.fixture
def handle():
    with AsyncIOHandle(backend="posix") as handle:
        yield handle


@pytest.fixture
def manager(handle):
    manager = SwapBufferManager(MIB, 2, torch.uint8, handle, lock=False)
    yield manager
    manager.close()


def nothing_is_lent(manager):
    return manager.free_nbytes == manager.budget_nbytes


def test_when_the_writer_is_left_everything_is_on_storage(handle, manager, tmp_path):
    tensor = torch.randn(3 * MIB // 4 + 1)
    with staging_writer(handle, manager, MIB, "optimizer") as writer:
        writer.swap_out(tensor, str(tmp_path / "a"), torch.float32)
    assert torch.equal(torch.from_file(str(tmp_path / "a"), size=tensor.numel()), tensor)
    assert nothing_is_lent(manager)


def test_a_failed_write_leaves_the_writer_with_its_error_and_no_memory(handle, manager, tmp_path):
    with (
        file_size_limit(4096),
        pytest.raises(OffloadIOError, match="writing fp32"),
        staging_writer(handle, manager, MIB, "optimizer") as writer,
    ):
        writer.swap_out(torch.ones(9), Extent(str(tmp_path / "a"), MIB, 36, "fp32"), torch.float32)
    assert nothing_is_lent(manager)


def test_the_error_of_the_body_is_the_one_that_leaves(handle, manager, tmp_path):
    with pytest.raises(LookupError), staging_writer(handle, manager, MIB, "optimizer") as writer:
        writer.swap_out(torch.ones(9), str(tmp_path / "a"), torch.float32)
        raise LookupError
    assert nothing_is_lent(manager)


def test_after_ctrl_c_the_memory_stays_lent_for_the_drive_may_still_read_it(
    handle, manager, tmp_path, monkeypatch
):
    with (
        interrupted_wait(monkeypatch),
        pytest.raises(KeyboardInterrupt),
        staging_writer(handle, manager, MIB, "optimizer") as writer,
    ):
        writer.swap_out(torch.ones(9), str(tmp_path / "a"), torch.float32)
    assert manager.free_nbytes == 0
    handle.wait()


@pytest.mark.parametrize("numel", [1, 100, 101, 250])
def test_a_partition_on_storage_comes_in_pieces(handle, tmp_path, numel):
    values = torch.arange(numel, dtype=torch.int16)
    (tmp_path / "a").write_bytes(bytes(10) + values.numpy().tobytes())
    extent = Extent(str(tmp_path / "a"), 10, 2 * numel, "parameter 3")
    staging = torch.empty(100, dtype=torch.int16)
    found = [piece.clone() for piece in pieces(torch.empty(0), numel, extent, staging, handle)]
    assert torch.equal(torch.cat(found), values)


def test_a_partition_in_memory_comes_as_it_is(handle):
    tensor = torch.ones(3)
    assert list(pieces(tensor, 3, None, torch.empty(0), handle)) == [tensor]


@pytest.mark.parametrize(("size", "code"), [(0, errno.ENODATA), (None, errno.ENOENT)])
def test_a_partition_that_cannot_be_read_is_named(handle, tmp_path, size, code):
    if size is not None:
        (tmp_path / "a").touch()
        os.truncate(tmp_path / "a", size)
    extent = Extent(str(tmp_path / "a"), 0, 20, "parameter 3")
    with pytest.raises(OffloadIOError, match="reading parameter 3") as caught:
        list(pieces(torch.empty(0), 10, extent, torch.empty(10, dtype=torch.int16), handle))
    assert caught.value.errno == code
