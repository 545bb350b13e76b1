"""One rank of real DeepSpeed in the test process, and a look at what each test leaves behind."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

os.environ["DS_ACCELERATOR"] = "cpu"
# Stock DeepSpeed, which ours is compared with, compiles its Adam with the ninja of this environment.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

import offload
from offload.swap.area import FOLDER
from tests.integration.ranks import free_port, join


@pytest.fixture(scope="session", autouse=True)
def one_rank():
    join(rank=0, world=1, port=free_port())
    yield
    offload.disable()
    torch.distributed.destroy_process_group()


@pytest.fixture
def swap_dir(tmp_path):
    """An empty folder on a real file system."""
    folder = tmp_path / "swap"
    folder.mkdir()
    return folder


@pytest.fixture
def checkpoint_dir(tmp_path):
    return tmp_path / "checkpoint"


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path):
    """After a test no swap file, no file held open and no locked byte of ours is left."""
    rings = _open_files().count(_RING)  # gloo has one, too
    yield
    gc.collect()
    left = [path for path in tmp_path.rglob("*") if path.name == FOLDER]
    opened = [target for target in _open_files() if str(tmp_path) in target]
    assert (left, opened, offload.stats()["locked_bytes"]) == ([], [], 0)
    assert _open_files().count(_RING) == rings


_RING = "anon_inode:[io_uring]"


def _open_files() -> list[str]:
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    return targets


@pytest.fixture(scope="session")
def found():
    """What this run's tests found, by case."""
    return {}


def pytest_collection_modifyitems(items):
    """The page is compared when everything that fills it has run."""
    items.sort(key=lambda item: item.module.__name__.endswith("test_parity_page"))
