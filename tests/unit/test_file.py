import ctypes
import errno
import mmap
import os

import pytest
import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle, File


def test_reserved_space_is_there_at_once(tmp_path):
    with File(tmp_path / "x", "rw", nbytes=1_000_003) as file:
        assert file.nbytes == 1_000_003
        assert os.stat(file.path).st_blocks * 512 >= 1_000_003
        file.sync()
    assert file.closed and "closed" in repr(file)


def test_a_longer_file_keeps_its_length_and_content(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a" * 5000)
    with File(path, "rw", nbytes=10) as file:
        assert file.nbytes == 5000
    assert path.read_bytes() == b"a" * 5000


def test_reading_needs_a_file_and_creates_none(tmp_path):
    with pytest.raises(OffloadIOError) as caught:
        File(tmp_path / "x")
    assert caught.value.errno == errno.ENOENT and not (tmp_path / "x").exists()


@pytest.mark.parametrize("mode, nbytes", [("w", None), ("r", 10), ("rw", -1)])
def test_modes_and_sizes_that_make_no_sense_are_refused(tmp_path, mode, nbytes):
    with pytest.raises(ValueError):
        File(tmp_path / "x", mode, nbytes)


def test_names_that_are_no_utf8_are_taken(handle, tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\xfe"
    handle.write(torch.ones(10), os.fsdecode(path)).wait()
    assert os.stat(path).st_size == 40
    with pytest.raises(OffloadIOError) as caught:
        handle.read(torch.ones(11), os.fsdecode(path)).wait()
    assert os.fsencode(caught.value.filename) == path


def test_a_buffered_file_moves_the_same_bytes(handle, tmp_path):
    data = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8)
    with File(tmp_path / "x", "rw", direct=False) as file:
        assert not file.is_direct and "buffered" in repr(file)
        handle.write(data, file).wait()
        found = torch.zeros_like(data)
        handle.read(found, file).wait()
    assert torch.equal(found, data)
    assert handle.stats()["direct_bytes"] == 0 == handle.stats()["direct_fallbacks"]


def test_direct_and_buffered_views_of_one_file_agree(handle, tmp_path):
    path = tmp_path / "x"
    data = torch.randint(0, 256, (300_001,), dtype=torch.uint8)
    with File(path, "rw") as direct, File(path, "rw", direct=False) as buffered:
        for turn in range(10):
            data.add_(1)
            handle.write(data, direct if turn % 2 else buffered).wait()
            found = torch.zeros_like(data)
            handle.read(found, buffered if turn % 2 else direct).wait()
            assert torch.equal(found, data)


def test_closing_twice_is_harmless_and_several_handles_share_a_file(tmp_path):
    file = File(tmp_path / "x", "rw")
    with AsyncIOHandle() as one, AsyncIOHandle(backend="posix") as other:
        tickets = [one.write(torch.ones(5000), file), other.write(torch.ones(5000), file, 20_000)]
        file.close()
        file.close()
        assert [ticket.wait() for ticket in tickets] == [20_000] * 2


def resident_pages(path):
    """The numbers of the file's pages that are in the page cache."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        found = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), found) == 0
        return [page for page, state in enumerate(found) if state & 1]


def test_what_is_read_beside_direct_transfers_brings_no_neighbours_into_the_page_cache(tmp_path):
    """Neighbours in the cache would be older than what is being written past it, and could not be dropped."""
    path = tmp_path / "x"
    page = mmap.PAGESIZE
    path.write_bytes(bytes(512 * page))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with File(path) as file, AsyncIOHandle() as handle:
        if not file.is_direct:
            pytest.skip("the file system of the temporary folder takes no O_DIRECT")
        if resident_pages(path):
            pytest.skip("the file system of the temporary folder keeps its files in memory")
        for index in range(3):  # in order, which is what makes the kernel read ahead
            handle.read(torch.empty(100, dtype=torch.uint8), file, index * page).wait()
    assert resident_pages(path) == [0, 1, 2]
