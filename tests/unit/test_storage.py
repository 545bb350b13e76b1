"""A swap path is tried before it is trusted, and nothing is left behind."""

import errno
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from offload.config import storage
from offload.config.storage import check_swap_path, filesystem_of, nearest_directory
from offload.errors import OffloadConfigError, OffloadWarning

KEY = "zero_optimization.offload_optimizer.nvme_path"
NOBODY = 65534


@pytest.fixture
def unprivileged():
    """Take root's pass through every permission bit away."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


@pytest.fixture
def read_only_directory(unprivileged):
    """Reachable by everybody, writable by nobody."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o555)
    yield path
    path.rmdir()


def refuses(path, match):
    with pytest.raises(OffloadConfigError, match=match) as caught:
        check_swap_path(path, KEY)
    assert str(caught.value).startswith(f"{KEY}: ")


def checked_under(mount, path):
    """The check of `path` after `mount`, in a mount namespace of its own; skipped where forbidden."""
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    body = f"import pathlib, offload.config.storage as s; s.check_swap_path(pathlib.Path('{path}'), 'key')"
    script = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -W always -c "$1"', sys.executable, body]
    return subprocess.run(script, capture_output=True, text=True)


def test_a_directory_is_accepted_and_left_as_it_was(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=OffloadWarning)  # the machine's /tmp may be a tmpfs
        check_swap_path(tmp_path, KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_accepted_and_not_made(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=OffloadWarning)
        check_swap_path(tmp_path / "a" / "b", KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_regular_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.touch()
    refuses(path, "file is a regular file; name a directory")


def test_a_path_below_a_regular_file_names_the_file(tmp_path):
    path = tmp_path / "file"
    path.touch()
    refuses(path / "swap" / "deep", f"{path} is a regular file")


@pytest.mark.skipif(not Path("/dev/loop0").is_block_device(), reason="no block device here")
def test_a_block_device_is_refused():
    refuses(Path("/dev/loop0"), "is a block device .*mount that")


def test_a_device_node_is_refused():
    refuses(Path("/dev/null"), "is a character device")


def test_a_pipe_and_a_socket_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    refuses(Path("pipe"), "is a named pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        refuses(Path("socket"), "is a socket")


def test_a_link_to_nothing_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    refuses(link / "swap", "is a link to nothing")


def test_a_link_to_a_directory_is_followed(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert nearest_directory(link / "swap", KEY) == link


def test_a_link_to_itself_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(link)
    refuses(link, "cannot be looked at")


def test_a_directory_without_write_permission_is_refused(read_only_directory):
    refuses(read_only_directory, "is not writable .Permission denied")


def test_a_directory_that_cannot_be_made_is_refused(read_only_directory):
    refuses(read_only_directory / "swap", f"swap cannot be made: {read_only_directory} is not writable")


def test_a_directory_that_cannot_be_reached_is_refused(read_only_directory):
    read_only_directory.chmod(0)
    refuses(read_only_directory / "swap", "cannot be looked at: .*Permission denied")


def test_a_read_only_mount_is_refused(tmp_path):
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    assert "is not writable (Read-only file system)" in checked_under(mount, tmp_path).stderr


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_memory_posing_as_storage_is_warned_about(tmp_path, kind):
    run = checked_under(f"mount -t {kind} none {tmp_path}", tmp_path)
    assert run.returncode == 0
    assert f"{tmp_path} is on {kind}, which is memory" in run.stderr


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refused_direct_write_is_a_warning_with_the_file_system(tmp_path, monkeypatch, code):
    monkeypatch.setattr(storage, "filesystem_of", lambda directory: "nfs4")
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
    with pytest.warns(OffloadWarning, match=r"is on nfs4, which refuses direct I/O.*page cache"):
        check_swap_path(tmp_path, KEY)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_drive_is_refused(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
    refuses(tmp_path, "takes no more data .*free space")


def test_the_file_system_is_the_one_of_the_innermost_mount():
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(Path("/")) not in ("", "an unknown file system")


@pytest.mark.parametrize("path", ["a\0b", "/" + "x" * 300])
def test_impossible_paths_are_refused(path):
    refuses(Path(path), "cannot be looked at")
