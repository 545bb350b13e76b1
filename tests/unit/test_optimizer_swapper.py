"""What all optimizer swappers promise: state on storage trains exactly as state in memory."""

import warnings
from pathlib import Path

import pytest
import torch
from swapped_adam import KINDS, MIB, NUMEL, SwappedAdam, config

from offload.config import AioConfig
from offload.errors import OffloadWarning
from offload.io import pinned
from offload.swap.sub_group import MASTER

ODD = [NUMEL + 1, 2 * NUMEL + 1023, NUMEL + 4097]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        yield


@pytest.mark.parametrize("buffer_count", [1, 3, 12])
def test_many_steps_equal_those_in_memory_whatever_the_buffers(tmp_path, kind, buffer_count):
    with SwappedAdam(tmp_path, ODD, kind, buffer_count=buffer_count) as adam:
        adam.train(3)
        adam.assert_equal()
        assert adam.swapper.swap_buffer_manager.free_nbytes == adam.swapper.swap_buffer_manager.budget_nbytes


def test_the_default_buffers_suffice_without_growing(tmp_path, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error", OffloadWarning)
        with SwappedAdam(tmp_path, [2 * NUMEL] * 3, kind, optimizer=torch.optim.Adam) as adam:
            adam.train(2)
            adam.assert_equal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_every_dtype_arrive_exactly(tmp_path, kind, dtype):
    with SwappedAdam(tmp_path, ODD, kind) as adam:
        adam.train(2, dtype=dtype, parts=1)
        adam.assert_equal()


def test_plain_sgd_without_state_swaps_too(tmp_path, kind):
    with SwappedAdam(tmp_path, ODD, kind, optimizer=torch.optim.SGD) as adam:
        adam.train(3)
        adam.assert_equal()


def test_a_sub_group_on_storage_leaves_nothing_in_memory(tmp_path, kind):
    with SwappedAdam(tmp_path, ODD, kind) as adam:
        adam.train(1)
        assert all(param.numel() == 0 and param.grad is None for param in adam.params)
        state = adam.optimizer.state[adam.params[0]]
        assert state["exp_avg"].numel() == state["max_exp_avg_sq"].numel() == 0
        assert state["step"].item() == 1


def test_a_part_without_a_gradient_has_gradient_zero(tmp_path, kind):
    with SwappedAdam(tmp_path, [2 * NUMEL], kind) as adam:
        adam.train(1)
        adam.swapper.begin_gradient_window()
        gradient = torch.randn(NUMEL)
        adam.swapper.swap_out_gradients(adam.params[0], [NUMEL // 2], [gradient])
        adam.truth[0].grad = torch.zeros(2 * NUMEL)
        adam.truth[0].grad[NUMEL // 2 : NUMEL // 2 + NUMEL] = gradient
        adam.step()
        adam.assert_equal()


def test_a_gradient_that_was_set_comes_back_exactly_and_costs_its_space_once(tmp_path, kind):
    with SwappedAdam(tmp_path, [NUMEL], kind) as adam:
        sizes = []
        for _ in range(3):
            adam.backward()
            adam.swapper.swap_in_optimizer_state(adam.params[0])
            adam.truth[0].grad = torch.randn(NUMEL)
            adam.params[0].grad.copy_(adam.truth[0].grad)
            adam.swapper.writeback_optimizer_state_and_gradients(adam.params[0], False, True)
            adam.step()
            sizes.append(
                sum(path.stat().st_size for path in Path(adam.swapper.swap_folder).glob("*gradient*"))
            )
        adam.assert_equal()
        assert len(set(sizes)) == 1


def test_state_that_was_set_is_kept(tmp_path, kind):
    with SwappedAdam(tmp_path, ODD, kind) as adam:
        adam.train(1)
        adam.swapper.swap_in_optimizer_state(adam.params[1])
        adam.optimizer.state[adam.params[1]]["exp_avg"].fill_(0.5)
        adam.swapper.writeback_optimizer_state_and_gradients(adam.params[1], True, False)
        adam.reference.state[adam.truth[1]]["exp_avg"].fill_(0.5)
        adam.assert_equal()


def test_what_was_only_looked_at_is_not_written(tmp_path, kind):
    with SwappedAdam(tmp_path, ODD, kind) as adam:
        adam.train(1)
        adam.swapper.swap_in_optimizer_state(adam.params[0])
        adam.params[0].data.zero_()
        adam.swapper.release_swap_buffers(adam.params[0])
        adam.assert_equal()


def test_swapped_state_tells_where_every_tensor_lies(tmp_path, kind):
    with SwappedAdam(tmp_path, ODD, kind) as adam:
        adam.train(2)
        places = adam.swapper.swapped_state(adam.params[1])
        assert places.keys() == {MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        extent, dtype = places[MASTER]
        assert (extent.nbytes, dtype) == (4 * ODD[1], torch.float32)
        stored = torch.from_file(extent.path, size=ODD[1])
        assert torch.equal(stored, adam.truth[1].detach())


def test_swapped_state_includes_what_is_still_in_memory(tmp_path, kind):
    with SwappedAdam(tmp_path, ODD, kind) as adam:
        adam.train(1)
        adam.swapper.swap_in_optimizer_state(adam.params[0])
        adam.params[0].data.fill_(3)
        extent, _ = adam.swapper.swapped_state(adam.params[0])[MASTER]
        assert torch.from_file(extent.path, size=ODD[0]).unique().tolist() == [3]


def test_replaced_state_is_what_the_next_step_works_on(tmp_path, kind):
    with SwappedAdam(tmp_path, ODD, kind) as adam:
        adam.train(2)
        new = {name: torch.rand(ODD[0]) for name in (MASTER, "exp_avg", "exp_avg_sq")}
        adam.swapper.replace_state(adam.params[0], new)
        adam.truth[0].data.copy_(new[MASTER])
        adam.reference.state[adam.truth[0]].update(exp_avg=new["exp_avg"], exp_avg_sq=new["exp_avg_sq"])
        adam.train(1)
        adam.assert_equal()


def test_state_that_a_load_put_into_the_optimizer_is_written(tmp_path, kind):
    with SwappedAdam(tmp_path, ODD, kind) as adam:
        adam.train(2)
        for index, (param, truth) in enumerate(zip(adam.params, adam.truth, strict=True)):
            if index == 1:
                adam.swapper.swap_in_optimizer_state(param)
            state = {name: value.clone() for name, value in adam.reference.state[truth].items()}
            adam.optimizer.state[param] = state
            tensors = {name: value for name, value in state.items() if value.dim()}
            adam.swapper.replace_state(param, {MASTER: truth.detach(), **tensors})
        adam.train(1)
        adam.assert_equal()


def test_replacing_state_by_another_length_is_refused_with_both(tmp_path, kind):
    with (
        SwappedAdam(tmp_path, [NUMEL], kind) as adam,
        pytest.raises(ValueError, match=rf"fp32 of sub-group 0 \({NUMEL} elements\) cannot take 5 elements"),
    ):
        adam.swapper.replace_state(adam.params[0], {MASTER: torch.zeros(5)})


def test_purged_state_takes_its_files_along(tmp_path, kind):
    with SwappedAdam(tmp_path, ODD, kind) as adam:
        adam.train(1)
        adam.swapper.purge_state()
        names = sorted(path.name for path in Path(adam.swapper.swap_folder).glob("*.swp"))
        assert [name for name in names if "gradient" not in name] == [
            f"{index:05d}.fp32.float32.swp" for index in range(3)
        ]


def test_a_parameter_that_does_not_swap_is_passed_over(tmp_path, kind):
    with SwappedAdam(tmp_path, [NUMEL], kind) as adam:
        small = torch.zeros(3)
        small.ds_id = "small"
        adam.swapper.swap_in_optimizer_state(small)
        adam.swapper.swap_out_gradients(small, [0], [small])
        adam.swapper.swap_out_optimizer_state(small)
        adam.swapper.writeback_optimizer_state_and_gradients(small, True, True)
        adam.swapper.release_swap_buffers(small)
        assert small.tolist() == [0, 0, 0]


def test_a_sub_group_is_registered_once(tmp_path, kind):
    with SwappedAdam(tmp_path, [NUMEL], kind) as adam, pytest.raises(ValueError, match="registered already"):
        adam.swapper.initialize_parameters(adam.params, [torch.zeros(NUMEL)])


def test_a_sub_group_that_is_not_in_memory_cannot_be_written(tmp_path, kind):
    with SwappedAdam(tmp_path, [NUMEL], kind) as adam, pytest.raises(ValueError, match="not in memory"):
        adam.swapper.swap_out_optimizer_state(adam.params[0])


@pytest.mark.parametrize(("numel", "swaps"), [(1, False), (NUMEL - 1, False), (NUMEL, True)])
def test_tensors_of_a_mebibyte_swap(tmp_path, kind, numel, swaps):
    with SwappedAdam(tmp_path, [NUMEL], kind) as adam:
        assert adam.swapper.is_swappable_tensor(numel=numel) == swaps
        assert adam.swapper.is_swappable_tensor(torch.empty(numel)) == swaps
        with pytest.raises(ValueError, match="either"):
            adam.swapper.is_swappable_tensor()


def test_a_tensor_may_ask_to_stay(tmp_path, kind):
    with SwappedAdam(tmp_path, [NUMEL], kind) as adam:
        tensor = torch.empty(NUMEL)
        tensor.swappable = False
        assert not adam.swapper.is_swappable_tensor(tensor)


@pytest.mark.parametrize("pin_memory", [True, False])
def test_pinning_decides_whether_bytes_are_locked(tmp_path, kind, pin_memory):
    before = pinned.totals().locked_bytes
    with SwappedAdam(tmp_path, [NUMEL], kind, pin_memory=pin_memory) as adam:
        adam.train(1)
        assert (pinned.totals().locked_bytes > before) == pin_memory
    assert pinned.totals().locked_bytes == before


def test_close_leaves_nothing_and_may_be_called_twice(tmp_path, kind):
    before = pinned.totals()
    adam = SwappedAdam(tmp_path, ODD, kind)
    adam.train(1)
    adam.swapper.swap_in_optimizer_state(adam.params[0])
    adam.swapper.close()
    adam.swapper.close()
    assert list(tmp_path.iterdir()) == []
    assert pinned.totals() == before
    assert adam.params[0].numel() == 0


def test_a_hundred_swappers_leave_no_locked_memory(tmp_path, kind):
    before = pinned.totals()
    for _ in range(100):
        optimizer = torch.optim.SGD([torch.zeros(1)])
        kind(
            config(pin_memory=True), AioConfig(), str(tmp_path), optimizer, NUMEL, "cpu", torch.float32, None
        )
    assert pinned.totals() == before
    assert list(tmp_path.iterdir()) == []


def test_the_mapping_that_deepspeed_keeps_is_config_enough(tmp_path, kind):
    optimizer = torch.optim.SGD([torch.zeros(1)])
    swapper = kind(config(), {"block_size": 4 * MIB}, str(tmp_path), optimizer, 1, "cpu", torch.float32, None)
    assert swapper.min_aio_bytes == 4 * MIB
    swapper.close()
