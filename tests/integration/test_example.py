"""The example as a user starts it: small, in processes of its own."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples/train_lm.py"
SHORT = ("--sequence-length=32", "--steps=12", "--steps-after=3")


def start(
    work_folder: Path, *flags: str, launcher: tuple[str, ...] = (), script: Path = SCRIPT
) -> subprocess.Popen[str]:
    """Start the script in its own folder; the variables of a launcher around pytest are not for it."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, *launcher, str(script), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=work_folder, env=environment, text=True, **pipes)


def run(work_folder: Path, *flags: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    process = start(work_folder, *flags, launcher=launcher)
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    work_folder = tmp_path_factory.mktemp("example")
    return work_folder, run(work_folder, *SHORT)


def test_loss_falls_and_a_second_process_repeats_it_exactly(finished):
    _, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = map(float, re.search(r"the loss fell from ([\d.]+) to ([\d.]+)", done.stdout).groups())
    assert last < first - 0.5
    assert done.stdout.count("yes") == 4 and "NO" not in done.stdout


def test_every_figure_is_shown(finished):
    _, done = finished
    line = re.search(r"step 10: .*", done.stdout).group()
    figures = re.fullmatch(
        r"step 10: loss [\d.]+ +[\d,]+ tokens/s +([\d.]+) B/parameter moved +I/O wait \d+%", line
    )
    assert float(figures[1]) > 12, "master weight and moments are read and written in every step"


def test_nothing_is_left_in_the_swap_folder(finished):
    work_folder, _ = finished
    assert list((work_folder / "runs/swap").rglob("*")) == []


def test_a_resume_that_differs_is_an_error(finished):
    work_folder, _ = finished
    note_path = work_folder / "runs/checkpoint/run.json"
    note = json.loads(note_path.read_text())
    note_path.write_text(json.dumps({**note, "losses": [loss + 1e-7 for loss in note["losses"]]}))
    done = run(work_folder, "--resume", "--steps-after=3")
    note_path.write_text(json.dumps(note))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NO" in done.stdout


def test_a_killed_run_resumes_and_what_it_left_is_removed(tmp_path):
    process = start(tmp_path, "--sequence-length=32", "--steps=2", "--steps-after=10000")
    deadline = time.monotonic() + 300
    while not (tmp_path / "runs/checkpoint/run.json").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.kill()
    process.communicate()
    assert list((tmp_path / "runs/swap").rglob("*"))
    done = run(tmp_path, "--resume", "--steps-after=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"left by process {process.pid}, which is gone; removed" in done.stderr
    assert "stopped before it had losses" in done.stdout
    assert list((tmp_path / "runs/swap").rglob("*")) == []


def test_two_ranks_under_a_launcher_resume_exactly(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    done = run(tmp_path, "--parameters=300K", *SHORT, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes") == 4


def test_a_model_larger_than_memory_trains_in_little_of_it(tmp_path):
    """At a size that a test can afford: what grows with the model lies on the drive."""
    script = REPOSITORY / "examples/larger_than_memory.py"
    process = start(tmp_path, "--hidden=512", "--layers=4", "--sequence-length=8", script=script)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    assert "45,421,056 parameters" in output
    moved = re.search(r"step 3: loss [\d.]+, .* ([\d.]+) GB moved, peak resident memory [\d.]+ GiB", output)
    assert float(moved[1]) > 0.045 * 15
    assert list((tmp_path / "runs/swap").rglob("*")) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=0"], "'0': write a number above 0"),
        (["--parameters=25X"], "'25X': write a number above 0"),
        (["--config=missing.json"], "missing.json"),
        (["--resume"], "no checkpoint"),
        (["--sequence-length=1B"], "too few"),
    ],
)
def test_a_bad_flag_is_told_in_one_line(monkeypatch, capsys, tmp_path, flags, message):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module("train_lm").main()
    told = exit_.value.code if isinstance(exit_.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message in told
    assert "\n" not in told
