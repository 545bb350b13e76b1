"""Optimizer state in fewer bytes: exact as `split`, close as `8bit`, and always float32 to the outside."""

from dataclasses import replace

import deepspeed
import pytest
import torch
from deepspeed import utils

from offload import stats
from offload.errors import OffloadConfigError
from offload.runtime.streamed_zero3 import StreamedZeroOptimizer
from tests.integration.training import (
    AFTER_SAVE,
    BEFORE_SAVE,
    Case,
    advance,
    batch,
    engine_for,
    snapshot,
)

CASES = [Case(params="memory"), Case(params="nvme"), Case(params="nvme", accumulation=2, clipping=True)]
BYTES_PER_WEIGHT = {"fp32": 12, "split": 10, "8bit": 4.0625}


def in_format(name):
    return {"offload": {"state_format": name}}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        if torch.is_tensor(value):
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_split_step_is_the_float32_step_but_for_the_ties(swap_dir, case):
    with engine_for(case, swap_dir) as engine:
        advance(engine, case, range(1))
        expected = snapshot(engine)
    with engine_for(case, swap_dir, **in_format("split")) as engine:
        advance(engine, case, range(1))
        found = snapshot(engine)
    for name in (name for name in expected if name.endswith((", fp32", ", exp_avg", ", exp_avg_sq"))):
        assert torch.equal(found[name], expected[name]), name
    ties = 0
    for name in (name for name in expected if name.endswith(", model")):
        differs = found[name] != expected[name]
        master = expected[name.replace(", model", ", fp32")]
        assert torch.all(master[differs].view(torch.int32) & 0xFFFF == 0x8000), name
        ties += int(differs.sum())
    assert ties < sum(value.numel() for value in expected.values() if torch.is_tensor(value)) / 10_000


