"""Lion, Adagrad and SGD on plain addresses: against torch.optim and DeepSpeed, and against themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from adam_cases import DTYPES, GRAIN, ISAS, NUMELS, float32, floats
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _C


@dataclass
class State:
    param: torch.Tensor
    grad: torch.Tensor
    state: torch.Tensor

    def clone(self) -> State:
        return State(*(tensor.clone() for tensor in vars(self).values()))

    def __getitem__(self, part: slice) -> State:
        return State(*(tensor[part] for tensor in vars(self).values()))


def make_state(numel: int, seed: int = 0, grad_dtype: torch.dtype = torch.float32) -> State:
    """Parameter, gradient and state share a sign, so that no sum loses digits to cancellation."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.rand(numel, generator=generator) + 0.1 for _ in range(3)]
    sign = torch.randn(numel, generator=generator).sign()
    return State(values[0] * sign, (values[1] * sign * 0.1).to(grad_dtype), values[2] * sign * 0.1)


def buffers(state: State, /, **overrides):
    fields = {name: tensor.data_ptr() for name, tensor in vars(state).items()}
    fields |= {"numel": state.param.numel(), "grad_dtype": DTYPES[state.grad.dtype]}
    return _C.SingleStateBuffers(**(fields | overrides))


LION = {"lr": float32(1e-3), "beta1": float32(0.9), "beta2": float32(0.99), "weight_decay": float32(0.1)}
ADAGRAD = {"lr": float32(1e-2), "eps": float32(1e-10), "weight_decay": float32(0.1)}
SGD = {
    "lr": float32(1e-2),
    "momentum": float32(0.9),
    "dampening": float32(0.1),
    "weight_decay": float32(0.1),
    "nesterov": False,
}


@dataclass(frozen=True)
class Rule:
    name: str
    options: Callable
    step: Callable
    defaults: dict

    def run(self, state: State, /, step: int = 2, num_threads: int = 1, isa=ISAS[-1], **extra) -> State:
        self.step(self.options(**self.defaults), step, buffers(state, **extra), num_threads, isa)
        return state


RULES = [
    Rule("lion", _C.LionOptions, _C.lion_step, LION),
    Rule("adagrad", _C.AdagradOptions, _C.adagrad_step, ADAGRAD),
    Rule("sgd", _C.SgdOptions, _C.sgd_step, SGD),
    Rule("nesterov", _C.SgdOptions, _C.sgd_step, SGD | {"nesterov": True, "dampening": 0.0}),
    Rule("plain sgd", _C.SgdOptions, _C.sgd_step, SGD | {"momentum": 0.0}),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def start_of(state: State) -> State:
    """Adagrad's sum is never negative."""
    return replace(state, state=state.state.abs())


def assert_same_bits(left: State, right: State) -> None:
    for name, tensor in vars(left).items():
        assert torch.equal(tensor.view(torch.uint8), vars(right)[name].view(torch.uint8)), name


def assert_close(ours: State, theirs: State) -> None:
    torch.testing.assert_close(ours.param, theirs.param, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.state, theirs.state, rtol=1e-6, atol=1e-8)


decay = st.just(0.0) | floats(1e-5, 0.3)


@settings(max_examples=100, deadline=None)
@given(lr=floats(1e-6, 0.1), eps=floats(1e-10, 1e-3), weight_decay=decay, lr_decay=decay, data=st.data())
def test_adagrad_equals_torch_within_float32_rounding(lr, eps, weight_decay, lr_decay, data):
    step, seed = data.draw(st.integers(1, 10_000)), data.draw(st.integers(0, 1000))
    ours = start_of(make_state(67, seed))
    theirs = ours.clone()
    options = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "lr_decay": lr_decay}
    _C.adagrad_step(_C.AdagradOptions(**options), step, buffers(ours), 1, ISAS[-1])
    param = torch.nn.Parameter(theirs.param)
    param.grad = theirs.grad
    optimizer = torch.optim.Adagrad([param], foreach=False, **options)
    optimizer.state[param] = {"step": torch.tensor(float(step - 1)), "sum": theirs.state}
    optimizer.step()
    assert_close(ours, theirs)


