"""A transfer that fails names the parameter, whose values are then on storage or in memory."""

import errno
import os

import pytest
import torch
from drive_faults import file_size_limit, interrupted_wait
from partitioned_param import PartitionStatus, config, gather, new_param, partition, release

from offload.errors import OffloadIOError
from offload.swap import AsyncPartitionedParameterSwapper

NUMEL = 1 << 19


@pytest.fixture
def swapper(tmp_path):
    swapper = AsyncPartitionedParameterSwapper(config(tmp_path), torch.bfloat16)
    yield swapper
    swapper.close()


@pytest.fixture
def params(swapper):
    """Three parameters on storage, of values 0, 1 and 2."""
    params = [
        new_param(index, torch.full((NUMEL,), float(index), dtype=torch.bfloat16)) for index in range(3)
    ]
    for param in params:
        partition(param, swapper)
    swapper.synchronize_writes()
    return params


def nothing_is_lent(swapper):
    return swapper.swap_buffer_manager.free_nbytes == swapper.swap_buffer_manager.budget_nbytes


def values(swapper, param):
    return swapper.read_partition(param).unique().tolist()


def refused_write(swapper, params):
    """New values, 7, of which the last two cannot be written."""
    with file_size_limit(3 * NUMEL), pytest.raises(OffloadIOError, match="writing parameter 1 ") as caught:
        swapper.swap_out_partitioned_params(params, [torch.full((NUMEL,), 7.0)] * 3)
        swapper.synchronize_writes()
    assert caught.value.errno == errno.EFBIG


def test_refused_values_stay_in_memory_and_can_be_used(swapper, params):
    refused_write(swapper, params)
    statuses = [param.ds_tensor.status.name for param in params]
    assert statuses == ["NOT_AVAILABLE", "AVAILABLE", "AVAILABLE"]
    swapper.swap_in(params, async_op=False)
    swapper.remove_partition_and_release_buffers(params)
    swapper.drop_prefetched()
    assert [values(swapper, param) for param in params] == [[7], [7], [7]]


def test_refused_values_are_written_with_the_next_step(swapper, params):
    refused_write(swapper, params)
    params[1].ds_tensor.copy_(torch.full((NUMEL,), 8.0))  # DeepSpeed updates what is in memory there
    swapper.synchronize_writes()
    assert nothing_is_lent(swapper)
    assert [values(swapper, param) for param in params] == [[7], [8], [7]]


def test_values_that_are_refused_again_stay(swapper, params):
    refused_write(swapper, params)
    with file_size_limit(NUMEL), pytest.raises(OffloadIOError, match="writing parameter 1 "):
        swapper.synchronize_writes()
    with file_size_limit(NUMEL), pytest.raises(OffloadIOError, match="writing parameter 2 "):
        swapper.get_path(params[2])
    assert [values(swapper, param) for param in params] == [[7], [7], [7]]


def test_refused_values_are_not_written_from_under_a_gathered_parameter(swapper, params):
    refused_write(swapper, params)
    gather(params[1])
    swapper.synchronize_writes()
    assert params[1].data.unique().tolist() == [7]
    release(params[1])
    swapper.synchronize_writes()
    assert nothing_is_lent(swapper)


def test_values_that_are_replaced_need_no_second_try(swapper, params):
    refused_write(swapper, params)
    for param in params:
        swapper.write_partition(param, torch.full((NUMEL,), 9.0))
    swapper.synchronize_writes()
    assert nothing_is_lent(swapper)
    assert [values(swapper, param) for param in params] == [[9], [9], [9]]


def test_a_swapper_with_refused_values_closes_without_a_word(swapper, params, tmp_path):
    refused_write(swapper, params)
    swapper.close()
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_file_is_an_error_with_parameter_path_and_sizes_and_the_rest_is_usable(swapper, params):
    path = swapper.get_path(params[0]).path
    os.truncate(path, 2 * NUMEL + 4096)
    with pytest.raises(
        OffloadIOError, match=r"reading parameter 1 \(524288 elements\): .*4096 of 1048576 B"
    ) as caught:
        swapper.swap_in(params, async_op=False)
    assert caught.value.filename == path
    statuses = [param.ds_tensor.status.name for param in params]
    assert statuses == ["AVAILABLE", "NOT_AVAILABLE", "NOT_AVAILABLE"]
    swapper.remove_partition_and_release_buffers(params)
    assert nothing_is_lent(swapper)
    swapper.write_partition(params[1], torch.full((NUMEL,), 5.0))
    assert [values(swapper, param) for param in params[:2]] == [[0], [5]]


def test_a_missing_file_leaves_the_parameter_swapped_out(swapper, params):
    path = swapper.get_path(params[0]).path
    os.rename(path, f"{path}.away")
    for how in (False, True, False):
        with pytest.raises(OffloadIOError, match="reading parameter 0 ") as caught:
            swapper.swap_in(params, async_op=how)
        assert caught.value.errno == errno.ENOENT
        assert params[0].ds_tensor.status is PartitionStatus.NOT_AVAILABLE
    with pytest.raises(OffloadIOError, match="reading parameter 0 "):
        swapper.read_partition(params[0])
    assert nothing_is_lent(swapper)
    os.rename(f"{path}.away", path)
    swapper.swap_in(params, async_op=False)
    assert params[2].ds_tensor.unique().tolist() == [2]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_ctrl_c_while_reading_loses_nothing(swapper, params, monkeypatch, nth):
    with interrupted_wait(monkeypatch, nth), pytest.raises(KeyboardInterrupt):
        swapper.swap_in(params, async_op=False)
    swapper.swap_in(params, async_op=False)
    assert [param.ds_tensor.unique().tolist() for param in params] == [[0], [1], [2]]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_ctrl_c_while_writing_loses_nothing(swapper, params, monkeypatch, nth):
    with interrupted_wait(monkeypatch, nth), pytest.raises(KeyboardInterrupt):
        swapper.swap_out_partitioned_params(params, [torch.full((NUMEL,), 7.0)] * 3)
        swapper.synchronize_writes()
    swapper.synchronize_writes()
    assert nothing_is_lent(swapper)
    assert [values(swapper, param) for param in params] == [[7], [7], [7]]


def test_a_partition_that_is_not_in_memory_cannot_be_written(swapper, params):
    with pytest.raises(ValueError, match=r"parameter 1 .* is not in memory"):
        swapper.swap_out_and_release([params[1]])
