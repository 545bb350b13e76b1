"""A folder for swap files that belongs to one swapper of one living process."""

import fcntl
import json
import os
import shutil
import socket
import time
import uuid
import warnings
import weakref
from pathlib import Path

from offload.config.storage import filesystem_of
from offload.errors import OffloadWarning
from offload.io.digests import DIGESTS

FOLDER = "offload-swap"
"""Name of our folder under the user's `nvme_path`; nothing outside it is ever touched."""

_OF_ONE_KERNEL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "overlay", "tmpfs"}
"""File systems that one kernel has to itself: its locks tell about every process that can reach the files."""


class SwapArea:
    """`<root>/offload-swap/<kind>-rank<rank>-<unique>/`, guarded by a lock file beside it.

    The lock is an advisory `flock` held by the process for as long as it lives, so a folder whose lock can be
    taken is left over from a dead process: it is reported and removed. On a network file system the folder of
    another machine is only reported. The folder goes with `close()`, with the garbage collector or at exit.
    """

    def __init__(self, root: str | os.PathLike[str], kind: str, rank: int) -> None:
        base = Path(root) / FOLDER
        _remove_stale(base)
        name = f"{kind}-rank{rank}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        lock_path = base / f"{name}.lock"
        descriptor = _create_locked(lock_path)
        self.path = base / name
        self.path.mkdir(mode=0o700)
        self._finalizer = weakref.finalize(self, _remove_own, self.path, lock_path, descriptor, os.getpid())

    def close(self) -> None:
        """Remove the folder and everything in it; a second call does nothing."""
        self._finalizer()


def _create_locked(path: Path) -> int:
    while True:
        _create_base(path.parent)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the last swapper of another process has just removed the folder
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_same_file(descriptor, path):
            break
        os.close(descriptor)  # somebody took the still unlocked file for a stale one and removed it
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    os.write(descriptor, json.dumps(owner).encode())
    return descriptor


def _create_base(base: Path) -> None:
    """Whoever may write to the user's folder may write to ours: users share a drive."""
    try:
        base.mkdir(parents=True)
        base.chmod(base.parent.stat().st_mode & 0o7777)
    except FileExistsError:
        return
    except FileNotFoundError:
        if not base.parent.is_dir():
            raise
        # the last swapper of another process has just removed it, which the caller finds out


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_own(folder: Path, lock_path: Path, descriptor: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child: the parent still works in this folder
    shutil.rmtree(folder, ignore_errors=True)
    DIGESTS.forget_folder(str(folder))
    lock_path.unlink(missing_ok=True)
    os.close(descriptor)
    try:
        lock_path.parent.rmdir()
    except OSError:
        return  # other swappers still live there


def _remove_stale(base: Path) -> None:
    for lock_path in _lock_paths(base):
        try:
            descriptor = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # gone by now, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, lock_path):  # not a new one of that name
                _report_stale(lock_path)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _lock_paths(base: Path) -> list[Path]:
    try:
        names = os.listdir(base)
    except FileNotFoundError:
        return []
    return [base / name for name in sorted(names) if name.endswith(".lock")]


def _report_stale(lock_path: Path) -> None:
    folder = lock_path.with_suffix("")
    owner = _owner(lock_path)
    nbytes = sum(entry.stat().st_size for entry in folder.glob("*")) if folder.is_dir() else 0
    what = f"{folder}: {nbytes} B of swap data left by process {owner.get('pid', '?')}, which is gone"
    here = socket.gethostname()
    if owner.get("host", here) != here and filesystem_of(lock_path.parent) not in _OF_ONE_KERNEL:
        warnings.warn(f"{what} or lives on {owner['host']}; not removed", OffloadWarning, stacklevel=4)
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock_path.unlink(missing_ok=True)
    if nbytes:
        warnings.warn(f"{what}; removed", OffloadWarning, stacklevel=4)


def _owner(lock_path: Path) -> dict[str, str]:
    try:
        owner = json.loads(lock_path.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}
