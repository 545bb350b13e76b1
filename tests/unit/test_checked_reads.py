"""When reads are compared with digests: by whoever waits, and as long as the file is the same."""

import asyncio
import threading

import pytest
import torch
from drive_faults import flip

from offload.checkpoint.mapped import mapped_tensor
from offload.errors import OffloadIntegrityError
from offload.io import AsyncIOHandle
from offload.io.digests import DIGESTS
from offload.swap.area import SwapArea
from offload.swap.layout import SwapFile

MIB = 1 << 20


@pytest.fixture
def handle(backend):
    with AsyncIOHandle(backend=backend, checksums=True) as handle:
        yield handle


def some(nbytes):
    return torch.arange(nbytes).to(torch.uint8)


@pytest.fixture
def spoiled(handle, tmp_path):
    """Reads of a file with a changed byte."""
    handle.write(some(3 * MIB), tmp_path / "x").wait()
    flip(tmp_path / "x", MIB)
    return lambda: handle.read(torch.empty(3 * MIB, dtype=torch.uint8), tmp_path / "x")


def test_every_wait_for_the_ticket_raises(spoiled):
    ticket, raised = spoiled(), []

    def wait():
        try:
            ticket.wait()
        except OffloadIntegrityError as error:
            raised.append(error.offset)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait()
    assert raised == [MIB] * 5


def test_waiting_for_all_compares_what_nobody_has_waited_for(handle, spoiled, tmp_path):
    spoiled()
    good = handle.read(torch.empty(MIB, dtype=torch.uint8), tmp_path / "x")
    with pytest.raises(OffloadIntegrityError):
        handle.wait()
    assert good.done() and handle.wait() == 0
    handle.async_pread(torch.empty(MIB, dtype=torch.uint8), str(tmp_path / "x"))
    assert handle.wait() == 1
    with pytest.raises(OffloadIntegrityError):
        spoiled().wait()
    assert handle.wait() == 0


def test_awaiting_the_ticket_compares_too(spoiled):
    async def read():
        await spoiled()

    with pytest.raises(OffloadIntegrityError):
        asyncio.run(read())


def test_a_ticket_compares_also_when_its_handle_is_closed(backend, tmp_path):
    with AsyncIOHandle(backend=backend, checksums=True) as handle:
        handle.write(some(100), tmp_path / "x").wait()
        flip(tmp_path / "x", 1)
        ticket = handle.read(torch.empty(100, dtype=torch.uint8), tmp_path / "x")
    with pytest.raises(OffloadIntegrityError):
        ticket.wait()


def test_memory_may_change_once_it_was_waited_for(handle, tmp_path):
    data = some(100)
    handle.write(data, tmp_path / "x").wait()
    data.zero_()
    ticket = handle.read(data, tmp_path / "x")
    ticket.wait()
    data.zero_()
    ticket.wait()


def test_a_new_file_under_an_old_name_is_compared_with_nothing_older(handle, tmp_path):
    path, found = tmp_path / "a.swp", torch.empty(4096, dtype=torch.uint8)
    SwapFile(path).allocate(4096, "old")
    handle.write(some(4096), path).wait()
    path.unlink()
    SwapFile(path).allocate(4096, "new")
    handle.read(found, path).wait()
    assert not found.any()


def test_a_closed_area_leaves_no_digest(handle, tmp_path):
    area = SwapArea(tmp_path, "optimizer", 0)
    handle.write(some(4096), area.path / "a.swp").wait()
    assert str(area.path / "a.swp") in DIGESTS._files
    area.close()
    assert str(area.path / "a.swp") not in DIGESTS._files


def test_a_mapped_tensor_is_compared_too(handle, tmp_path):
    file, data = SwapFile(tmp_path / "a.swp"), torch.randn(MIB)
    file.allocate(4096, "before")
    extent = file.allocate(data.nbytes, "weights of sub-group 3")
    handle.write(data, extent.path, extent.offset).wait()
    assert torch.equal(mapped_tensor(extent, torch.float32), data)
    flip(tmp_path / "a.swp", extent.offset + 2 * MIB)
    with pytest.raises(OffloadIntegrityError, match="weights of sub-group 3"):
        mapped_tensor(extent, torch.float32)


def test_a_mapped_file_without_digests_is_neither_read_nor_counted(tmp_path):
    extent = SwapFile(tmp_path / "a.swp").allocate(4096, "x")
    before = DIGESTS.bytes_checked, DIGESTS.bytes_unchecked
    mapped_tensor(extent, torch.uint8)
    assert (DIGESTS.bytes_checked, DIGESTS.bytes_unchecked) == before
