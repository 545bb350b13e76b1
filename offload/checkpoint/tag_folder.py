"""A checkpoint tag that changes from the old content to the new in one step."""

import ctypes
import os
import shutil
from pathlib import Path

RENAME_EXCHANGE = 2  # linux/fs.h
AT_FDCWD = -100  # linux/fcntl.h


class TagFolder:
    """`<save_dir>/<tag>`, written under another name first.

    `publish` makes the new content appear under the tag; whoever is killed before that leaves the old content
    as it was.
    """

    def __init__(self, save_dir: str | os.PathLike[str], tag: str) -> None:
        self.path = Path(save_dir) / tag
        self.staging_tag = str(Path(tag).parent / f".{Path(tag).name}.saving")
        self.staging_path = Path(save_dir) / self.staging_tag
        self._previous = self.path.parent / f".{self.path.name}.previous"

    def discard_staging(self) -> None:
        """Remove what an interrupted save left."""
        shutil.rmtree(self.staging_path, ignore_errors=True)

    def publish(self) -> None:
        """Make the staged content durable and put it in the tag's place.

        Raises:
            OSError: the folder cannot be renamed; old and staged content are both intact.
        """
        for path in [*self.staging_path.rglob("*"), self.staging_path]:
            _sync(path)
        if not self.path.exists():
            self.staging_path.rename(self.path)
        elif _exchange(self.staging_path, self.path):
            self.discard_staging()
        else:
            shutil.rmtree(self._previous, ignore_errors=True)
            self.path.rename(self._previous)
            self.staging_path.rename(self.path)
            shutil.rmtree(self._previous, ignore_errors=True)
        _sync(self.path.parent)

    def recover(self) -> None:
        """Bring the old content back where a save died between two renames."""
        if not self.path.exists() and self._previous.exists():
            self._previous.rename(self.path)


def write_latest(save_dir: str | os.PathLike[str], tag: str) -> None:
    """Point `<save_dir>/latest` at `tag`; readers see the old content or the new, never a part."""
    latest = Path(save_dir) / "latest"
    fresh = latest.with_name(".latest.saving")
    fresh.write_text(tag)
    _sync(fresh)
    fresh.rename(latest)
    _sync(latest.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the file system or the C library cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    result = renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE)
    return bool(result == 0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
