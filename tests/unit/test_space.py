"""Space is counted before the first byte is written, over all ranks and all paths of a file system."""

import os
from pathlib import Path

import pytest

from offload.config import SpaceNeed, check_free_space, needed_nbytes, optimizer_nbytes, space
from offload.errors import OffloadConfigError

OPTIMIZER = "zero_optimization.offload_optimizer.nvme_path"
PARAM = "zero_optimization.offload_param.nvme_path"
GIB = 1 << 30


@pytest.fixture
def free(monkeypatch):
    """Sets the free bytes that every file system reports."""
    return lambda nbytes: monkeypatch.setattr(space, "free_nbytes", lambda directory: nbytes)


def need(path, nbytes, key=OPTIMIZER, what="optimizer state"):
    return SpaceNeed(key=key, path=path, what=what, nbytes=nbytes)


def test_adam_takes_12_bytes_per_element():
    assert optimizer_nbytes([1 << 20]) == 12 << 20


def test_fp32_gradients_on_the_drive_make_it_16():
    assert optimizer_nbytes([1 << 20], gradient_nbytes=4) == 16 << 20


@pytest.mark.parametrize("element_nbytes", [2, 4])
def test_parameters_take_their_element_size(element_nbytes):
    assert needed_nbytes([1 << 20, 1 << 20], element_nbytes) == element_nbytes << 21


@pytest.mark.parametrize(("numel", "blocks"), [(0, 0), (1, 1), (1024, 1), (1025, 2)])
def test_each_tensor_fills_whole_blocks(numel, blocks):
    assert needed_nbytes([numel], 4) == blocks * 4096


def test_ranks_that_share_a_path_are_added_up():
    assert needed_nbytes([1 << 20], 4, ranks=8) == 8 * needed_nbytes([1 << 20], 4)
    assert optimizer_nbytes([1 << 20], gradient_nbytes=4, ranks=8) == 8 * (16 << 20)


def test_sizes_may_come_from_a_generator():
    assert optimizer_nbytes((1024 for _ in range(3)), gradient_nbytes=4) == 3 * 16 * 1024


def test_enough_room_passes(tmp_path, free):
    free(GIB)
    check_free_space([need(tmp_path, GIB)])


def test_too_little_room_is_refused_with_all_numbers(tmp_path, free):
    free(GIB)
    with pytest.raises(OffloadConfigError) as caught:
        check_free_space([need(tmp_path, 3 * GIB)])
    message = str(caught.value)
    assert message.startswith(f"{OPTIMIZER}: the run needs 3,221,225,472 B (3.0 GiB)")
    assert "only 1,073,741,824 B (1.0 GiB) are free" in message
    assert "free 2,147,483,648 B (2.0 GiB) or name a larger drive" in message
    assert str(tmp_path) in message


def test_two_paths_on_one_drive_share_its_room(tmp_path, free):
    free(3 * GIB)
    needs = [need(tmp_path / "a", 2 * GIB), need(tmp_path / "b", 2 * GIB, PARAM, "parameters")]
    for alone in needs:
        check_free_space([alone])
    with pytest.raises(OffloadConfigError, match=rf"{OPTIMIZER} or {PARAM}: the run needs 4,294,967,296 B"):
        check_free_space(needs)


def test_a_missing_directory_is_measured_where_it_will_be_made(tmp_path):
    with pytest.raises(OffloadConfigError, match="the run needs"):
        check_free_space([need(tmp_path / "a" / "b", 1 << 60)])
    assert list(tmp_path.iterdir()) == []


def test_room_kept_for_root_does_not_count(tmp_path):
    status = os.statvfs(tmp_path)
    assert space.free_nbytes(tmp_path) == pytest.approx(status.f_bavail * status.f_frsize, rel=0.05)


def test_nothing_needed_is_fine():
    check_free_space([])
    check_free_space([need(Path("/"), 0)])
