"""Faults for real training: settings that hurt, drives that fill up, users who press Ctrl-C."""

import copy
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.io import Ticket
from tests.integration.training import Case, config

BY_WHOLE_SUB_GROUPS = {
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
}
"""An optimizer without a streamed kernel: its sub-groups move whole."""

STREAMED: dict[str, Any] = {}
WAYS = {"streamed": STREAMED, "whole sub-groups": BY_WHOLE_SUB_GROUPS}


def changed(case: Case, swap_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The `zero_optimization` section of a case, with keys of its inner sections replaced."""
    zero = copy.deepcopy(config(case, swap_dir)["zero_optimization"])
    for name, values in sections.items():
        zero[name].update(values)
    return {"zero_optimization": zero}


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Files may not be written beyond it: as a full drive, for this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def interrupted_wait(monkeypatch: Any, nth: int) -> Iterator[None]:
    """Ctrl-C arrives while the `nth` ticket is waited for."""
    wait, calls = Ticket.wait, []

    def interrupted(ticket: Ticket, timeout: float | None = None) -> int:
        calls.append(ticket)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return wait(ticket, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "wait", interrupted)
        yield


@contextmanager
def small_drive(folder: Path, nbytes: int) -> Iterator[Path | None]:
    """An ext4 file system of about that size; None where mounting is not allowed."""
    image, place = folder / "drive.img", folder / "drive"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    commands = (["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(place)])
    if any(subprocess.run(command, capture_output=True, check=False).returncode for command in commands):
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def flip(path: Path, position: int) -> None:
    """One bit of the file changes, behind everybody's back."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
