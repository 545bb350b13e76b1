"""How much host memory a rank may count on, and what it gives back."""

import ctypes
import os
from pathlib import Path

import psutil
import torch

_CGROUPS = Path("/sys/fs/cgroup")


def available_nbytes() -> int:
    """This rank's share of the memory that is free now, on the host and in the container around it."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    rooms = [psutil.virtual_memory().available, *_cgroup_rooms(_CGROUPS, Path("/proc/self/cgroup"))]
    return int(max(0, min(rooms)) // ranks)


def give_back_freed() -> None:
    """Hand freed memory that the C library still keeps back to the system, where that is glibc.

    A large model that is partitioned leaves as much of it behind as the partitions take.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cgroup_rooms(root: Path, membership: Path) -> list[int]:
    """Bytes left below the memory limit of each control group that this process is in, both versions."""
    rooms = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.max", "memory.current", "inactive_file")
        top = root
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "memory"
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top) and (room := _room(group, *names)) is not None:
                rooms.append(room)
    return rooms


def _room(group: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # the root group has no limit, and a container need not show the groups above its own
    return None if limit == "max" else int(limit) - usage + int(statistics.get(reclaimable, 0))
