"""Locked memory over the whole life of a process: dropped, forked, beyond its limit, at the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIFE = """
import json, os, resource, sys, warnings
from pathlib import Path
import torch
from offload.io import AsyncIOHandle, pinned
from offload.swap import SwapBufferManager

facts = {}
handle = AsyncIOHandle(backend="posix")


def new():
    return SwapBufferManager(1 << 20, 4, torch.float32, handle)


def locked():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmLck:")[2].split()[0]) << 10


facts["before"] = locked()
manager = new()
facts["held"] = locked()
manager.close()
facts["closed"] = locked()
manager = new()
del manager
facts["dropped"] = locked()

manager = new()
buffer = manager.lend(4096)
buffer.buffer.fill_(7)
if os.fork() == 0:
    sys.exit(0)
facts["child"] = os.waitstatus_to_exitcode(os.wait()[1])
facts["after_child"] = [locked(), buffer.buffer.unique().tolist()]

resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
if os.geteuid() == 0:
    os.setuid(65534)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    limited = [new(), new()]
    limited[0].lend(16 << 20).buffer.fill_(1)
facts["limited"] = locked()
facts["warnings"] = [str(warning.message) for warning in caught]
print(json.dumps(facts), flush=True)

free = handle.free_cpu_locked_tensor
handle.free_cpu_locked_tensor = lambda tensor: print("freed", tensor.nbytes, free(tensor), flush=True)
"""


@pytest.fixture(scope="module")
def life():
    """What a process reports of itself, and what it prints while it ends."""
    done = subprocess.run(
        [sys.executable, "-c", LIFE],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts, _, end = done.stdout.partition("\n")
    return {**json.loads(facts), "end": end.split("\n")[:-1]}


def test_the_kernel_counts_the_pages_of_a_manager_until_it_is_gone(life):
    assert life["held"] == life["before"] + (16 << 20)
    assert life["closed"] == life["dropped"] == life["before"]


def test_a_forked_child_leaves_the_memory_of_its_parent_alone(life):
    assert life["child"] == 0
    assert life["after_child"] == [life["held"], [7]]


def test_beyond_the_limit_managers_work_unlocked_with_one_warning_that_names_it(life):
    assert life["limited"] == life["held"], "not a byte more than before"
    assert len(life["warnings"]) == 1
    assert "RLIMIT_MEMLOCK is 65536 B" in life["warnings"][0]


def test_memory_is_freed_through_the_handle_at_interpreter_exit(life):
    assert life["end"] == [f"freed {16 << 20} True"]
