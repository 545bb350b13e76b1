"""A drive fails or a user interrupts: the step says so, and from the last save training goes on exactly."""

import errno
import re
import warnings
from contextlib import contextmanager, nullcontext

import pytest
from deepspeed import comm

from offload.errors import OffloadConfigError, OffloadError, OffloadIOError, OffloadWarning, io_error
from tests.integration.comparison import differences
from tests.integration.faults import WAYS, file_size_limit, interrupted_wait, small_drive
from tests.integration.ranks import run_ranks
from tests.integration.training import Case, advance, engine_for, snapshot

MIB = 1 << 20


FORMATS = {name: {"offload": {"state_format": name}} for name in ("split", "8bit")}

CACHED = {"half in memory": {"offload": {"host_cache": 14 * MIB, "buffer_bytes": 8 * MIB}}}
CHECKED = {f"{name}, checked": {**way, "offload": {"checksums": True}} for name, way in WAYS.items()}
ALL_WAYS = WAYS | FORMATS | CACHED | CHECKED


@pytest.fixture(params=ALL_WAYS, ids=lambda way: way.replace(",", "").replace(" ", "-"))
def way_name(request):
    return request.param


@pytest.fixture
def way(way_name):
    """Changes to the config that choose how optimizer state moves."""
    return ALL_WAYS[way_name]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        yield


@pytest.fixture
def drive(tmp_path):
    with small_drive(tmp_path, 96 * MIB) as place:
        if place is None:
            pytest.skip("mounting a file system takes root")
        yield place


def fill(drive):
    """Leave no free block."""
    with (drive / "filler").open("wb", buffering=0) as file:
        for nbytes in (MIB, 4096):
            while True:
                try:
                    file.write(bytes(nbytes))
                except OSError:
                    break


@pytest.mark.parametrize("params", ["memory", "nvme"])
def test_a_write_that_is_refused_raises_with_the_tensor_and_a_load_makes_it_good(
    swap_dir, checkpoint_dir, way, params
):
    case = Case(params=params)
    with engine_for(case, swap_dir, **way) as engine:
        advance(engine, case, range(2))
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        expected = advance(engine, case, range(2, 4)), snapshot(engine)
        with (
            file_size_limit(MIB),
            pytest.raises(OffloadIOError, match=r"writing .*(sub-group|parameter) \d+ ") as caught,
        ):
            advance(engine, case, range(4, 6))
        assert "ulimit -f" in str(caught.value)
        assert str(swap_dir) in caught.value.filename
        advance(engine, case, range(6, 7))  # goes on, from a step that was taken in part
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        assert advance(engine, case, range(2, 4)) == expected[0]
        assert differences(snapshot(engine), expected[1]) == []


@pytest.mark.parametrize("params", ["memory", "nvme"])
def test_what_a_failed_step_left_is_not_saved_until_a_checkpoint_is_loaded(
    swap_dir, checkpoint_dir, way_name, way, params
):
    case = Case(params=params)
    with engine_for(case, swap_dir, **way) as engine:
        advance(engine, case, range(2))
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        limit = 4 * MIB if "whole" in way_name else MIB  # above a sub-group's gradients, below its state
        with file_size_limit(limit), pytest.raises(OffloadIOError) as caught:
            advance(engine, case, range(2, 4))
        assert_nothing_is_saved(engine, checkpoint_dir, re.escape(str(caught.value)))
        advance(engine, case, range(4, 6))
        assert_nothing_is_saved(engine, checkpoint_dir)
        engine.load_checkpoint(str(checkpoint_dir), tag="saved", load_optimizer_states=False)
        assert_nothing_is_saved(engine, checkpoint_dir)
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        expected = snapshot(engine)
        engine.save_checkpoint(str(checkpoint_dir), tag="again")
    with engine_for(case, swap_dir, seed=5, **way) as engine:
        engine.load_checkpoint(str(checkpoint_dir))
        assert differences(snapshot(engine), expected) == []


def test_a_backward_that_failed_has_changed_nothing_and_can_be_saved(swap_dir, checkpoint_dir):
    case, way = Case(), WAYS["whole sub-groups"]
    with engine_for(case, swap_dir, **way) as engine:
        advance(engine, case, range(2))
        expected = snapshot(engine)
        with file_size_limit(MIB), pytest.raises(OffloadIOError, match="writing gradient"):
            advance(engine, case, range(2, 3))
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
    with engine_for(case, swap_dir, seed=5, **way) as engine:
        engine.load_checkpoint(str(checkpoint_dir))
        assert differences(snapshot(engine), expected) == []


def assert_nothing_is_saved(engine, checkpoint_dir, reason=""):
    with pytest.raises(OffloadError, match=rf"load the last checkpoint with its optimizer states.*{reason}"):
        engine.save_checkpoint(str(checkpoint_dir), tag="torn")
    assert {path.name for path in checkpoint_dir.iterdir() if path.suffix != ".py"} == {"saved", "latest"}
    assert (checkpoint_dir / "latest").read_text() == "saved"


@contextmanager
def first_write_refused(engine):
    """The drive refuses the first chunk of a step and says so late: when its ticket is waited for."""

    class Refused:
        def done(self):
            return False

        def wait(self, timeout=None):
            raise io_error(errno.EIO, "write", "/the/drive")

    handle = engine.optimizer.optimizer_swapper.aio_handle
    write, answers = handle.writev, [Refused()]
    handle.writev = lambda extents: answers.pop() if answers else write(extents)
    try:
        yield
    finally:
        handle.writev = write
    assert not answers


