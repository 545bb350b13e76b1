"""Parameters live on storage, come in when ZeRO-3 asks, and share one small arena whatever their sizes."""

import warnings

import pytest
import torch
from partitioned_param import GatherStatus, PartitionStatus, config, gather, new_param, partition, release

from offload.errors import OffloadConfigError, OffloadWarning
from offload.io import pinned
from offload.swap import AsyncPartitionedParameterSwapper
from offload.swap.stats import METER

MIB = 1 << 20
NUMEL = MIB // 2
DTYPE = torch.bfloat16


@pytest.fixture
def swapper(tmp_path):
    """An arena of 10 MiB."""
    swapper = AsyncPartitionedParameterSwapper(config(tmp_path), DTYPE)
    yield swapper
    swapper.close()


def params_of(swapper, *numels):
    """Partitioned parameters and the values they were made with."""
    truth = [torch.randn(numel).to(DTYPE) for numel in numels]
    params = [new_param(ds_id, values) for ds_id, values in enumerate(truth)]
    for param in params:
        partition(param, swapper)
    return params, truth


def nothing_is_lent(swapper):
    return swapper.swap_buffer_manager.free_nbytes == swapper.swap_buffer_manager.budget_nbytes


@pytest.mark.parametrize("numel", [NUMEL, NUMEL + 1, 3 * NUMEL + 4097])
def test_a_parameter_comes_back_as_it_was(swapper, numel):
    (param,), (truth,) = params_of(swapper, numel)
    assert param.ds_tensor.numel() == 0
    assert param.ds_tensor.status is PartitionStatus.NOT_AVAILABLE
    swapper.swap_in([param], async_op=False)
    assert param.ds_tensor.status is PartitionStatus.AVAILABLE
    assert torch.equal(param.ds_tensor, truth)
    swapper.remove_partition_and_release_buffers([param])
    assert param.ds_tensor.numel() == 0
    assert nothing_is_lent(swapper)


def test_a_read_ahead_is_in_flight_until_it_is_waited_for(swapper):
    params, truth = params_of(swapper, NUMEL, NUMEL)
    swapper.synchronize_writes()
    swapper.swap_in(params)
    assert {param.ds_tensor.status for param in params} == {PartitionStatus.INFLIGHT}
    swapper.swap_in(params)
    swapper.synchronize_reads()
    assert all(torch.equal(param.ds_tensor, values) for param, values in zip(params, truth, strict=True))


def test_reading_ahead_stops_where_the_arena_ends(swapper):
    params, _ = params_of(swapper, *[2 * NUMEL] * 8)
    swapper.synchronize_writes()
    assert swapper.available_swap_in_buffers() == 5
    swapper.swap_in(params)
    swapper.synchronize_reads()
    there = [param.ds_tensor.status is PartitionStatus.AVAILABLE for param in params]
    assert there == [True] * 5 + [False] * 3
    assert swapper.available_swap_in_buffers() == 0


def test_small_parameters_do_not_take_the_room_of_the_largest(swapper):
    params, truth = params_of(swapper, 8 * NUMEL, NUMEL, NUMEL)
    swapper.swap_in(params, async_op=False)
    assert all(torch.equal(param.ds_tensor, values) for param, values in zip(params, truth, strict=True))


def test_what_a_module_needs_at_once_may_exceed_the_arena_with_one_warning(swapper):
    params, truth = params_of(swapper, *[4 * NUMEL] * 5)
    with pytest.warns(OffloadWarning, match="offload_param.buffer_count or buffer_size") as caught:
        swapper.swap_in(params, async_op=False)
    assert len(caught) == 1
    assert all(torch.equal(param.ds_tensor, values) for param, values in zip(params, truth, strict=True))


@pytest.mark.filterwarnings("error::offload.errors.OffloadWarning")
def test_a_model_larger_than_the_arena_is_partitioned_without_growing_it(swapper):
    params, truth = params_of(swapper, *[3 * NUMEL] * 9)
    for param, values in zip(params, truth, strict=True):
        swapper.swap_in([param], async_op=False)
        assert torch.equal(param.ds_tensor, values)
        swapper.remove_partition_and_release_buffers([param])


