"""Whether a directory can take swap files: looked at and tried, without leaving anything behind."""

import errno
import fcntl
import mmap
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil

from offload.errors import OffloadConfigError, OffloadWarning

_DIRECT_NBYTES = 4096
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_REFUSED_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def check_swap_path(path: Path, key: str) -> None:
    """Refuse a path that cannot hold swap files; warn about one that can, but not as swapping means it."""
    directory = nearest_directory(path, key)
    try:
        direct = _try_direct_write(directory)
    except OSError as error:
        raise OffloadConfigError(_not_writable(path, directory, key, error)) from None
    filesystem = filesystem_of(directory)
    if filesystem in _IN_MEMORY:
        _warn(
            f"{key}: {path} is on {filesystem}, which is memory: what is swapped there frees none; "
            "name a directory on a drive"
        )
    elif not direct:
        _warn(
            f"{key}: {path} is on {filesystem}, which refuses direct I/O (O_DIRECT): transfers go through "
            "the page cache, slower and with memory of their own; name a directory on a local drive"
        )


def nearest_directory(path: Path, key: str) -> Path:
    """The directory itself, or the closest one above it in which it can be made."""
    for candidate in _upwards(path):
        try:
            mode = candidate.stat().st_mode
        except FileNotFoundError:
            if candidate.is_symlink():
                raise OffloadConfigError(
                    f"{key}: {candidate} is a link to nothing; make its target or name a directory"
                ) from None
            continue
        except NotADirectoryError:
            continue  # a file stands further up: it is the one to name
        except (OSError, ValueError) as error:
            raise OffloadConfigError(f"{key}: {str(candidate)!r} cannot be looked at: {error}") from None
        if not stat.S_ISDIR(mode):
            raise OffloadConfigError(
                f"{key}: {candidate} is {_kind(mode)}; name a directory on the drive instead"
            )
        return candidate
    raise OffloadConfigError(f"{key}: nothing above {path} exists; name a directory on a drive")


def filesystem_of(directory: Path) -> str:
    """The type of the file system a directory is on, as /proc/mounts names it."""
    resolved = directory.resolve()
    mounts = [
        mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)
    ]
    if not mounts:
        return "an unknown file system"
    # of two mounts on one point the later covers the earlier
    return str(max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype)


def _upwards(path: Path) -> Iterator[Path]:
    absolute = Path(os.path.abspath(path))
    yield absolute
    yield from absolute.parents


def _try_direct_write(directory: Path) -> bool:
    """One aligned block through O_DIRECT: some file systems take the flag and then refuse the write."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file, mmap.mmap(-1, _DIRECT_NBYTES) as block:
        try:
            flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
            fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(file.fileno(), block, 0)
        except OSError as error:
            if error.errno not in _REFUSED_DIRECT:
                raise
            return False
        return True


def _not_writable(path: Path, directory: Path, key: str, error: OSError) -> str:
    place = f"{path}" if directory == Path(os.path.abspath(path)) else f"{path} cannot be made: {directory}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{key}: {place} takes no more data ({error.strerror}); free space or name another directory"
    return (
        f"{key}: {place} is not writable ({error.strerror}); change its permissions or name another directory"
    )


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISREG: "a regular file",
        stat.S_ISBLK: "a block device (make a file system on it and mount that)",
        stat.S_ISCHR: "a character device",
        stat.S_ISFIFO: "a named pipe",
        stat.S_ISSOCK: "a socket",
    }
    return next((name for matches, name in kinds.items() if matches(mode)), "not a directory")


def _warn(message: str) -> None:
    warnings.warn(message, OffloadWarning, stacklevel=4)
