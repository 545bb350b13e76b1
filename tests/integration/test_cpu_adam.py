"""DeepSpeedCPUAdam on the operator from the extension: no compiler, same steps."""

import copy
import gc
import logging

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.cpu_adam import CPUAdamBuilder
from deepspeed.ops.op_builder.builder import OpBuilder

from offload.runtime.cpu_adam import CpuAdamOperator, cpu_adam_operator


@pytest.fixture(autouse=True)
def served_operator(monkeypatch):
    """What enable() does; a compile would be an error."""

    def refuse(self, verbose=True):
        raise AssertionError(f"{self.name} was about to be compiled")

    monkeypatch.setattr(OpBuilder, "jit_load", refuse)
    monkeypatch.setattr(CPUAdamBuilder, "load", lambda self, verbose=True: cpu_adam_operator)


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (17,), (1,), (40, 11)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(params, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_equal_torch_within_float32_rounding(adamw_mode, weight_decay):
    ours, theirs = make_params(), make_params()
    groups = [{"lr": 1e-2}, {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6}]
    torch_kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    optimizers = []
    for params, kind, extra in (
        (ours, DeepSpeedCPUAdam, {"adamw_mode": adamw_mode}),
        (theirs, torch_kind, {}),
    ):
        halves = [{"params": params[:2], **groups[0]}, {"params": params[2:], **groups[1]}]
        optimizers.append(kind(halves, weight_decay=weight_decay, **extra))
        train(params, optimizers[-1], steps=10)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp32_optimizer_states", [True, False])
def test_16_bit_parameters_take_steps_with_states_of_either_width(dtype, fp32_optimizer_states):
    params, wide = make_params(dtype), [torch.nn.Parameter(param.float()) for param in make_params(dtype)]
    train(params, DeepSpeedCPUAdam(params, fp32_optimizer_states=fp32_optimizer_states), steps=3)
    train(wide, DeepSpeedCPUAdam(wide), steps=3)
    for narrow, exact in zip(params, wide, strict=True):
        torch.testing.assert_close(narrow.float(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_resumed_optimizer_goes_on_with_the_same_bits():
    straight, resumed = make_params(), make_params()
    optimizer = DeepSpeedCPUAdam(straight)
    train(straight, optimizer, steps=5)
    with torch.no_grad():
        for param, trained in zip(resumed, straight, strict=True):
            param.copy_(trained)
    fresh = DeepSpeedCPUAdam(resumed)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(straight, optimizer, steps=5, seed=2)
    train(resumed, fresh, steps=5, seed=2)
    assert all(torch.equal(left, right) for left, right in zip(straight, resumed, strict=True))


def test_rollback_of_a_subgroup_returns_to_the_values_before():
    param = torch.nn.Parameter(torch.randn(100))
    param.grad = torch.randn(100)
    optimizer = DeepSpeedCPUAdam([param], weight_decay=0.1)
    optimizer.step_subgroup(0)
    before = param.detach().clone()
    optimizer.step_subgroup(0)
    optimizer.rollback_subgroup(0)
    assert optimizer.state[0]["step"] == 1
    torch.testing.assert_close(param.detach(), before, rtol=1e-6, atol=1e-7)


def test_dropped_optimizers_are_forgotten():
    registered = len(cpu_adam_operator._adamw_modes)
    for _ in range(10):
        DeepSpeedCPUAdam(make_params())
    gc.collect()
    assert len(cpu_adam_operator._adamw_modes) <= registered


def test_creation_is_logged_with_the_kernel_that_runs(caplog):
    with caplog.at_level(logging.INFO, logger="offload.runtime.cpu_adam"):
        CpuAdamOperator().create_adam(7, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, True)
    assert "kernel" in caplog.text


def test_zenflow_gets_the_operator_deepspeed_compiles():
    with pytest.raises(AssertionError, match="cpu_adam was about to be compiled"):
        _ = cpu_adam_operator.zenflow_adam_create
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = cpu_adam_operator.no_such_name


def update(opt_id, *tensors):
    return cpu_adam_operator.adam_update(opt_id, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, *tensors)


def test_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="id 123456"):
        update(123456, *torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(8, 2)[:, 0], "not contiguous"),
        (torch.zeros(7), "7 elements"),
        (torch.zeros(8, dtype=torch.float64), "float64"),
        (torch.zeros(8, dtype=torch.bfloat16), "two dtypes"),
        (torch.zeros(8, device="meta"), "meta"),
    ],
)
def test_unfit_tensors_are_refused_by_name(bad, message):
    cpu_adam_operator.create_adam(99, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    with pytest.raises(ValueError, match=message):
        update(99, *torch.zeros(3, 8), bad)
    cpu_adam_operator.destroy_adam(99)