def test_a_parameter_larger_than_the_arena_is_refused_with_bytes_and_keys(swapper):
    numel = 10 * NUMEL + 1
    with pytest.raises(
        OffloadConfigError,
        match=rf"parameter 3 \({numel} elements\) needs {2 * numel} B, .* {10 * MIB} B.*buffer_size",
    ):
        swapper.get_buffer(new_param(3, torch.zeros(1)), numel)


def test_new_values_replace_the_old_ones(swapper):
    params, _ = params_of(swapper, NUMEL, NUMEL + 3)
    new = [torch.randn(param.ds_tensor.ds_numel) for param in params]
    swapper.swap_out_partitioned_params(params, new)
    swapper.synchronize_writes()
    assert nothing_is_lent(swapper)
    swapper.swap_in(params, async_op=False)
    assert all(
        torch.equal(param.ds_tensor, values.to(DTYPE)) for param, values in zip(params, new, strict=True)
    )


def test_a_read_right_after_a_write_sees_what_was_written(swapper):
    (param,), _ = params_of(swapper, NUMEL)
    for value in range(5):
        swapper.swap_out_partitioned_params([param], [torch.full((NUMEL,), float(value))])
        swapper.swap_in([param], async_op=False)
        assert param.ds_tensor.unique().tolist() == [value]


def test_a_prefetched_parameter_is_stale_after_new_values(swapper):
    (param,), _ = params_of(swapper, NUMEL)
    swapper.swap_in([param])
    swapper.swap_out_partitioned_params([param], [torch.ones(NUMEL)])
    swapper.swap_in([param], async_op=False)
    assert param.ds_tensor.unique().tolist() == [1]


def test_a_gathered_parameter_keeps_its_memory_until_it_is_released(swapper):
    (param,), (truth,) = params_of(swapper, NUMEL)
    swapper.swap_in([param], async_op=False)
    gather(param)
    swapper.remove_partition_and_release_buffers([param])
    swapper.drop_prefetched()
    assert torch.equal(param.data, truth)
    release(param)
    swapper.remove_partition_and_release_buffers([param])
    assert nothing_is_lent(swapper)


def test_what_a_gather_still_reads_is_not_dropped(swapper):
    (param,), (truth,) = params_of(swapper, NUMEL)
    swapper.swap_in([param], async_op=False)
    param.ds_status = GatherStatus.INFLIGHT
    swapper.remove_partition_and_release_buffers([param])
    assert torch.equal(param.ds_tensor, truth)
    param.ds_status = GatherStatus.NOT_AVAILABLE


def test_changes_to_a_gathered_parameter_are_written_when_it_is_partitioned_again(swapper):
    (param,), _ = params_of(swapper, NUMEL)
    swapper.swap_in([param], async_op=False)
    gather(param)
    param.data.fill_(3)
    release(param)
    swapper.swap_out_and_release([param])
    assert swapper.read_partition(param).unique().tolist() == [3]


def test_unused_prefetches_are_dropped(swapper):
    params, _ = params_of(swapper, NUMEL, NUMEL)
    swapper.swap_in(params)
    swapper.drop_prefetched()
    assert nothing_is_lent(swapper)
    assert {param.ds_tensor.status for param in params} == {PartitionStatus.NOT_AVAILABLE}


def test_a_partition_can_be_read_into_memory_of_the_caller(swapper):
    (param,), (truth,) = params_of(swapper, NUMEL)
    own = torch.empty(NUMEL, dtype=DTYPE)
    swapper.swap_into_buffer(param, own)
    assert torch.equal(own, truth)
    assert param.ds_tensor.status is PartitionStatus.NOT_AVAILABLE


@pytest.mark.parametrize("where", ["storage", "memory", "writing"])
def test_values_are_read_and_written_wherever_they_are(swapper, where):
    (param,), (truth,) = params_of(swapper, NUMEL)
    if where == "memory":
        swapper.swap_in([param], async_op=False)
    elif where == "storage":
        swapper.synchronize_writes()
    assert torch.equal(swapper.read_partition(param), truth)
    swapper.write_partition(param, torch.ones(NUMEL))
    assert swapper.read_partition(param).unique().tolist() == [1]