@settings(max_examples=100, deadline=None)
@given(
    lr=floats(1e-6, 0.1),
    momentum=st.just(0.0) | floats(0.1, 0.99),
    dampening=st.just(0.0) | floats(0.1, 0.9),
    weight_decay=decay,
    nesterov=st.booleans(),
    first=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sgd_equals_torch_within_float32_rounding(
    lr, momentum, dampening, weight_decay, nesterov, first, seed
):
    nesterov = nesterov and momentum > 0 and dampening == 0
    options = {"lr": lr, "momentum": momentum, "dampening": dampening}
    options |= {"weight_decay": weight_decay, "nesterov": nesterov}
    ours = make_state(67, seed)
    theirs = ours.clone()
    _C.sgd_step(_C.SgdOptions(**options), 1 if first else 2, buffers(ours), 1, ISAS[-1])
    param = torch.nn.Parameter(theirs.param)
    param.grad = theirs.grad
    optimizer = torch.optim.SGD([param], foreach=False, **options)
    optimizer.state[param] = {"momentum_buffer": None if first else theirs.state}
    optimizer.step()
    if momentum != 0:
        theirs.state = optimizer.state[param]["momentum_buffer"]
    assert_close(ours, theirs)


@settings(max_examples=50, deadline=None)
@given(
    lr=floats(1e-6, 0.1),
    momentum=st.just(0.0) | st.floats(0.1, 0.99),
    dampening=st.just(0.0) | st.floats(0.1, 0.9),
    weight_decay=st.just(0.0) | st.floats(1e-5, 0.3),
    nesterov=st.booleans(),
    numel=st.sampled_from(NUMELS),
)
def test_sgd_has_the_bits_of_torch(lr, momentum, dampening, weight_decay, nesterov, numel):
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("without these torch rounds products before it adds them")
    nesterov = nesterov and momentum > 0 and dampening == 0
    options = {"lr": lr, "momentum": momentum, "dampening": dampening}
    options |= {"weight_decay": weight_decay, "nesterov": nesterov}
    ours = make_state(numel)
    param = torch.nn.Parameter(ours.param.clone())
    optimizer = torch.optim.SGD([param], **options)
    for step in (1, 2, 3):
        param.grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        ours.grad = param.grad.clone()
        optimizer.step()
        _C.sgd_step(_C.SgdOptions(**options), step, buffers(ours), 1, ISAS[-1])
        assert torch.equal(ours.param, param.detach())
        if momentum != 0:
            assert torch.equal(ours.state, optimizer.state[param]["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, None], ids=["wide state", "narrow state"])
@every_rule
def test_16_bit_parameters_take_the_float32_step_and_are_rounded_once(rule, dtype, state_dtype):
    start = start_of(make_state(75))
    narrow = State(start.param.to(dtype), start.grad.to(dtype), start.state.to(state_dtype or dtype))
    wide = State(*(tensor.to(torch.float32, copy=True) for tensor in vars(narrow).values()))
    dtypes = {"param_dtype": DTYPES[dtype], "state_dtype": DTYPES[narrow.state.dtype]}
    rule.run(wide)
    rule.run(narrow, **dtypes)
    assert torch.equal(narrow.param, wide.param.to(dtype))
    assert torch.equal(narrow.state, wide.state.to(narrow.state.dtype))


@settings(max_examples=100, deadline=None)
@given(lr=floats(1e-6, 0.1), beta1=floats(0, 0.99), beta2=floats(0, 0.999), weight_decay=decay)
def test_lion_is_the_formula_of_deepspeed(lr, beta1, beta2, weight_decay):
    ours = make_state(67)
    param, grad, exp_avg = (tensor.double() for tensor in vars(ours).values())
    blend = beta1 * exp_avg + (1 - beta1) * grad
    expected = State(
        (param * (1 - lr * weight_decay) - lr * torch.ones_like(blend).copysign(blend)).float(),
        ours.grad,
        (beta2 * exp_avg + (1 - beta2) * grad).float(),
    )
    options = _C.LionOptions(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    _C.lion_step(options, 1, buffers(ours), 1, ISAS[-1])
    assert_close(ours, expected)


def test_lion_moves_by_the_sign_bit_where_the_blend_is_zero():
    state = State(torch.zeros(2), torch.tensor([0.0, -0.0]), torch.tensor([0.0, -0.0]))
    RULES[0].run(state)
    assert state.param.tolist() == [-LION["lr"], LION["lr"]]


def test_first_sgd_step_reads_no_momentum():
    state = make_state(37)
    state.state.fill_(torch.nan)
    RULES[2].run(state, step=1)
    assert state.param.isfinite().all() and state.state.isfinite().all()


def test_sgd_without_momentum_needs_and_writes_no_state():
    state = make_state(37)
    before = state.clone()
    RULES[4].run(state)
    assert torch.equal(state.state, before.state)
    RULES[4].run(before, state=0)
    assert torch.equal(state.param, before.param)


@every_rule
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(rule, grad_dtype):
    for numel in NUMELS:
        start = start_of(make_state(numel, grad_dtype=grad_dtype))
        portable = rule.run(start.clone(), isa=_C.Isa.portable)
        for isa in ISAS:
            assert_same_bits(rule.run(start.clone(), isa=isa), portable)


@settings(max_examples=30, deadline=None)
@given(rule=st.sampled_from(RULES), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_any_cut_gives_the_same_bits(rule, cuts):
    whole, parts = start_of(make_state(300)), start_of(make_state(300))
    rule.run(whole)
    for begin, end in pairwise([0, *sorted(cuts), 300]):
        rule.run(parts[begin:end])
    assert_same_bits(parts, whole)


@every_rule
def test_any_number_of_threads_gives_the_same_bits(rule):
    start = start_of(make_state(2 * GRAIN + 17))
    assert_same_bits(rule.run(start.clone(), num_threads=3), rule.run(start.clone()))


@every_rule
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_one_pass_gives_the_bits_of_three(rule, grad_dtype, out_dtype):
    ours = start_of(make_state(75, grad_dtype=grad_dtype))
    theirs = replace(ours.clone(), grad=ours.grad.float().clone().mul_(0.3))
    out = torch.empty(75, dtype=out_dtype)
    rule.run(ours, grad_scale=0.3, param_out=out.data_ptr(), param_out_dtype=DTYPES[out_dtype])
    rule.run(theirs)
    assert_same_bits(replace(ours, grad=theirs.grad), theirs)
    assert torch.equal(out, theirs.param.to(out_dtype))


@every_rule
@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_split_parameters_take_the_same_step(rule, isa):
    whole = start_of(make_state(75))
    halves = whole.clone()
    param16, residual = torch.empty(75, dtype=torch.bfloat16), torch.empty(75, dtype=torch.int16)
    _C.split_encode(halves.param.data_ptr(), param16.data_ptr(), residual.data_ptr(), 75, 1)
    rule.run(halves, isa=isa, param=param16.data_ptr(), residual=residual.data_ptr())
    _C.split_decode(param16.data_ptr(), residual.data_ptr(), halves.param.data_ptr(), 75, 1)
    assert_same_bits(halves, rule.run(whole, isa=isa))


@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (0, {"beta1": 1.0}, "lion: beta1"),
        (0, {"weight_decay": -1.0}, "lion: weight_decay"),
        (1, {"eps": -1.0}, "adagrad: eps"),
        (1, {"lr": float("nan")}, "adagrad: lr"),
        (2, {"nesterov": True}, "sgd: nesterov"),
        (2, {"momentum": -0.5}, "sgd: momentum"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(index, changes, message):
    rule = replace(RULES[index], defaults=RULES[index].defaults | changes)
    with pytest.raises(ValueError, match=message):
        rule.run(make_state(4))


@pytest.mark.parametrize(
    "extra",
    [{"state": 0}, {"param": 0}, {"grad": 0}, {"numel": -1}, {"param_dtype": _C.Dtype.bfloat16}],
    ids=str,
)
@pytest.mark.parametrize("rule", RULES[:3], ids=lambda rule: rule.name)
def test_impossible_buffers_are_refused_before_anything_is_written(rule, extra):
    state = make_state(4)
    with pytest.raises(ValueError, match=r"null address|numel|no kernel for these dtypes"):
        rule.run(state, **extra)
    assert_same_bits(state, make_state(4))
