"""DeepSpeedCPULion and DeepSpeedCPUAdagrad on operators from the extension: no compiler, same steps."""

import copy
import gc
import logging

import pytest
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.op_builder import CPUAdagradBuilder, CPULionBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.runtime.cpu_single_state import cpu_adagrad_operator, cpu_lion_operator

KINDS = (DeepSpeedCPULion, DeepSpeedCPUAdagrad)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    def refuse(self, verbose=True):
        raise AssertionError(f"{self.name} was about to be compiled")

    monkeypatch.setattr(OpBuilder, "jit_load", refuse)


def test_the_builders_hand_out_our_operators():
    assert CPULionBuilder().load() is cpu_lion_operator
    assert CPUAdagradBuilder().load() is cpu_adagrad_operator
    assert CPULionBuilder().is_compatible() and CPUAdagradBuilder().is_compatible()


def make_params(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(3, 5), (17,)]
    ]


def train(params, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def assert_close(ours, theirs):
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


class ReferenceLion(torch.optim.Optimizer):
    """The paper's rule, float64 inside."""

    def __init__(self, params, **options):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                grad, state = param.grad.double(), self.state[param]
                exp_avg = state.get("exp_avg", torch.zeros_like(grad))
                blend = beta1 * exp_avg + (1 - beta1) * grad
                kept = param.double() * (1 - group["lr"] * group["weight_decay"])
                param.copy_(kept - group["lr"] * torch.ones_like(blend).copysign(blend))
                state["exp_avg"] = beta2 * exp_avg + (1 - beta2) * grad


decay = st.just(0.0) | st.floats(1e-4, 0.3)


@settings(max_examples=30, deadline=None)
@given(lr=st.floats(1e-5, 0.05), beta1=st.floats(0, 0.99), beta2=st.floats(0, 0.99), weight_decay=decay)
def test_lion_steps_as_the_paper_says(lr, beta1, beta2, weight_decay):
    options = {"lr": lr, "betas": (beta1, beta2), "weight_decay": weight_decay}
    ours, theirs = make_params(), make_params()
    train(ours, DeepSpeedCPULion(ours, **options), steps=4)
    train(theirs, ReferenceLion(theirs, **options), steps=4)
    assert_close(ours, theirs)


@settings(max_examples=30, deadline=None)
@given(lr=st.floats(1e-5, 0.05), eps=st.floats(1e-10, 1e-3), weight_decay=decay)
def test_adagrad_steps_equal_torch_within_float32_rounding(lr, eps, weight_decay):
    options = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    ours, theirs = make_params(), make_params()
    train(ours, DeepSpeedCPUAdagrad(ours, **options), steps=4)
    train(theirs, torch.optim.Adagrad(theirs, **options), steps=4)
    assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [[5], [1, 4, 4, 7]], ids=str)
def test_a_sparse_gradient_steps_its_rows_alone(rows):
    start = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    for param, optimizer in (
        (ours, DeepSpeedCPUAdagrad([ours], lr=0.1)),
        (theirs, torch.optim.Adagrad([theirs], lr=0.1)),
    ):
        for _ in range(3):
            param.grad = None
            embedded = torch.nn.functional.embedding(torch.tensor(rows), param, sparse=True)
            (embedded.sum() * 2).backward()  # its gradient is one value, expanded
            param.grad = param.grad.coalesce()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    untouched = [row for row in range(8) if row not in rows]
    assert torch.equal(ours[untouched], start[untouched])


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp32_optimizer_states", [True, False])
def test_16_bit_parameters_take_steps_with_states_of_either_width(kind, dtype, fp32_optimizer_states):
    params = make_params(dtype=dtype)
    wide = [torch.nn.Parameter(param.float()) for param in params]
    train(params, kind(params, lr=0.01, fp32_optimizer_states=fp32_optimizer_states), steps=1)
    optimizer = kind(wide, lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for param in wide:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype).float()
    optimizer.step()
    for narrow, exact in zip(params, wide, strict=True):
        assert torch.equal(narrow, exact.to(dtype))


@every_kind
def test_resumed_optimizer_goes_on_with_the_same_bits(kind):
    straight = make_params()
    optimizer = kind(straight)
    train(straight, optimizer, steps=3)
    resumed = [torch.nn.Parameter(param.detach().clone()) for param in straight]
    fresh = kind(resumed)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(straight, optimizer, steps=3, seed=2)
    train(resumed, fresh, steps=3, seed=2)
    assert all(torch.equal(left, right) for left, right in zip(straight, resumed, strict=True))


def test_creation_is_logged_with_the_kernel_that_runs(caplog):
    with caplog.at_level(logging.INFO, logger="offload.runtime.cpu_single_state"):
        cpu_lion_operator.create_lion(990, 1e-3, 0.9, 0.99, 0.0, True)
        cpu_adagrad_operator.create_adagrad(990, 1e-3, 1e-8, 0.0, True)
    assert caplog.text.count("kernel") == 2
    cpu_lion_operator.destroy_lion(990)
    cpu_adagrad_operator.destroy_adagrad(990)


def lion(opt_id, *tensors):
    return cpu_lion_operator.lion_update(opt_id, 1, 1e-3, 0.9, 0.99, 0.0, *tensors)


def adagrad(opt_id, *tensors):
    return cpu_adagrad_operator.adagrad_update(opt_id, 1, 1e-3, 1e-8, 0.0, *tensors)


@pytest.mark.parametrize("update", [lion, adagrad])
def test_dropped_optimizers_are_refused(update):
    kind = DeepSpeedCPULion if update is lion else DeepSpeedCPUAdagrad
    optimizer = kind(make_params())
    opt_id = optimizer.opt_id
    assert update(opt_id, *torch.zeros(3, 8)) == 0
    del optimizer
    gc.collect()
    with pytest.raises(ValueError, match=f"id {opt_id}"):
        update(opt_id, *torch.zeros(3, 8))


@pytest.mark.parametrize("update", [lion, adagrad])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(8, 2)[:, 0], "not contiguous"),
        (torch.zeros(7), "7 elements"),
        (torch.zeros(8, dtype=torch.float64), "float64"),
        (torch.zeros(8, dtype=torch.bfloat16), "no kernel for these dtypes"),
        (torch.zeros(8, device="meta"), "meta"),
    ],
)
def test_unfit_tensors_are_refused_by_name(update, bad, message):
    kind = DeepSpeedCPULion if update is lion else DeepSpeedCPUAdagrad
    optimizer = kind(make_params())
    with pytest.raises(ValueError, match=message):
        update(optimizer.opt_id, *torch.zeros(2, 8), bad)