def test_a_write_that_is_lost_after_its_step_ended_refuses_every_save(swap_dir, checkpoint_dir):
    with engine_for(Case(), swap_dir) as engine:
        advance(engine, Case(), range(2))
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        with first_write_refused(engine):
            advance(engine, Case(), range(2, 3))
        for _ in range(2):
            assert_nothing_is_saved(engine, checkpoint_dir, r".*writing elements 0 to \d+ of sub-group 0")
        engine.load_checkpoint(str(checkpoint_dir), tag="saved", load_optimizer_states=False)
        assert_nothing_is_saved(engine, checkpoint_dir)
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        engine.save_checkpoint(str(checkpoint_dir), tag="again")


def save_on_two_ranks(swap_dir, checkpoint_dir):
    case = Case(ranks=2)
    with engine_for(case, swap_dir) as engine:
        with first_write_refused(engine) if comm.get_rank() == 1 else nullcontext():
            advance(engine, case, range(1))
        with pytest.raises(OffloadError) as caught:
            engine.save_checkpoint(str(checkpoint_dir), tag="torn")
        return str(caught.value)


def test_a_write_that_one_rank_lost_refuses_the_save_on_all(swap_dir, checkpoint_dir):
    first, second = run_ranks(2, save_on_two_ranks, swap_dir, checkpoint_dir)
    assert "state of rank 1" in first
    assert "writing elements 0" in second
    assert [path for path in checkpoint_dir.iterdir() if path.suffix != ".py"] == []


@pytest.mark.parametrize("params", ["memory", "nvme"])
@pytest.mark.parametrize("nth", [1, 4, 9])
def test_after_ctrl_c_during_a_step_a_load_makes_it_good(
    swap_dir, checkpoint_dir, way, params, nth, monkeypatch
):
    case = Case(params=params)
    with engine_for(case, swap_dir, **way) as engine:
        advance(engine, case, range(2))
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        expected = advance(engine, case, range(2, 4)), snapshot(engine)
        with interrupted_wait(monkeypatch, nth), pytest.raises(KeyboardInterrupt):
            advance(engine, case, range(4, 9))
        advance(engine, case, range(9, 10))  # goes on, from a step that was taken in part
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        assert advance(engine, case, range(2, 4)) == expected[0]
        assert differences(snapshot(engine), expected[1]) == []


@pytest.mark.parametrize("params", ["memory", "nvme"])
def test_a_drive_that_gets_full_stops_the_step_and_training_goes_on_when_there_is_room(drive, params):
    case, way = Case(params=params), WAYS["whole sub-groups"]
    with engine_for(case, drive, **way) as engine:
        fill(drive)
        with pytest.raises(OffloadIOError, match=r"reserving \d+ B for .* of sub-group \d .* \d+ B are free"):
            advance(engine, case, range(1))
        (drive / "filler").unlink()
        losses = advance(engine, case, range(1, 5))
    with engine_for(case.in_memory(), drive, **way) as engine:
        assert losses == advance(engine, case, range(1, 5)), "nothing of the step that failed is left"


@pytest.mark.parametrize("params", ["memory", "nvme"])
def test_a_streamed_step_has_its_room_from_the_start_and_does_not_mind_a_full_drive(drive, params):
    case = Case(params=params)
    with engine_for(case, drive) as engine:
        fill(drive)
        losses = advance(engine, case, range(3))
        (drive / "filler").unlink()
    with engine_for(case.in_memory(), drive) as engine:
        assert losses == advance(engine, case, range(3))


@pytest.mark.parametrize("params", ["memory", "nvme"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_save_without_room_for_its_float32_copies_loses_nothing(drive, checkpoint_dir, form, params):
    case = Case(params=params)
    with engine_for(case, drive, **FORMATS[form]) as engine:
        advance(engine, case, range(2))
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        before = snapshot(engine)
        fill(drive)
        with pytest.raises(OffloadIOError, match=r"reserving \d+ B for a float32 copy of .* \d+ B are free"):
            engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        assert list(drive.rglob("*.export.swp")) == []
        (drive / "filler").unlink()
        assert differences(snapshot(engine), before) == []
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        assert differences(snapshot(engine), before) == []
        engine.save_checkpoint(str(checkpoint_dir), tag="again")
        assert list(drive.rglob("*.export.swp")) == []


@pytest.mark.parametrize("params", ["memory", "nvme"])
def test_too_little_room_is_refused_before_training_with_needed_and_free_bytes(tmp_path, way, params):
    case = Case(params=params)
    with small_drive(tmp_path, (8 if "offload" in way else 24) * MIB) as drive:
        if drive is None:
            pytest.skip("mounting a file system takes root")
        with (
            pytest.raises(OffloadConfigError, match=r"needs [\d,]+ B .* only [\d,]+ B"),
            engine_for(case, drive, **way),
        ):
            pass


def test_a_drive_without_room_for_the_parameters_refuses_the_model(tmp_path):
    with small_drive(tmp_path, 6 * MIB) as drive:
        if drive is None:
            pytest.skip("mounting a file system takes root")
        with (
            pytest.raises(OffloadIOError, match=r"reserving 1179648 B for parameter \d+ .* \d+ B are free"),
            engine_for(Case(params="nvme"), drive),
        ):
            pass
