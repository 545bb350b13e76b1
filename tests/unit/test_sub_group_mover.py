"""A transfer that fails names its tensor, and the sub-group is whole afterwards: on storage or in memory."""

import errno
import os
import warnings
from pathlib import Path

import pytest
import torch
from drive_faults import file_size_limit, interrupted_wait
from swapped_adam import KINDS, MIB, NUMEL, SwappedAdam

from offload.errors import OffloadIOError, OffloadWarning
from offload.swap.sub_group import MASTER


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        yield


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def adam(request, tmp_path):
    with SwappedAdam(tmp_path, [NUMEL, NUMEL + 7, NUMEL + 1], request.param, buffer_count=12) as adam:
        yield adam


def nothing_is_lent(adam):
    manager = adam.swapper.swap_buffer_manager
    return manager.free_nbytes == manager.budget_nbytes


def step_in_memory(adam, ngroups):
    """The step that the first `ngroups` sub-groups took before one failed."""
    for truth in adam.truth[ngroups:]:
        truth.grad = None
    adam.reference.step()


def path_of(adam, index, name):
    return Path(adam.swapper.swapped_state(adam.params[index])[name][0].path)


def test_a_refused_write_names_the_tensor_and_loses_nothing(adam):
    adam.train(1)
    adam.backward()
    with (
        file_size_limit(MIB // 2),
        pytest.raises(OffloadIOError, match=r"writing .* of sub-group 0 \(262144 elements\): ") as caught,
    ):
        adam.step()
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename.endswith(".swp")
    steps = [adam.optimizer.state[param]["step"].item() for param in adam.params]
    step_in_memory(adam, steps.count(2))
    adam.assert_equal()
    adam.train(2)
    adam.assert_equal()
    assert nothing_is_lent(adam)


def test_no_room_for_new_state_names_it_and_loses_nothing(adam):
    adam.backward()
    with (
        file_size_limit(MIB // 2),
        pytest.raises(
            OffloadIOError, match=r"reserving 1048576 B for exp_avg of sub-group 0 .* B are free"
        ) as caught,
    ):
        adam.step()
    assert caught.value.errno == errno.EFBIG
    step_in_memory(adam, 1)
    adam.train(2)
    adam.assert_equal()
    assert nothing_is_lent(adam)


def test_what_could_not_be_written_survives_a_look_and_a_checkpoint(adam):
    adam.train(1)
    adam.backward()
    with file_size_limit(MIB // 2), pytest.raises(OffloadIOError):
        adam.step()
    adam.swapper.swap_in_optimizer_state(adam.params[0])
    changed = adam.params[0].detach().clone()
    adam.swapper.release_swap_buffers(adam.params[0])
    with file_size_limit(MIB // 2), pytest.raises(OffloadIOError, match="writing"):
        adam.swapper.swapped_state(adam.params[0])
    extent, _ = adam.swapper.swapped_state(adam.params[0])[MASTER]
    assert torch.equal(torch.from_file(extent.path, size=NUMEL), changed)


def test_state_that_could_not_be_written_may_be_replaced(adam):
    adam.train(1)
    adam.backward()
    with file_size_limit(MIB // 2), pytest.raises(OffloadIOError):
        adam.step()
    for index, truth in enumerate(adam.truth):
        state = {name: value for name, value in adam.reference.state[truth].items() if value.dim()}
        adam.swapper.replace_state(adam.params[index], {MASTER: truth.detach(), **state})
        adam.optimizer.state[adam.params[index]]["step"].fill_(1)
    adam.train(1)
    adam.assert_equal()
    assert nothing_is_lent(adam)


def test_a_swapper_that_could_not_write_closes_without_a_word(adam, tmp_path):
    adam.train(1)
    adam.backward()
    with file_size_limit(MIB // 2), pytest.raises(OffloadIOError):
        adam.step()
    with file_size_limit(MIB // 2):
        adam.swapper.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [MASTER, "exp_avg_sq"])
def test_a_truncated_file_is_an_error_with_tensor_path_and_sizes(adam, name):
    adam.train(1)
    path = path_of(adam, 1, name)
    content = path.read_bytes()
    os.truncate(path, 4096)
    wanted = 4 * (NUMEL + 7)
    with pytest.raises(
        OffloadIOError, match=rf"reading {name} of sub-group 1 .*4096 of {wanted} B"
    ) as caught:
        adam.swapper.swap_in_optimizer_state(adam.params[1])
    assert caught.value.filename == str(path)
    assert (caught.value.nbytes_wanted, caught.value.nbytes_moved) == (wanted, 4096)
    assert nothing_is_lent(adam)
    assert adam.params[1].numel() == 0
    path.write_bytes(content)
    adam.train(1)
    adam.assert_equal()


def test_a_missing_file_is_an_error_with_tensor_and_path(adam):
    adam.train(1)
    path = path_of(adam, 0, "exp_avg")
    path.rename(path.with_suffix(".away"))
    with pytest.raises(OffloadIOError, match="reading exp_avg of sub-group 0") as caught:
        adam.swapper.swap_in_optimizer_state(adam.params[0], adam.params[1])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(path))
    assert nothing_is_lent(adam)
    path.with_suffix(".away").rename(path)
    adam.train(1)
    adam.assert_equal()


def test_a_gradient_that_could_not_be_written_fails_the_step_until_the_next_window(adam):
    adam.train(1, parts=1, dtype=torch.float32)
    with file_size_limit(4096):
        with pytest.raises(OffloadIOError, match="writing gradient at 0 of sub-group 0") as caught:
            adam.backward(parts=1, dtype=torch.float32)
            adam.swapper.flush_gradients()
        with pytest.raises(OffloadIOError, match="gradient at 0 of sub-group 0"):
            adam.swapper.swap_in_optimizer_state(adam.params[0])
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(OffloadIOError, match="gradient at 0 of sub-group 0"):
        adam.swapper.swap_in_optimizer_state(adam.params[0])
    assert nothing_is_lent(adam)
    adam.train(1)
    adam.assert_equal()


def test_a_truncated_gradient_is_an_error_that_names_it(adam):
    adam.backward(parts=1, dtype=torch.float32)
    adam.swapper.flush_gradients()
    (path,) = Path(adam.swapper.swap_folder).glob("00000.gradient*")
    os.truncate(path, 0)
    with pytest.raises(OffloadIOError, match="reading gradient at 0 of sub-group 0"):
        adam.step()
    assert nothing_is_lent(adam)


@pytest.mark.parametrize("nth", range(1, 12))
def test_ctrl_c_at_any_wait_of_a_step_loses_and_leaks_nothing(adam, monkeypatch, nth):
    adam.train(1)
    adam.backward()
    with interrupted_wait(monkeypatch, nth), pytest.raises(KeyboardInterrupt):
        adam.step()
    steps = [adam.optimizer.state[param]["step"].item() for param in adam.params]
    step_in_memory(adam, steps.count(2))
    adam.train(1)
    adam.assert_equal()
    adam.swapper.flush_gradients()
    for param in adam.params:
        adam.swapper.swapped_state(param)
    assert nothing_is_lent(adam)


def test_an_optimizer_that_raises_leaves_a_sub_group_that_takes_the_next_step(adam):
    adam.train(1)
    adam.backward()
    adam.swapper.swap_in_optimizer_state(adam.params[0], adam.params[1])  # and then the optimizer raises
    for truth in adam.truth:
        truth.grad = None
    adam.train(1)
    adam.assert_equal()
    assert nothing_is_lent(adam)
