"""What stands under `nvme_path` before, during and after runs that end well, are dropped, or are killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.errors import OffloadWarning
from offload.swap.area import FOLDER
from tests.integration.training import Case, advance, engine_for

REPOSITORY = Path(__file__).resolve().parents[2]
ON_NVME = Case(params="nvme")
MOST_MAPPING_NBYTES = 64 << 10  # ext4 counts a file's extent blocks among its own


def start(way, swap_dir):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.run_alone", way, str(swap_dir)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(process, nsteps):
    while nsteps:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        nsteps -= line == "step\n"


def disk_use(folder):
    """Bytes reserved, without what the file system needs to map scattered files, which is its own affair."""
    facts = [path.lstat() for path in folder.rglob("*.swp")]
    for fact in facts:
        assert fact.st_size <= fact.st_blocks * 512 <= fact.st_size + MOST_MAPPING_NBYTES
    return sum(fact.st_size for fact in facts)


def test_nothing_of_a_run_is_left_and_every_run_takes_the_same(swap_dir):
    taken = []
    for _ in range(4):
        with engine_for(ON_NVME, swap_dir) as engine:
            advance(engine, ON_NVME, range(2))
            taken.append(disk_use(swap_dir))
            advance(engine, ON_NVME, range(2, 4))
            assert disk_use(swap_dir) == taken[-1], "a run grows to its size in its first step"
        assert list(swap_dir.iterdir()) == []
    assert len(set(taken)) == 1


def test_the_files_of_a_killed_run_are_reported_and_removed_and_those_of_a_living_one_are_not(swap_dir):
    killed, alive = start("forever", swap_dir), start("forever", swap_dir)
    try:
        wait_for_steps(killed, 2)
        wait_for_steps(alive, 2)
        killed.kill()
        killed.wait()
        with (
            pytest.warns(OffloadWarning, match=rf"process {killed.pid}, which is gone; removed") as caught,
            engine_for(ON_NVME, swap_dir) as engine,
        ):
            advance(engine, ON_NVME, range(1))
        assert len([warning for warning in caught if "which is gone" in str(warning.message)]) == 2
        left = {path.name.split("-")[2] for path in (swap_dir / FOLDER).iterdir()}
        assert left == {str(alive.pid)}
        wait_for_steps(alive, 2)
    finally:
        for process in (killed, alive):
            process.kill()
            process.communicate()
    with pytest.warns(OffloadWarning, match="which is gone; removed"), engine_for(ON_NVME, swap_dir):
        pass


def test_an_engine_that_nobody_destroys_leaves_nothing_when_the_process_ends(swap_dir):
    dropped = start("dropped", swap_dir)
    output, errors = dropped.communicate(timeout=120)
    assert (dropped.returncode, output.count("step")) == (0, 2), errors
    assert "Traceback" not in errors
    assert list(swap_dir.iterdir()) == []
