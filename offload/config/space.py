"""Bytes a run will need on its swap drives, compared with what is free before the first one is written."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from offload.config.storage import nearest_directory
from offload.errors import OffloadConfigError

_FILE_BLOCK_NBYTES = 4096
FP32_NBYTES = 4
ADAM_STATES = 3
"""Master weight and two moments."""


@dataclass(frozen=True)
class SpaceNeed:
    """What one kind of state, of all ranks that share the path, will take there."""

    key: str
    """The config key that names the path."""
    path: Path
    what: str
    nbytes: int


def needed_nbytes(numels: Iterable[int], element_nbytes: int, *, copies: int = 1, ranks: int = 1) -> int:
    """Bytes on the drive for tensors of these sizes, each padded to whole file blocks.

    `copies` counts the tensors per entry (parameter: 1, Adam's state: 3), `ranks` those that write equal
    shares below one path.
    """
    return ranks * copies * sum(_whole_blocks(numel * element_nbytes) for numel in numels)


def optimizer_nbytes(
    sub_group_numels: Iterable[int],
    *,
    states: int = ADAM_STATES,
    state_nbytes: int = FP32_NBYTES,
    gradient_nbytes: int = 0,
    ranks: int = 1,
) -> int:
    """Bytes of optimizer state on the drive: 12 per element for Adam, 16 with fp32 gradients beside it."""
    numels = list(sub_group_numels)
    state = needed_nbytes(numels, state_nbytes, copies=states, ranks=ranks)
    return state + needed_nbytes(numels, gradient_nbytes, ranks=ranks)


def check_free_space(needs: Iterable[SpaceNeed]) -> None:
    """Refuse a run whose swap files will not fit; paths on one file system are added up."""
    by_device: dict[int, list[SpaceNeed]] = {}
    for need in needs:
        device = nearest_directory(need.path, need.key).stat().st_dev
        by_device.setdefault(device, []).append(need)
    problems = [problem for group in by_device.values() if (problem := _shortage(group))]
    if problems:
        raise OffloadConfigError("\n".join(problems))


def _shortage(needs: list[SpaceNeed]) -> str | None:
    """What to tell when one file system has too little room for all of these, else None."""
    total = sum(need.nbytes for need in needs)
    free = free_nbytes(nearest_directory(needs[0].path, needs[0].key))
    if total <= free:
        return None
    parts = ", ".join(f"{need.what} {size(need.nbytes)} under {need.path}" for need in needs)
    keys = " or ".join(dict.fromkeys(need.key for need in needs))
    return (
        f"{keys}: the run needs {size(total)} ({parts}), but only {size(free)} are free there; "
        f"free {size(total - free)} or name a larger drive in {keys}"
    )


def free_nbytes(directory: Path) -> int:
    """Bytes an ordinary user may still write to the file system of a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def size(nbytes: int) -> str:
    """Bytes for people, exact and rounded: 1,610,612,736 B (1.5 GiB)."""
    exact = f"{nbytes:,} B"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= scale:
            return f"{exact} ({nbytes / scale:.1f} {unit})"
    return exact


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // _FILE_BLOCK_NBYTES) * _FILE_BLOCK_NBYTES
