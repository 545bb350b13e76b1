"""Handles on every backend, child processes, mounts, and a check that nothing is left behind."""

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.io import AsyncIOHandle, pinned

BACKENDS = ("uring", "libaio", "posix")
OUR_DESCRIPTORS = ("io_uring", "eventfd", "pytest-of")
REPOSITORY = Path(__file__).resolve().parents[2]


def native_threads() -> list[str]:
    """Names of our own threads; other libraries may keep theirs."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names.append(Path(task, "comm").read_text().strip())
    return sorted(name for name in names if name.startswith("offload"))


def open_files() -> set[str]:
    """Descriptors and what they stand for."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            found.add(f"{link.name} {os.readlink(link)}")
    return found


@pytest.fixture(scope="session", autouse=True)
def cheap_collections() -> None:
    """Leaves what the imports made out of every later collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No descriptor, no locked page, no thread of ours outlives a test."""
    gc.collect()
    files, threads, memory = open_files(), native_threads(), pinned.totals()
    python_threads = set(threading.enumerate())
    yield
    gc.collect()
    assert not {name for name in open_files() - files if any(mark in name for mark in OUR_DESCRIPTORS)}
    assert native_threads() == threads
    assert pinned.totals() == memory
    assert set(threading.enumerate()) <= python_threads


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def handle(backend: str) -> Iterator[AsyncIOHandle]:
    with AsyncIOHandle(backend=backend) as handle:
        yield handle


Child = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """Runs Python code in a process of its own and gives its output; it must end within the time."""

    def run(
        code: str, *arguments: str, timeout: float = 300, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "child.py"
        script.write_text(textwrap.dedent(code))
        return subprocess.run(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts file systems under tmp_path; skips where that takes rights we do not have."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    places: list[Path] = []

    def mount(*arguments: str) -> Path:
        place = tmp_path / f"mounted-{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"mount refused: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", "-l", str(place)], check=True)
