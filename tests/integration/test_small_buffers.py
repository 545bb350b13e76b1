"""Buffers that do not fit what they are for: training works, bit for bit as without NVMe."""

import warnings
from dataclasses import replace

import deepspeed
import pytest
import torch

import offload
from offload.errors import OffloadConfigError, OffloadWarning
from tests.integration.faults import BY_WHOLE_SUB_GROUPS, changed
from tests.integration.training import Case, advance, config, engine_for

STEPS = range(3)
ON_NVME = Case(params="nvme")


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Losses of the training that keeps all in memory."""
    known = {}

    def losses(**changes):
        key = str(changes)
        if key not in known:
            case = ON_NVME.in_memory()
            with engine_for(case, tmp_path_factory.mktemp("swap"), **changes) as engine:
                known[key] = advance(engine, case, STEPS)
        return known[key]

    return losses


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        yield


def test_parameters_larger_than_a_buffer(swap_dir, truth):
    zero = changed(ON_NVME, swap_dir, offload_param={"buffer_size": 500_000})
    with engine_for(ON_NVME, swap_dir, **zero) as engine:
        assert advance(engine, ON_NVME, STEPS) == truth()


def test_an_arena_that_holds_one_parameter_only(swap_dir, truth):
    zero = changed(ON_NVME, swap_dir, offload_param={"buffer_size": 768 * 768, "buffer_count": 1})
    with engine_for(ON_NVME, swap_dir, **zero) as engine:
        assert advance(engine, ON_NVME, STEPS) == truth()


def test_a_parameter_larger_than_the_arena_is_refused_with_bytes_and_key(swap_dir):
    zero = changed(ON_NVME, swap_dir, offload_param={"buffer_size": 100_000})
    with (
        pytest.raises(OffloadConfigError, match=r"589824 elements\) needs 1179648 B.*buffer_size"),
        engine_for(ON_NVME, swap_dir, **zero),
    ):
        pass


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("pipeline", ["off", "both"])
def test_fewer_optimizer_buffers_than_a_sub_group_has_tensors(swap_dir, truth, count, pipeline):
    case = replace(ON_NVME, pipeline=pipeline)
    zero = changed(case, swap_dir, offload_optimizer={"buffer_count": count})
    with engine_for(case, swap_dir, **zero, **BY_WHOLE_SUB_GROUPS) as engine:
        assert advance(engine, case, STEPS) == truth(**BY_WHOLE_SUB_GROUPS)


def test_a_pipeline_with_the_default_buffers(swap_dir, truth):
    case = replace(ON_NVME, pipeline="both")
    with engine_for(case, swap_dir) as engine:
        assert advance(engine, case, STEPS) == truth()


def test_one_sub_group_for_the_whole_model(swap_dir, truth):
    zero = changed(ON_NVME, swap_dir)
    zero["zero_optimization"]["sub_group_size"] = 10**12
    with engine_for(ON_NVME, swap_dir, **zero, **BY_WHOLE_SUB_GROUPS) as engine:
        assert advance(engine, ON_NVME, STEPS) == truth(**BY_WHOLE_SUB_GROUPS)


def losses_of_a_client_optimizer(case, swap_dir):
    settings = {**config(case, swap_dir), "zero_force_ds_cpu_optimizer": False}
    del settings["optimizer"]
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = case.uses.build(case.width)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    try:
        return advance(engine, case, STEPS)
    finally:
        engine.destroy()


def test_an_optimizer_with_more_state_than_adam(swap_dir):
    expected = losses_of_a_client_optimizer(ON_NVME.in_memory(), swap_dir)
    assert losses_of_a_client_optimizer(ON_NVME, swap_dir) == expected


@pytest.mark.parametrize("params", ["memory", "nvme"])
@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("mib", [8, 16, 32])
def test_no_more_than_buffer_bytes_is_held(swap_dir, tmp_path, params, gradients, mib, recwarn):
    case = Case(params=params)
    warnings.simplefilter("always")
    settings = {"buffer_bytes": mib << 20, "gradients": gradients}
    with engine_for(case, swap_dir, offload=settings) as engine:
        manager = engine.optimizer.optimizer_swapper.swap_buffer_manager
        assert manager.nbytes <= mib << 20
        advance(engine, case, range(1))
        engine.save_checkpoint(str(tmp_path), tag="saved")
        engine.load_checkpoint(str(tmp_path), tag="saved")
        advance(engine, case, range(1))
        assert manager.nbytes <= mib << 20
    assert [str(warning.message) for warning in recwarn if "buffer_bytes" in str(warning.message)] == []


@pytest.mark.parametrize("params", ["memory", "nvme"])
def test_a_model_too_small_to_swap(swap_dir, params):
    def losses(case):
        before = offload.stats()["kept_in_memory_bytes"]
        with engine_for(case, swap_dir) as engine:
            kept = offload.stats()["kept_in_memory_bytes"]
            numel = sum(param.ds_numel for param in engine.module.parameters())
            taken = {kind: nbytes - before.get(kind, 0) for kind, nbytes in kept.items()}
            assert taken.get("optimizer", 0) == (4 * numel if case.optimizer == "nvme" else 0)
            assert taken.get("parameters", 0) == (2 * numel if case.params == "nvme" else 0)
            return advance(engine, case, STEPS)

    class Tiny(Case):
        width = 16

    tiny = Tiny(params=params)
    assert losses(tiny) == losses(Tiny(params="memory", optimizer="cpu"))
