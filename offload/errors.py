"""Every exception and warning that offload raises; imports nothing of offload, so all may import it."""

import errno as codes
import os
from typing import Any, ClassVar


class OffloadError(Exception):
    """Base of everything that offload raises on purpose."""


class OffloadConfigError(OffloadError, ValueError):
    """A configuration that cannot mean what it says; the message names the key and the way out."""


class OffloadIOError(OffloadError, OSError):
    """A transfer that was refused: errno, path, offset, bytes wanted and moved, what to do."""

    offset: int
    """Where in the file the extent of the refused transfer begins."""
    nbytes_wanted: int
    nbytes_moved: int

    numbers: ClassVar[tuple[str, ...]] = ("offset", "nbytes_wanted", "nbytes_moved")
    """What it carries beside errno, message and path."""

    def __init__(
        self,
        errno: int,
        message: str,
        filename: str | None = None,
        *,
        offset: int = 0,
        nbytes_wanted: int = 0,
        nbytes_moved: int = 0,
    ) -> None:
        super().__init__(errno, message, filename)
        self.offset = offset
        self.nbytes_wanted = nbytes_wanted
        self.nbytes_moved = nbytes_moved

    def during(self, what: str) -> "OffloadIOError":
        """The same error, its message naming what was under way: layers above add what only they know."""
        numbers = {key: vars(self)[key] for key in self.numbers}
        return type(self)(self.errno or 0, f"{what}: {self.strerror}", self.filename, **numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: vars(self)[key] for key in self.numbers}
        return (_rebuild_io_error, (type(self), self.errno, self.strerror, self.filename, state))


class OffloadIntegrityError(OffloadIOError):
    """What was read is not what was written there: path, offset, both digests, what to do."""

    expected: int
    found: int

    numbers = (*OffloadIOError.numbers, "expected", "found")

    def __init__(
        self,
        errno: int,
        message: str,
        filename: str | None = None,
        *,
        expected: int = 0,
        found: int = 0,
        **numbers: int,
    ) -> None:
        super().__init__(errno, message, filename, **numbers)
        self.expected = expected
        self.found = found


class OffloadMemoryError(OffloadError, MemoryError):
    """Memory that could not be had or locked; the message names the limit."""


class OffloadForkError(OffloadError, RuntimeError):
    """A forked child touched what belongs to its parent's threads."""


class OffloadWarning(UserWarning):
    """Something works, but not in the way that was asked for; said once."""


_WAYS_OUT = {
    codes.ENOSPC: "free space on that file system or choose another path",
    codes.EDQUOT: "the disk quota is used up: free space or choose another path",
    codes.EFBIG: "raise the file-size limit (ulimit -f) or choose a file system that takes larger files",
    codes.ENODATA: "the file ends before the last wanted byte: it was truncated or never written whole",
    codes.EIO: "the device reports a failure: see dmesg and the drive's health log",
    codes.ENOENT: "check that the path exists",
    codes.EACCES: "check the permissions of the path",
    codes.EROFS: "the file system is mounted read-only: choose another path",
    codes.EISDIR: "give a file, not a directory",
    codes.EMFILE: "raise the limit on open files (ulimit -n)",
}


def _rebuild_io_error(
    kind: type[OffloadIOError], errno: int, message: str, filename: str | None, state: dict[str, int]
) -> OffloadIOError:
    """Processes that compute hand their errors to the one that reports them by pickle."""
    return kind(errno, message, filename, **state)


def io_error(
    errno: int, call: str, filename: str, *, offset: int = 0, nbytes_wanted: int = 0, nbytes_moved: int = 0
) -> OffloadIOError:
    """The error for one refused system call, its message complete with numbers and the way out."""
    reason = os.strerror(errno)
    numbers = f"{nbytes_moved} of {nbytes_wanted} B moved at offset {offset}" if nbytes_wanted else ""
    way_out = _WAYS_OUT.get(errno, "")
    message = "; ".join(part for part in (f"{call}: {reason}", numbers, way_out) if part)
    return OffloadIOError(
        errno, message, filename, offset=offset, nbytes_wanted=nbytes_wanted, nbytes_moved=nbytes_moved
    )


def integrity_error(
    filename: str, offset: int, nbytes: int, expected: int, found: int
) -> OffloadIntegrityError:
    """The error for bytes that changed between their write and a read."""
    message = (
        f"{nbytes} B at offset {offset} are not what was written there: XXH3 expected {expected:016x}, "
        f"found {found:016x}; the drive or the memory is faulty, or something else wrote to the file: see "
        "dmesg and the drive's health log, and resume from the last checkpoint"
    )
    return OffloadIntegrityError(
        codes.EIO,
        message,
        filename,
        offset=offset,
        nbytes_wanted=nbytes,
        nbytes_moved=nbytes,
        expected=expected,
        found=found,
    )
