"""Real faults: each is an exception with path, sizes and errno, and the handle goes on working."""

import contextlib
import errno
import os
import resource
import subprocess

import pytest
import torch

from offload.errors import OffloadIOError, OffloadWarning
from offload.io import AsyncIOHandle, File

WANTED = 16 << 20


def check_full(handle, path, code, blocking):
    data = torch.ones(WANTED, dtype=torch.uint8)
    with pytest.raises(OffloadIOError) as caught:
        if blocking:
            handle.sync_pwrite(data, str(path))
        else:
            handle.async_pwrite(data, str(path))
            handle.wait()
    error = caught.value
    assert (error.errno, error.filename, error.nbytes_wanted) == (code, str(path), WANTED)
    assert 0 <= error.nbytes_moved < WANTED
    assert str(path) in str(error) and str(WANTED) in str(error) and str(error.nbytes_moved) in str(error)
    with contextlib.suppress(OffloadIOError):  # blocks land in any order, so the file may have holes
        handle.sync_pread(data, str(path))
    path.unlink()
    data.fill_(2)
    handle.write(data[: 1 << 20], path).wait()
    found = torch.zeros(1 << 20, dtype=torch.uint8)
    handle.read(found, path).wait()
    assert torch.equal(found, data[: 1 << 20])


@pytest.fixture
def small_handle(backend):
    with AsyncIOHandle(1 << 20, 8, backend=backend) as handle:
        yield handle


@pytest.fixture
def full_ext4(tmp_path, mounted):
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(12 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    return mounted("-o", "loop", str(image))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_tmpfs_is_reported(small_handle, mounted, blocking):
    folder = mounted("-t", "tmpfs", "-o", "size=8m", "tmpfs")
    check_full(small_handle, folder / "x", errno.ENOSPC, blocking)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_drive_is_reported(small_handle, full_ext4, blocking):
    check_full(small_handle, full_ext4 / "x", errno.ENOSPC, blocking)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_file_size_limit_is_reported(small_handle, tmp_path, blocking):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        check_full(small_handle, tmp_path / "x", errno.EFBIG, blocking)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_file_size_limit_kills_nobody_who_left_its_signal_alone(child, tmp_path):
    done = child(
        """
        import resource, signal, sys, torch
        from offload.io import AsyncIOHandle
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        for backend in ("uring", "libaio", "posix"):
            with AsyncIOHandle(backend=backend) as handle:
                try:
                    handle.write(torch.ones(1 << 20), f"{sys.argv[1]}/{backend}").wait()
                except OSError as error:
                    print(error.errno)
        """,
        str(tmp_path),
    )
    assert (done.returncode, done.stdout.split()) == (0, [str(errno.EFBIG)] * 3), done.stderr


def test_reserving_space_on_a_full_drive_fails_before_a_byte_is_written(full_ext4):
    with pytest.raises(OffloadIOError) as caught:
        File(full_ext4 / "x", "rw", nbytes=64 << 20)
    assert (caught.value.errno, caught.value.nbytes_wanted) == (errno.ENOSPC, 64 << 20)


def test_a_read_only_mount_is_reported(handle, tmp_path, mounted):
    folder = mounted("-t", "tmpfs", "-o", "ro", "tmpfs")
    with pytest.raises(OffloadIOError) as caught:
        handle.write(torch.ones(10), folder / "x")
    assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 5])
def test_a_truncated_file_is_never_read_as_whole(handle, tmp_path, length):
    path = tmp_path / "x"
    path.write_bytes(os.urandom(length))
    for wanted in (length + 1, length + 4096, length + (3 << 20)):
        found = torch.zeros(wanted, dtype=torch.uint8)
        with pytest.raises(OffloadIOError) as caught:
            handle.read(found, path).wait()
        error = caught.value
        assert (error.errno, error.nbytes_wanted, error.nbytes_moved) == (errno.ENODATA, wanted, length)
        assert found[:length].numpy().tobytes() == path.read_bytes()


def test_a_file_deleted_or_cut_under_the_reader(handle, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(os.urandom(1 << 20))
    with File(path) as file:
        path.unlink()
        assert handle.read(torch.empty((1 << 20) - 1, dtype=torch.uint8), file, 1).wait() == (1 << 20) - 1
    path.write_bytes(os.urandom(1 << 20))
    with File(path) as file:
        os.truncate(path, 5000)
        with pytest.raises(OffloadIOError, match="truncated"):
            handle.read(torch.empty(1 << 20, dtype=torch.uint8), file).wait()


def test_an_unreadable_drive_is_an_error_of_that_transfer(handle, tmp_path):
    """A process's own memory file refuses unmapped addresses with EIO, as a broken drive does."""
    if handle.backend == "libaio":
        pytest.skip("libaio refuses files under /proc altogether")
    good = handle.write(torch.ones(1 << 20), tmp_path / "x")
    with File("/proc/self/mem", direct=False) as file:
        bad = handle.read(torch.empty(4096, dtype=torch.uint8), file, 4096)
        with pytest.raises(OffloadIOError) as caught:
            bad.wait()
    assert caught.value.errno == errno.EIO
    assert good.wait() == 4 << 20


def test_no_more_descriptors_is_reported_and_passes(handle, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 8, hard))
    try:
        tickets = [handle.write(torch.ones(70_001), tmp_path / f"{index}") for index in range(100)]
        assert sum(ticket.wait() for ticket in tickets) == 100 * 4 * 70_001
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all((tmp_path / f"{index}").stat().st_size == 4 * 70_001 for index in range(100))


def check_announced_and_counted(backend, folder):
    with AsyncIOHandle(backend=backend) as handle:
        data = torch.arange(300_001)
        with pytest.warns(OffloadWarning, match="refuses O_DIRECT") as caught:
            for index in range(3):
                handle.write(data, folder / f"{index}")
            assert handle.wait() == 3
        assert len(caught) == 1 and handle.stats()["direct_fallbacks"] > 0
        found = torch.zeros_like(data)
        handle.read(found, folder / "2").wait()
        assert torch.equal(found, data)


def test_o_direct_refused_at_open_is_announced_once_and_counted(backend, mounted):
    check_announced_and_counted(backend, mounted("-t", "ramfs", "ramfs"))


def test_o_direct_refused_by_the_mount_is_announced_once_and_counted(backend, tmp_path, mounted):
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    folder = mounted("-o", "loop,data=journal", str(image))
    if File(folder / "probe", "rw").is_direct:
        pytest.skip("this kernel does not tell that a journal of data rules O_DIRECT out")
    check_announced_and_counted(backend, folder)