@pytest.mark.parametrize("was_on_storage", [False, True])
def test_a_parameter_in_memory_for_good_is_read_and_written_there(swapper, was_on_storage):
    """A small one, or one that DeepSpeed moved to memory after `zero.Init` (`max_in_cpu`)."""
    param = new_param(0, torch.zeros(NUMEL, dtype=DTYPE))
    if was_on_storage:
        partition(param, swapper)
        swapper.swap_into_buffer(param, torch.empty(NUMEL, dtype=DTYPE))
    else:
        param.ds_tensor = torch.empty(0, dtype=DTYPE)
    param.ds_tensor.data = torch.ones(NUMEL, dtype=DTYPE)
    param.ds_tensor.status, param.ds_tensor.final_location = PartitionStatus.AVAILABLE, "not-nvme"
    assert swapper.read_partition(param).unique().tolist() == [1]
    swapper.write_partition(param, torch.full((NUMEL,), 2.0))
    assert param.ds_tensor.unique().tolist() == [2]
    swapper.close()
    assert param.ds_tensor.unique().tolist() == [2]


def test_the_path_of_a_parameter_is_complete_on_storage(swapper):
    params, truth = params_of(swapper, NUMEL, NUMEL)
    extent = swapper.get_path(params[1], must_exist=True)
    stored = torch.from_file(extent.path, size=(extent.offset + extent.nbytes) // 2, dtype=DTYPE)
    assert torch.equal(stored[extent.offset // 2 :], truth[1])
    with pytest.raises(KeyError):
        swapper.get_path(new_param(9, torch.zeros(1)))


def test_initialisation_borrows_a_little_and_gives_it_back(tmp_path):
    swapper = AsyncPartitionedParameterSwapper(config(tmp_path, buffer_size=100 * MIB), DTYPE)
    held = swapper.swap_buffer_manager.nbytes
    (buffer,) = swapper.reserve_available_buffers()
    assert 0 < buffer.nbytes <= 16 * MIB
    assert swapper.swap_buffer_manager.nbytes == held
    swapper.release_reserved_buffers()
    assert nothing_is_lent(swapper)
    swapper.close()


def test_initialisation_gets_a_buffer_also_from_a_full_arena(swapper):
    swapper.get_buffer(new_param(0, torch.zeros(1)), 10 * NUMEL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        (buffer,) = swapper.reserve_available_buffers()
    assert buffer.numel() > 0


@pytest.mark.parametrize(("numel", "swaps"), [(1, False), (NUMEL - 1, False), (NUMEL, True)])
def test_small_partitions_stay_in_memory_and_are_counted(swapper, numel, swaps):
    before = METER.snapshot()["kept_in_memory_bytes"].get("parameters", 0)
    assert swapper.swappable_tensor(numel=numel) == swaps
    kept = METER.snapshot()["kept_in_memory_bytes"].get("parameters", 0) - before
    assert kept == (0 if swaps else 2 * numel)
    param = new_param(0, torch.zeros(1))
    param.ds_tensor = torch.empty(0)
    param.ds_tensor.ds_numel = numel
    assert swapper.swappable_tensor(param) == swaps
    swapper.close()
    assert METER.snapshot()["kept_in_memory_bytes"].get("parameters", 0) == before


def test_swappable_takes_one_of_its_arguments(swapper):
    for arguments in ({}, {"param": new_param(0, torch.zeros(1)), "numel": 1}):
        with pytest.raises(ValueError, match="either"):
            swapper.swappable_tensor(**arguments)


def test_close_leaves_gathered_parameters_valid_and_nothing_else(swapper, tmp_path):
    before = pinned.totals().allocations - 1
    params, truth = params_of(swapper, NUMEL, NUMEL, NUMEL)
    swapper.swap_in(params[:2], async_op=False)
    gather(params[0])
    swapper.close()
    swapper.close()
    assert torch.equal(params[0].data, truth[0])
    assert list(tmp_path.iterdir()) == []
    assert pinned.totals().allocations == before


@pytest.mark.parametrize("pin_memory", [True, False])
def test_a_hundred_swappers_leave_no_locked_memory(tmp_path, pin_memory):
    before = pinned.totals()
    for _ in range(100):
        swapper = AsyncPartitionedParameterSwapper(config(tmp_path, pin_memory=pin_memory), DTYPE)
        locked = pinned.totals().locked_bytes - before.locked_bytes
        assert (locked > 0) == pin_memory
    del swapper
    assert pinned.totals() == before
    assert list(tmp_path.iterdir()) == []