@pytest.mark.parametrize("name", ["split", "8bit"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(swap_dir, tmp_path, name, case):
    with engine_for(case, swap_dir, **in_format(name)) as engine:
        advance(engine, case, BEFORE_SAVE)
        engine.save_checkpoint(str(tmp_path), tag="saved")
        at_save = snapshot(engine)
        losses = advance(engine, case, AFTER_SAVE)
        at_end = snapshot(engine)
    with engine_for(case, swap_dir, seed=5, **in_format(name)) as engine:
        engine.load_checkpoint(str(tmp_path), tag="saved")
        assert_same(snapshot(engine), at_save)
        assert advance(engine, case, AFTER_SAVE) == losses
        assert_same(snapshot(engine), at_end)


def halve(weights):
    with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
        for weight in weights:
            weight.data.mul_(0.5)


@pytest.mark.parametrize("name", ["split", "8bit"])
@pytest.mark.parametrize("skipped", [False, True])
def test_weights_that_are_changed_before_a_step_are_stepped_wherever_they_live(swap_dir, name, skipped):
    ends = []
    for params in ("memory", "nvme"):
        case = Case(params=params)
        with engine_for(case, swap_dir, **in_format(name)) as engine:
            advance(engine, case, range(2))
            weights = [layer.weight for layer in engine.module.layers]
            x, target = batch(7, case.width, torch.bfloat16)
            loss = engine(x, target)
            engine.backward(loss * float("nan") if skipped else loss)
            if skipped:
                engine.step()
            halve(weights)
            if skipped:
                advance(engine, case, range(2, 3))
            else:
                engine.step()
            ends.append(snapshot(engine))
    assert ends[0]["steps"] == (4 if skipped else 3, int(skipped))
    assert_same(*ends)
    assert float(ends[0]["layers.0.weight, fp32"].abs().mean()) < 0.01, "0.018 where the change is lost"


@pytest.mark.parametrize("name", ["split", "8bit"])
def test_where_parameters_live_changes_nothing(swap_dir, name):
    runs = []
    for params in ("memory", "nvme"):
        case = Case(params=params)
        with engine_for(case, swap_dir, **in_format(name)) as engine:
            losses = advance(engine, case, range(4))
            runs.append({**snapshot(engine), "losses": losses})
    assert_same(*runs)


@pytest.mark.parametrize("saved, loaded", [("split", "fp32"), ("fp32", "split"), ("8bit", "split")])
def test_a_checkpoint_moves_between_formats(swap_dir, tmp_path, saved, loaded):
    case = CASES[0]
    with engine_for(case, swap_dir, **in_format(saved)) as engine:
        advance(engine, case, BEFORE_SAVE)
        engine.save_checkpoint(str(tmp_path), tag="saved")
        expected = snapshot(engine)
    with engine_for(case, swap_dir, seed=5, **in_format(loaded)) as engine:
        engine.load_checkpoint(str(tmp_path), tag="saved")
        found = snapshot(engine)
        if "fp32" in (saved, loaded):  # the model parameters may differ in the ties
            for state in (expected, found):
                [state.pop(name) for name in list(state) if name.endswith(", model")]
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["split", "8bit"])
def test_a_checkpoint_continues_without_nvme(swap_dir, tmp_path, name):
    case = CASES[1]
    with engine_for(case, swap_dir, **in_format(name)) as engine:
        advance(engine, case, BEFORE_SAVE)
        engine.save_checkpoint(str(tmp_path), tag="saved")
        expected = snapshot(engine)
    with engine_for(case.in_memory(), swap_dir, seed=5) as engine:
        engine.load_checkpoint(str(tmp_path), tag="saved")
        found = snapshot(engine)
    for key in (key for key in expected if key.endswith((", fp32", ", exp_avg", ", exp_avg_sq"))):
        assert torch.equal(found[key], expected[key]), key


@pytest.mark.parametrize("name", ["split", "8bit"])
@pytest.mark.parametrize("params", ["memory", "nvme"])
def test_what_is_set_is_what_is_read_and_nothing_else_changes(swap_dir, name, params):
    case = Case(params=params)
    with engine_for(case, swap_dir, **in_format(name)) as engine:
        advance(engine, case, range(1))
        before = snapshot(engine)
        label, param = next(iter(engine.module.named_parameters()))
        values = torch.randn(param.ds_shape, generator=torch.Generator().manual_seed(1))
        utils.safe_set_full_fp32_param(param, values)
        assert torch.equal(utils.safe_get_full_fp32_param(param), values)
        with deepspeed.zero.GatheredParameters([param]):
            upper = (values.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)
            assert torch.equal(param.detach(), upper)  # ties round away from zero
        utils.safe_set_full_optimizer_state(param, values, "exp_avg")
        read = utils.safe_get_full_optimizer_state(param, "exp_avg")
        largest, size = values.abs().max(), values.abs()
        half_a_step = 2.2 / 127 * size**0.75 * largest**0.25 + largest / 127**4
        assert torch.all((read - values).abs() <= (0.0 if name == "split" else half_a_step))
        after = snapshot(engine)
        changed = {f"{label}, {kind}" for kind in ("model", "fp32", "exp_avg")}
        if name == "8bit":  # the next parameter may share a block, and with it the scale, of 128 elements
            shared = {key for key in after if key.endswith(", exp_avg")} - changed
            assert all(int((after[key] != before[key]).sum()) < 128 for key in shared)
            changed |= shared
        assert_same(
            {key: value for key, value in after.items() if key not in changed},
            {key: value for key, value in before.items() if key not in changed},
        )
        advance(engine, case, range(1, 2))


@pytest.mark.parametrize("name", list(BYTES_PER_WEIGHT))
def test_a_step_moves_no_more_than_its_format(swap_dir, name):
    case = Case()
    with engine_for(case, swap_dir, **in_format(name)) as engine:
        assert type(engine.optimizer) is StreamedZeroOptimizer
        advance(engine, case, range(3))
        groups = list(engine.optimizer.optimizer_swapper.swap_params_info.values())
        record = stats()["last_step"]
    weights = sum(group.numel for group in groups)
    nbytes = BYTES_PER_WEIGHT[name] * weights
    for moved in (record.bytes_read["optimizer"], record.bytes_written["optimizer"]):
        assert nbytes <= moved <= nbytes + len(groups) * 8 * 5 * 4096
    assert record.bytes_read["gradients"] == record.bytes_written["gradients"] == 0


def test_eight_bits_train_as_well(swap_dir):
    case = replace(CASES[0], dtype="bf16")
    losses = {}
    for name in ("fp32", "8bit"):
        with engine_for(case, swap_dir, **in_format(name)) as engine:
            losses[name] = advance(engine, case, [0] * 12)  # one batch, again and again
    assert losses["8bit"][-1] < 0.9 * losses["8bit"][0]
    assert losses["8bit"][-1] == pytest.approx(losses["fp32"][-1], rel=0.05)


@pytest.mark.parametrize(
    "case, reason",
    [
        (Case(dtype="fp16"), "a float16 parameter is not the upper half"),
        (Case(dtype="fp32"), "a float32 parameter is not the upper half"),
        (Case(algorithm="torch Adam"), "has no streamed kernel"),
    ],
)
def test_formats_that_cannot_be_kept_are_refused(swap_dir, case, reason):
    with pytest.raises(OffloadConfigError, match=reason), engine_for(case, swap_dir, **in_format("split")):
        pass


@pytest.mark.parametrize("name", list(BYTES_PER_WEIGHT))
@pytest.mark.parametrize("params", ["memory", "nvme"])
def test_a_host_cache_changes_no_bit_and_saves_its_bytes(swap_dir, tmp_path, name, params):
    case = Case(params=params)
    with engine_for(case, swap_dir, **in_format(name)) as engine:
        losses = advance(engine, case, [*BEFORE_SAVE, *AFTER_SAVE])
        expected = snapshot(engine)
        whole = stats()["last_step"].bytes_read["optimizer"]
    section = {"state_format": name, "host_cache": whole // 2, "buffer_bytes": 8 << 20}  # small chunks
    cached = {"offload": section}
    with engine_for(case, swap_dir, **cached) as engine:
        found = advance(engine, case, BEFORE_SAVE)
        record = stats()["last_step"]
        assert whole // 4 <= record.bytes_cached["optimizer"] <= whole // 2
        assert record.bytes_read["optimizer"] + record.bytes_cached["optimizer"] == pytest.approx(
            whole, rel=0.01
        )
        assert record.bytes_written["optimizer"] == record.bytes_read["optimizer"]
        engine.save_checkpoint(str(tmp_path), tag="saved")
        assert found + advance(engine, case, AFTER_SAVE) == losses
        assert_same(snapshot(engine), expected)
    with engine_for(case, swap_dir, seed=5, **cached) as engine:
        advance(engine, case, range(2))  # what it has cached by now is not what is loaded
        engine.load_checkpoint(str(tmp_path), tag="saved")
        assert found + advance(engine, case, AFTER_SAVE) == losses
        assert_same(snapshot(engine), expected)


@pytest.mark.parametrize("name", list(BYTES_PER_WEIGHT))
def test_moments_that_only_the_cache_has_survive_a_load_of_weights_alone(swap_dir, tmp_path, name):
    case, runs = CASES[0], []
    for cache in (0, 1 << 30):
        section = {"offload": {"state_format": name, "host_cache": cache}}
        with engine_for(case, swap_dir, **section) as engine:
            advance(engine, case, range(2))
            engine.save_checkpoint(str(tmp_path), tag=f"cache {cache}")
            advance(engine, case, range(2, 4))
            engine.load_checkpoint(str(tmp_path), tag=f"cache {cache}", load_module_only=True)
            engine.optimizer.refresh_fp32_params()
            runs.append({**snapshot(engine), "losses": advance(engine, case, range(4, 6))})
    assert_same(*runs)
