"""A swap area belongs to one living process: nobody else's files are touched, and nothing is left behind."""

import fcntl
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from offload.errors import OffloadWarning
from offload.swap import area as area_module
from offload.swap.area import FOLDER, SwapArea

fork = multiprocessing.get_context("fork")


def left_in(root):
    return sorted(path.name for path in (root / FOLDER).glob("*"))


def in_child(body):
    """Runs `body` in a forked child and gives its exit status; nothing of pytest runs in there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = body() or 0
        finally:
            os._exit(status)
    return pid


def killed_process(root, nbytes=4096):
    """The area of a process that was killed with a swap file in it."""
    reader, writer = os.pipe()

    def body():
        area = SwapArea(root, "optimizer", 0)
        (area.path / "00000.fp32.swp").write_bytes(bytes(nbytes))
        os.write(writer, str(area.path).encode())
        signal.pause()

    pid = in_child(body)
    path = Path(os.read(reader, 4096).decode())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    return path, pid


def test_an_area_is_a_private_folder_with_a_lock_beside_it(tmp_path):
    area = SwapArea(tmp_path, "optimizer", 3)
    assert area.path.parent == tmp_path / FOLDER
    assert area.path.name.startswith(f"optimizer-rank3-{os.getpid()}-")
    assert area.path.stat().st_mode & 0o777 == 0o700
    owner = json.loads(area.path.with_suffix(".lock").read_text())
    assert (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
    area.close()


def test_areas_of_one_process_are_different_folders(tmp_path):
    areas = [SwapArea(tmp_path, "parameters", 0) for _ in range(3)]
    assert len({area.path for area in areas}) == 3
    areas[0].close()
    assert areas[1].path.is_dir()
    for area in areas:
        area.close()


def test_close_removes_the_files_and_the_last_one_the_folder(tmp_path):
    (tmp_path / "precious").touch()
    first, second = SwapArea(tmp_path, "parameters", 0), SwapArea(tmp_path, "optimizer", 0)
    (first.path / "a.swp").write_bytes(bytes(10))
    first.close()
    assert left_in(tmp_path) == sorted([second.path.name, f"{second.path.name}.lock"])
    second.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_dropped_area_goes_with_the_garbage_collector(tmp_path):
    SwapArea(tmp_path, "optimizer", 0)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_root_is_made(tmp_path):
    area = SwapArea(tmp_path / "a" / "b", "optimizer", 0)
    assert area.path.is_dir()
    area.close()


def test_the_folder_is_as_open_as_the_root(tmp_path):
    tmp_path.chmod(0o1777)
    area = SwapArea(tmp_path, "optimizer", 0)
    assert area.path.parent.stat().st_mode & 0o7777 == 0o1777
    area.close()


def test_the_area_of_a_killed_process_is_reported_with_its_size_and_removed(tmp_path):
    stale, pid = killed_process(tmp_path, nbytes=12345)
    assert (stale / "00000.fp32.swp").exists()
    with pytest.warns(OffloadWarning, match=rf"{stale}: 12345 B .*process {pid}, which is gone; removed"):
        area = SwapArea(tmp_path, "optimizer", 0)
    assert left_in(tmp_path) == sorted([area.path.name, f"{area.path.name}.lock"])
    area.close()


def test_the_area_of_a_living_process_is_never_touched(tmp_path, recwarn):
    ready, done = fork.Event(), fork.Event()

    def live():
        area = SwapArea(tmp_path, "optimizer", 0)
        (area.path / "a.swp").touch()
        ready.set()
        done.wait(30)
        return 0 if (area.path / "a.swp").exists() else 7

    pid = in_child(live)
    assert ready.wait(30)
    area = SwapArea(tmp_path, "optimizer", 0)
    area.close()
    done.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not recwarn.list


def test_a_folder_without_swap_data_is_removed_without_a_word(tmp_path, recwarn):
    stale = tmp_path / FOLDER / "optimizer-rank0-1-x"
    stale.mkdir(parents=True)
    stale.with_suffix(".lock").write_text("not json")
    SwapArea(tmp_path, "optimizer", 0).close()
    assert not stale.exists()
    assert not recwarn.list


@pytest.mark.parametrize(("filesystem", "stays"), [("ext4", False), ("nfs4", True)])
def test_the_folder_of_another_machine_is_only_reported_where_it_may_live(
    tmp_path, monkeypatch, filesystem, stays
):
    monkeypatch.setattr(area_module, "filesystem_of", lambda directory: filesystem)
    stale = tmp_path / FOLDER / "optimizer-rank0-1-x"
    stale.mkdir(parents=True)
    (stale / "a.swp").write_bytes(bytes(5))
    stale.with_suffix(".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.warns(OffloadWarning, match="lives on elsewhere; not removed" if stays else "; removed"):
        SwapArea(tmp_path, "optimizer", 0).close()
    assert stale.exists() == stays


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user takes root")
def test_the_area_of_another_user_is_left_alone(tmp_path):
    tmp_path.chmod(0o1777)
    stale, _ = killed_process(tmp_path)
    here = os.open(tmp_path, os.O_RDONLY)  # its parents are closed to other users

    def as_nobody():
        os.fchdir(here)
        os.setuid(65534)
        warnings.simplefilter("error")
        area = SwapArea(".", "optimizer", 0)
        return 0 if area.path.is_dir() and Path(FOLDER, stale.name).is_dir() else 7

    assert os.waitstatus_to_exitcode(os.waitpid(in_child(as_nobody), 0)[1]) == 0
    os.close(here)


def test_the_exit_of_a_forked_child_leaves_the_folder_of_its_parent(tmp_path):
    area = SwapArea(tmp_path, "optimizer", 0)

    def leave():
        area.close()
        return 0

    os.waitpid(in_child(leave), 0)
    assert area.path.is_dir()
    area.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_was_taken_for_a_stale_one_is_made_again(tmp_path, monkeypatch):
    """Between making the file and locking it, another process may lock and remove it."""
    flock, robbed = fcntl.flock, []

    def slow_flock(descriptor, operation):
        if not robbed and operation == fcntl.LOCK_EX:
            robbed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.unlink(robbed[0])
        return flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow_flock)
    area = SwapArea(tmp_path, "optimizer", 0)
    assert area.path.with_suffix(".lock").exists()
    area.close()


def test_a_lock_that_was_replaced_while_it_was_looked_at_is_not_taken_for_a_stale_one(tmp_path, monkeypatch):
    """A cleaner that is slow must not remove the folder which a new lock of the same name guards."""
    living = SwapArea(tmp_path, "optimizer", 0)
    lock_path = living.path.with_suffix(".lock")
    old = tmp_path / "old"
    old.touch()
    opened = os.open

    def open_old(path, *arguments, **options):
        return opened(old if path == lock_path else path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_old)
    SwapArea(tmp_path, "optimizer", 0).close()
    assert living.path.is_dir()
    assert lock_path.exists()
    living.close()


def test_the_folder_may_be_removed_by_its_last_user_while_it_is_made(tmp_path, monkeypatch):
    chmod, robbed = Path.chmod, []

    def slow_chmod(path, mode):
        if not robbed:
            robbed.append(path)
            path.rmdir()
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", slow_chmod)
    area = SwapArea(tmp_path, "optimizer", 0)
    assert robbed == [tmp_path / "offload-swap"]
    assert area.path.is_dir()
    area.close()


def test_the_folder_may_be_removed_by_its_last_user_while_it_is_looked_through(tmp_path, monkeypatch):
    base = tmp_path / "offload-swap"
    base.mkdir()
    listdir, robbed = os.listdir, []

    def slow_listdir(path):
        if not robbed:
            robbed.append(path)
            base.rmdir()
        return listdir(path)

    monkeypatch.setattr(os, "listdir", slow_listdir)
    area = SwapArea(tmp_path, "optimizer", 0)
    assert robbed == [base]
    area.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_processes_that_come_and_go_on_one_path_never_disturb_each_other(tmp_path):
    def come_and_go():
        warnings.simplefilter("error")
        ended = time.monotonic() + 1.5
        while time.monotonic() < ended:
            area = SwapArea(tmp_path, "optimizer", 0)
            (area.path / "a.swp").write_bytes(b"mine")
            if (area.path / "a.swp").read_bytes() != b"mine":
                return 7
            area.close()
        return 0

    pids = [in_child(come_and_go) for _ in range(6)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 6
    assert left_in(tmp_path) == []


def test_threads_may_make_areas_together(tmp_path):
    areas = []
    threads = [threading.Thread(target=lambda: areas.append(SwapArea(tmp_path, "x", 0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({area.path for area in areas}) == 8
    for area in areas:
        area.close()
