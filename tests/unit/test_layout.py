"""Swap files grow by whole extents whose space is reserved when they are made."""

import errno
import os

import pytest

from offload.errors import OffloadIOError
from offload.swap.layout import SwapFile

MIB = 1 << 20


@pytest.fixture
def full_drive(mounted):
    """A file system with 2 MiB of room."""
    return mounted("-t", "tmpfs", "-o", "size=2m", "tmpfs")


def test_a_swap_file_is_private_and_new(tmp_path):
    path = tmp_path / "a.swp"
    SwapFile(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OffloadIOError, match="File exists"):
        SwapFile(path)


def test_a_file_that_cannot_be_made_is_named_with_the_reason(tmp_path):
    with pytest.raises(OffloadIOError, match="No such file") as caught:
        SwapFile(tmp_path / "missing" / "a.swp")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "missing" / "a.swp"))


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097])
def test_extents_follow_each_other_on_boundaries(tmp_path, nbytes):
    file = SwapFile(tmp_path / "a.swp")
    first, second = file.allocate(nbytes, "first"), file.allocate(nbytes, "second")
    assert (first.offset, first.nbytes, first.key) == (0, nbytes, "first")
    assert second.offset % 4096 == 0
    assert second.offset >= first.offset + max(nbytes, 1)
    assert file.nbytes == os.stat(file.path).st_size


def test_the_space_of_an_extent_is_really_there(tmp_path):
    file = SwapFile(tmp_path / "a.swp")
    file.allocate(5 * MIB + 1, "x")
    assert os.stat(file.path).st_blocks * 512 >= 5 * MIB + 1


def test_no_room_is_an_error_with_name_path_needed_and_free_bytes(full_drive):
    file = SwapFile(full_drive / "a.swp")
    kept = file.allocate(MIB, "kept")
    with pytest.raises(
        OffloadIOError, match=rf"reserving {4 * MIB} B for exp_avg of .* {MIB} B are free"
    ) as caught:
        file.allocate(4 * MIB, "exp_avg of sub-group 3")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(file.path))
    assert kept.nbytes == MIB


def test_a_refused_extent_takes_no_space(full_drive):
    file = SwapFile(full_drive / "a.swp")
    with pytest.raises(OffloadIOError):
        file.allocate(4 * MIB, "large")
    assert file.nbytes == os.stat(file.path).st_size == 0
    assert os.statvfs(full_drive).f_bavail * os.statvfs(full_drive).f_frsize == 2 * MIB
    assert file.allocate(MIB, "small").offset == 0
