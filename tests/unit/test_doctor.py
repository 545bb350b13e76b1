import subprocess
import sys

from typer.testing import CliRunner

from offload.cli import app


def test_doctor_names_backend_limits_and_alignment(tmp_path):
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for words in (
        "backend picked by 'auto'",
        "uring:",
        "libaio:",
        "posix: works",
        "aio-max-nr",
        "O_DIRECT",
        "ulimit -l",
    ):
        assert words in result.output
    assert not list(tmp_path.iterdir())


def test_doctor_fails_for_a_path_that_is_not_there(tmp_path):
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "missing")])
    assert result.exit_code == 1 and "No such file" in result.output


def test_doctor_looks_at_a_file(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    assert CliRunner().invoke(app, ["doctor", str(tmp_path / "x")]).exit_code == 0


def test_the_module_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "offload", "doctor", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "backend" in done.stdout, done.stderr
