"""Locked memory of engines: none with pinning off, a flat line with it on, and within the system's limit."""

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import offload
from tests.integration.training import Case, advance, config, engine_for

REPOSITORY = Path(__file__).resolve().parents[2]
ON_NVME = Case(params="nvme")
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14


def locked_by_kernel():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmLck:")[2].split()[0]) << 10


def pinned(swap_dir, pin_memory):
    zero = config(ON_NVME, swap_dir)["zero_optimization"]
    for section in ("offload_param", "offload_optimizer"):
        zero[section]["pin_memory"] = pin_memory
    return {"zero_optimization": zero}


@pytest.mark.parametrize("pin_memory", [False, True])
def test_engine_after_engine_locks_the_same_and_the_last_leaves_none(swap_dir, pin_memory):
    before = locked_by_kernel()
    held = []
    for _ in range(4):
        with engine_for(ON_NVME, swap_dir, **pinned(swap_dir, pin_memory)) as engine:
            advance(engine, ON_NVME, range(1))
            held.append(locked_by_kernel() - before)
            assert offload.stats()["locked_bytes"] == held[-1]
        gc.collect()
        assert locked_by_kernel() == before
    assert len(set(held)) == 1
    assert (held[0] > 0) == pin_memory


def test_beyond_the_limit_an_engine_works_unlocked_with_one_warning(swap_dir):
    def limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)

    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.run_alone", "pinned", str(swap_dir)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    with engine_for(ON_NVME.in_memory(), swap_dir) as engine:
        assert found["losses"] == advance(engine, ON_NVME, range(2))
    assert found["locked"] == 0
    assert len([said for said in found["warnings"] if "RLIMIT_MEMLOCK is 65536 B" in said]) == 1
