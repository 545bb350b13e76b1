"""A tag holds one whole checkpoint at every moment, also when the process is killed in between."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from offload.checkpoint import tag_folder
from offload.checkpoint.tag_folder import TagFolder, write_latest


def stage(folder, content):
    """Two files of one save."""
    (folder.staging_path / "sub").mkdir(parents=True)
    (folder.staging_path / "model").write_text(content)
    (folder.staging_path / "sub" / "shard").write_text(content)


def content(path):
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}


def whole(text):
    return {"model": text, "sub/shard": text}


@pytest.fixture(params=[True, False], ids=["exchange", "renames"])
def exchanges(request, monkeypatch):
    """File systems that swap two names in one step, and those that cannot."""
    if not request.param:
        monkeypatch.setattr(tag_folder, "_exchange", lambda first, second: False)


@pytest.mark.parametrize("tag", ["best", "step.7", "a/b"])
@pytest.mark.usefixtures("exchanges")
def test_the_first_save_and_those_after_it_appear_whole(tmp_path, tag):
    for text in ("one", "two", "three"):
        folder = TagFolder(tmp_path, tag)
        stage(folder, text)
        folder.publish()
        assert content(tmp_path / tag) == whole(text)
        assert [path.name for path in folder.path.parent.iterdir()] == [folder.path.name]


def test_staged_content_lies_beside_the_tag_on_the_same_drive(tmp_path):
    folder = TagFolder(tmp_path, "a/best")
    assert folder.staging_path == tmp_path / folder.staging_tag == tmp_path / "a" / ".best.saving"


def test_what_an_interrupted_save_left_is_discarded(tmp_path):
    folder = TagFolder(tmp_path, "best")
    folder.discard_staging()
    stage(folder, "half")
    folder.discard_staging()
    assert list(tmp_path.iterdir()) == []


def killed_before(call, nth, tmp_path):
    """A save of "new" over "old" in a process that is killed before its `nth` call of `call`."""
    folder = TagFolder(tmp_path, "best")
    stage(folder, "old")
    folder.publish()
    stage(folder, "new")
    pid = os.fork()
    if pid == 0:
        seen = []
        original = getattr(os, call)

        def counted(*arguments, **options):
            seen.append(arguments)
            if len(seen) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(os, call, counted)
        folder.publish()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("call", ["fsync", "rename", "rmdir", "unlink"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.usefixtures("exchanges")
def test_a_kill_leaves_the_old_content_or_the_new_never_a_mixture(tmp_path, call, nth):
    killed_before(call, nth, tmp_path)
    folder = TagFolder(tmp_path, "best")
    folder.recover()
    folder.discard_staging()
    assert content(tmp_path / "best") in (whole("old"), whole("new"))
    stage(folder, "newer")
    folder.publish()
    assert content(tmp_path / "best") == whole("newer")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.usefixtures("exchanges")
def test_before_it_is_published_nothing_of_a_save_is_visible(tmp_path):
    assert killed_before("fsync", 1, tmp_path) != 0
    assert content(tmp_path / "best") == whole("old")


def test_recovery_touches_nothing_that_is_whole(tmp_path):
    folder = TagFolder(tmp_path, "best")
    stage(folder, "old")
    folder.publish()
    (tmp_path / ".best.previous").mkdir()
    folder.recover()
    assert content(tmp_path / "best") == whole("old")


def test_content_is_on_the_device_before_it_is_visible(tmp_path, monkeypatch):
    order = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda path, target: order.append("rename") or rename(path, target))
    folder = TagFolder(tmp_path, "best")
    stage(folder, "x")
    folder.publish()
    before = {Path(entry).name for entry in order[: order.index("rename")]}
    assert {"model", "shard", "sub", ".best.saving"} <= before
    assert order[-1] == str(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="making a folder immutable takes root")
def test_a_refused_rename_leaves_old_and_staged_content(tmp_path):
    folder = TagFolder(tmp_path, "best")
    stage(folder, "old")
    folder.publish()
    stage(folder, "new")
    if subprocess.run(["chattr", "+i", str(folder.path)], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no immutable folders")
    try:
        with pytest.raises(OSError, match="not permitted"):
            folder.publish()
        assert content(folder.path) == whole("old")
        assert content(folder.staging_path) == whole("new")
    finally:
        subprocess.run(["chattr", "-i", str(folder.path)], check=True)


def test_latest_points_at_the_tag_and_is_replaced_in_one_step(tmp_path):
    for tag in ("step1", "a/step2"):
        write_latest(tmp_path, tag)
        assert (tmp_path / "latest").read_text() == tag
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
