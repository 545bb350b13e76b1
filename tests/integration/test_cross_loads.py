"""A checkpoint does not depend on where state lived: it loads elsewhere, and DeepSpeed's tools read it."""

from contextlib import nullcontext

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.integration.comparison import differences
from tests.integration.training import (
    AFTER_SAVE,
    BEFORE_SAVE,
    Case,
    advance,
    engine_for,
    resume,
    snapshot,
    stock_deepspeed,
    train,
)

ON_NVME = Case("nvme", "nvme")
IN_MEMORY = Case("memory", "cpu")
OPTIMIZER_ON_NVME = Case("memory", "nvme", pipeline="both")
PARAMS_ON_NVME = Case("nvme", "cpu")


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (ON_NVME, IN_MEMORY),
        (IN_MEMORY, ON_NVME),
        (OPTIMIZER_ON_NVME, PARAMS_ON_NVME),
        (PARAMS_ON_NVME, OPTIMIZER_ON_NVME),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_exactly_where_state_lives_elsewhere(saved, loaded, swap_dir, checkpoint_dir):
    run = train(saved, swap_dir, checkpoint_dir)
    again = resume(loaded, swap_dir, checkpoint_dir)
    assert differences(run.at_save, again.at_save) == []
    assert differences(run.at_end, again.at_end) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_checkpoint_of_stock_cpu_offload_loads_onto_nvme(dtype, swap_dir, checkpoint_dir):
    with stock_deepspeed():
        stock = train(Case("memory", "cpu", dtype), swap_dir, checkpoint_dir)
    again = resume(Case("nvme", "nvme", dtype), swap_dir, checkpoint_dir)
    assert differences(stock.at_save, again.at_save) == []


def test_a_checkpoint_from_nvme_loads_into_stock_cpu_offload(swap_dir, checkpoint_dir):
    run = train(ON_NVME, swap_dir, checkpoint_dir)
    with stock_deepspeed():
        again = resume(IN_MEMORY, swap_dir, checkpoint_dir)
    assert differences(run.at_save, again.at_save) == []


@pytest.mark.parametrize("feature", ["plain", "frozen parameters"])
def test_deepspeeds_converter_reads_the_weights(feature, swap_dir, checkpoint_dir):
    case = Case("nvme", "nvme", feature=feature)
    run = train(case, swap_dir, checkpoint_dir)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint_dir), tag="saved")
    for name, value in weights.items():
        expected = run.at_save.get(f"{name}, fp32", run.at_save[f"{name}, model"].float())
        assert torch.equal(value.float(), expected), name
    assert {f"{name}, model" for name in weights} == {name for name in run.at_save if name.endswith("model")}


@pytest.mark.parametrize(
    "what",
    [{"load_module_only": True}, {"load_optimizer_states": False}, {"load_lr_scheduler_states": False}],
)
def test_loading_a_part_does_what_it_does_in_memory(what, swap_dir, checkpoint_dir):
    train(IN_MEMORY, swap_dir, checkpoint_dir)
    loaded = [_load_part(case, what, swap_dir, checkpoint_dir) for case in (IN_MEMORY, ON_NVME)]
    assert loaded[0][0] == loaded[1][0]
    assert differences(loaded[0][1], loaded[1][1]) == []
    assert differences(loaded[0][2], loaded[1][2]) == []


def _load_part(case, what, swap_dir, checkpoint_dir):
    with engine_for(case, swap_dir, seed=5) as engine:
        engine.load_checkpoint(str(checkpoint_dir), tag="saved", **what)
        at_load = snapshot(engine)
        losses = advance(engine, case, BEFORE_SAVE)
        return losses, at_load, snapshot(engine)


@pytest.mark.parametrize("case", [ON_NVME, IN_MEMORY, OPTIMIZER_ON_NVME], ids=str)
def test_a_checkpoint_from_before_the_first_step_loads(case, swap_dir, checkpoint_dir):
    with engine_for(case, swap_dir) as engine:
        engine.save_checkpoint(str(checkpoint_dir))
        losses = advance(engine, case, BEFORE_SAVE)
        at_end = snapshot(engine)
    with engine_for(case, swap_dir, seed=5) as engine:
        engine.load_checkpoint(str(checkpoint_dir))
        assert advance(engine, case, BEFORE_SAVE) == losses
        assert differences(snapshot(engine), at_end) == []


def test_a_state_set_just_before_the_save_is_the_one_that_loads(swap_dir, checkpoint_dir):
    surgery = Case("nvme", "nvme", feature="state set by user (full)")
    with engine_for(surgery, swap_dir) as engine:
        advance(engine, surgery, BEFORE_SAVE)
        surgery.uses.after_step(engine, 0)
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        saved = {name: value for name, value in snapshot(engine).items() if not name.endswith("model")}
    again = resume(ON_NVME, swap_dir, checkpoint_dir)
    assert differences(saved, {name: again.at_save[name] for name in saved}) == []
    weight = again.at_save["layers.2.weight, model"]
    assert torch.equal(weight, saved["layers.2.weight, fp32"].to(weight.dtype))


@pytest.mark.parametrize("loader", [nullcontext, stock_deepspeed], ids=["ours", "stock"])
def test_frozen_parameters_may_be_left_out(loader, swap_dir, checkpoint_dir):
    case = Case("nvme", "nvme", feature="frozen parameters")
    with engine_for(case, swap_dir) as engine:
        advance(engine, case, BEFORE_SAVE)
        engine.save_checkpoint(str(checkpoint_dir), tag="saved", exclude_frozen_parameters=True)
        saved = snapshot(engine)
    with loader(), engine_for(case.in_memory(), swap_dir, seed=5) as engine:
        first = snapshot(engine)
        engine.load_checkpoint(str(checkpoint_dir), tag="saved", load_module_strict=False)
        loaded = snapshot(engine)
        advance(engine, case.in_memory(), AFTER_SAVE)
    frozen = {"layers.1.weight, model", "norm.bias, model"}
    assert set(differences(saved, loaded)) <= frozen
    assert frozen.isdisjoint(differences(first, loaded))
