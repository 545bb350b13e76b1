"""What a rank may count on: the host's free memory, or what the control groups around it leave."""

import psutil
import pytest

from offload.swap import host_memory
from offload.swap.host_memory import available_nbytes, give_back_freed


def group(folder, limit, usage, cached=0, version=2):
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")


@pytest.fixture
def rooms(tmp_path):
    def read(membership):
        (tmp_path / "membership").write_text(membership)
        return host_memory._cgroup_rooms(tmp_path / "cgroup", tmp_path / "membership")

    return read


def test_every_group_above_the_process_counts(rooms, tmp_path):
    group(tmp_path / "cgroup/user/job", "max", 10)
    group(tmp_path / "cgroup/user", 1000, 600, cached=50)
    assert rooms("0::/user/job\n") == [450]


def test_the_older_version_has_other_names(rooms, tmp_path):
    group(tmp_path / "cgroup/memory/job", 1000, 900, cached=100, version=1)
    group(tmp_path / "cgroup/memory", 5000, 1000, version=1)
    assert rooms("5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n") == [200, 4000]


def test_groups_that_are_not_to_be_seen_set_no_limit(rooms):
    assert rooms("0::/user/job\n") == []


def test_ranks_of_one_host_share_what_is_free(monkeypatch):
    monkeypatch.setattr(host_memory, "_cgroup_rooms", lambda root, membership: [])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_nbytes() == pytest.approx(psutil.virtual_memory().available // 4, rel=0.2)


def test_a_limit_below_what_the_host_has_free_counts(monkeypatch):
    monkeypatch.setattr(host_memory, "_cgroup_rooms", lambda root, membership: [-5, 4096])
    assert available_nbytes() == 0


def test_memory_that_was_freed_goes_back_to_the_system():
    process = psutil.Process()
    kept = [bytearray(100_000) for _ in range(2000)]
    full = process.memory_info().rss
    del kept[:-1]  # the last one keeps the heap from shrinking on its own
    give_back_freed()
    assert process.memory_info().rss < full - 100_000_000
