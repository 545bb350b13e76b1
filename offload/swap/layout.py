"""Where swapped bytes lie on storage."""

import os
from dataclasses import dataclass
from pathlib import Path

from offload.errors import OffloadIOError, io_error
from offload.io.digests import DIGESTS
from offload.swap.arena import align_up


@dataclass(frozen=True)
class Extent:
    """`nbytes` bytes of the file `path`, from `offset` on; `key` names what they are in messages."""

    path: str
    offset: int
    nbytes: int
    key: str


class SwapFile:
    """A swap file, made new, that grows by whole, preallocated extents.

    Space is reserved when an extent is made, so a full drive is an `OffloadIOError` at that moment and not in
    the middle of a step.

    Raises:
        OffloadIOError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        os.close(_open(path, os.O_CREAT | os.O_EXCL))
        DIGESTS.forget(str(path))  # an older file had that name

    def allocate(self, nbytes: int, key: str) -> Extent:
        """A new extent of `nbytes` bytes at the end of the file.

        Raises:
            OffloadIOError: the file system has no room for it.
        """
        extent = Extent(str(self.path), self.nbytes, nbytes, key)
        reserved = align_up(max(nbytes, 1))
        descriptor = _open(self.path, 0)
        try:
            os.posix_fallocate(descriptor, extent.offset, reserved)
        except OSError as error:
            os.ftruncate(descriptor, self.nbytes)  # a part may have been reserved
            raise _reservation_error(error, extent, reserved) from error
        finally:
            os.close(descriptor)
        self.nbytes += reserved
        return extent


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise io_error(error.errno or 0, "open", str(path)) from error


def _reservation_error(error: OSError, extent: Extent, nbytes: int) -> OffloadIOError:
    """The error for `nbytes` bytes that could not be reserved for `extent`, with what is free."""
    status = os.statvfs(os.path.dirname(extent.path))
    free = status.f_bavail * status.f_frsize
    what = f"reserving {nbytes} B for {extent.key} where {free} B are free"
    return io_error(error.errno or 0, what, extent.path, offset=extent.offset)
