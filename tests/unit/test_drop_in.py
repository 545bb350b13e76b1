import os

import pytest
import torch

from offload.errors import OffloadIOError, OffloadWarning
from offload.io import pinned
from offload.io.drop_in import aio_handle, async_io_op, pin_memory_op

DATA = torch.arange(300_001, dtype=torch.float32)


@pytest.fixture
def stock():
    with aio_handle(1 << 20, 8, False, True, 2) as handle:
        yield handle


def test_defaults_are_deepspeeds():
    with aio_handle() as handle:
        settings = (
            handle.get_block_size(),
            handle.get_queue_depth(),
            handle.get_single_submit(),
            handle.get_overlap_events(),
            handle.get_intra_op_parallelism(),
        )
        assert settings == (1 << 20, 128, False, False, 1)
        assert handle.get_alignment() > 0


def test_keywords_are_deepspeeds(tmp_path):
    with aio_handle(
        block_size=4096, queue_depth=2, single_submit=True, overlap_events=True, intra_op_parallelism=3
    ) as handle:
        assert handle.write(buffer=DATA, filename=str(tmp_path / "x"), validate=True, file_offset=5) == 0
        found = torch.zeros_like(DATA)
        assert handle.async_pread(buffer=found, filename=str(tmp_path / "x"), file_offset=5) == 0
        assert handle.wait() == 1 and torch.equal(found, DATA)
        locked = handle.new_cpu_locked_tensor(num_elem=7, example_tensor=DATA)
        assert handle.is_pinned(buffer=locked) and handle.free_cpu_locked_tensor(tensor=locked)


def test_blocking_read_and_write_mean_what_they_mean_there(stock, tmp_path):
    path = str(tmp_path / "x")
    assert stock.write(DATA, path, True) == 0
    found = torch.zeros_like(DATA)
    assert stock.read(found, path, True) == 0
    assert torch.equal(found, DATA)
    assert stock.wait() == 0


def test_counts_are_deepspeeds(stock, tmp_path):
    path = str(tmp_path / "x")
    assert stock.pwrite(DATA, path, False, False, 0) == 1
    assert stock.pread(DATA.clone(), path, False, True, 0) == 0
    assert stock.async_pread(DATA.clone(), path, 0) == 0
    assert stock.wait() == 2


def test_a_descriptor_of_an_open_file_is_taken(stock, tmp_path):
    descriptor = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    assert stock.async_pwrite(DATA, descriptor, 0) == 0
    assert stock.async_pwrite(buffer=DATA, fd=descriptor, file_offset=DATA.nbytes) == 0
    assert stock.wait() == 2
    os.close(descriptor)
    assert (tmp_path / "x").read_bytes() == DATA.numpy().tobytes() * 2


@pytest.mark.parametrize("target", [{}, {"filename": "x", "fd": 1}])
def test_a_write_goes_to_a_name_or_to_a_descriptor(stock, target):
    with pytest.raises(TypeError, match="either a filename or the descriptor"):
        stock.async_pwrite(DATA, **target)


def test_a_small_block_size_is_shown_as_it_was_given():
    with pytest.warns(OffloadWarning, match="block_size 1024"), aio_handle(1024) as handle:
        assert handle.get_block_size() == 1024


def test_module_functions(tmp_path):
    path = str(tmp_path / "x")
    found = torch.zeros_like(DATA)
    with pytest.warns(OffloadWarning, match="block_size 1000"):
        assert async_io_op.aio_write(DATA, path, 1000, 4, False, True, True) == 0
    assert async_io_op.aio_read(found, path, 4096, 4, True, False, True) == 0
    assert torch.equal(found, DATA)
    assert async_io_op.deepspeed_memcpy(found.zero_(), DATA) == 0
    assert torch.equal(found, DATA)


def test_failures_raise(stock, tmp_path):
    with pytest.raises(OffloadIOError, match="No such file"):
        stock.read(DATA, str(tmp_path / "x"), False)


def test_validation_finds_a_file_that_differs(tmp_path, monkeypatch, stock):
    path = tmp_path / "x"
    stock.write(DATA, str(path), False)
    broken = bytearray(path.read_bytes())
    broken[70_000] ^= 1
    monkeypatch.setattr(aio_handle, "sync_pread", lambda *_: path.write_bytes(broken))
    with pytest.raises(OffloadIOError, match="byte 70000 of the file differs"):
        stock.read(DATA.clone(), str(path), True)


def test_pin_handle():
    handle = pin_memory_op.pin_handle()
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    assert handle.is_pinned(tensor) and tensor.dtype == torch.bfloat16
    assert handle.free_cpu_locked_tensor_by_ptr(tensor.data_ptr())
    with pytest.raises(ValueError):
        handle.free_cpu_locked_tensor(tensor)
    assert pinned.totals().locked_bytes == 0
