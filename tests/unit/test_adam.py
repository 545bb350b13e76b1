"""The Adam kernel on plain addresses: against torch.optim, and against itself bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from adam_cases import (
    COMBINATIONS,
    GRAIN,
    ISAS,
    NUMELS,
    Options,
    State,
    any_options,
    assert_same_bits,
    buffers,
    make_state,
    run_step,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _C


def torch_step(state: State, step: int, options: Options) -> None:
    """The same step by torch.optim; it cannot switch bias correction off, but after 1e9 steps that is 1."""
    kind = torch.optim.AdamW if options.decoupled_weight_decay else torch.optim.Adam
    param = torch.nn.Parameter(state.param)
    param.grad = state.grad
    betas = (options.beta1, options.beta2)
    optimizer = kind([param], options.lr, betas, options.eps, options.weight_decay, foreach=False)
    past = torch.tensor(float(step - 1) if options.bias_correction else 1e9)
    optimizer.state[param] = {"step": past, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    optimizer.step()


@settings(max_examples=200, deadline=None)
@given(
    options=any_options,
    step=st.integers(1, 100_000),
    seed=st.integers(0, 10_000),
    param_scale=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_step_equals_torch_optim_within_float32_rounding(options, step, seed, param_scale):
    ours = make_state(67, seed=seed)
    # Of the gradient's sign, so that adding the decay to the gradient loses no digits to cancellation.
    ours.param = ours.param.abs().copysign(ours.grad) * param_scale
    theirs, start = ours.clone(), ours.param.clone()
    run_step(ours, step, options)
    torch_step(theirs, step, options)
    way = (theirs.param - start).abs().max().item()
    torch.testing.assert_close(ours.param, theirs.param, rtol=2.5e-7, atol=4e-6 * way)
    torch.testing.assert_close(ours.exp_avg, theirs.exp_avg, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.exp_avg_sq, theirs.exp_avg_sq, rtol=1e-6, atol=1e-8)


def reference_step(state: State, step: int, options: Options, dtype: torch.dtype) -> State:
    """The formula, written down plainly and computed in `dtype`."""
    param, grad, exp_avg, exp_avg_sq = (tensor.to(dtype) for tensor in vars(state).values())
    if options.decoupled_weight_decay:
        param = param - options.lr * options.weight_decay * param
    else:
        grad = grad + options.weight_decay * param
    exp_avg = options.beta1 * exp_avg + (1 - options.beta1) * grad
    exp_avg_sq = options.beta2 * exp_avg_sq + (1 - options.beta2) * grad**2
    bias1 = 1 - options.beta1**step if options.bias_correction else 1.0
    bias2 = 1 - options.beta2**step if options.bias_correction else 1.0
    update = exp_avg / ((exp_avg_sq / bias2).sqrt() + options.eps)
    return State(param - options.lr / bias1 * update, state.grad, exp_avg, exp_avg_sq)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_dtype_is_the_exact_step_rounded_once(combination, bias_correction, decoupled):
    options = Options(decoupled_weight_decay=decoupled, bias_correction=bias_correction)
    state = make_state(1000, combination)
    expected = reference_step(state, 3, options, torch.float64)
    run_step(state, 3, options)
    for name, tensor in vars(state).items():
        exact = vars(expected)[name].double()
        rtol, subnormal = torch.finfo(tensor.dtype).eps, torch.finfo(tensor.dtype).smallest_normal
        torch.testing.assert_close(tensor.double(), exact, rtol=rtol, atol=1e-8 + rtol * subnormal, msg=name)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_instruction_set_gives_the_same_bits(combination, numel):
    for options in (Options(), Options(decoupled_weight_decay=False, bias_correction=False)):
        portable = run_step(make_state(numel, combination), 2, options, isa=_C.Isa.portable)
        for isa in ISAS:
            assert_same_bits(run_step(make_state(numel, combination), 2, options, isa=isa), portable)


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=6), isa=st.sampled_from(ISAS))
def test_any_cut_gives_the_same_bits(cuts, isa):
    whole = run_step(make_state(300), isa=isa)
    parts = make_state(300)
    edges = [0, *sorted(cuts), 300]
    for begin, end in pairwise(edges):
        run_step(parts[begin:end], isa=isa)
    assert_same_bits(parts, whole)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize("numel", [GRAIN - 1, GRAIN, GRAIN + 1, 5 * GRAIN + 17])
def test_any_number_of_threads_gives_the_same_bits(numel, num_threads):
    assert_same_bits(run_step(make_state(numel), num_threads=num_threads), run_step(make_state(numel)))


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("offset", [1, 2, 4, 12])
def test_addresses_need_no_alignment(offset, isa):
    aligned, numel = make_state(37), 37
    shifted = {name: torch.empty(numel * 4 + 16, dtype=torch.uint8) for name in vars(aligned)}
    shifted = {name: raw[offset : offset + numel * 4] for name, raw in shifted.items()}
    for name, tensor in vars(aligned).items():
        shifted[name].copy_(tensor.view(torch.uint8))
    addresses = {name: raw.data_ptr() for name, raw in shifted.items()}
    _C.adam_step(_C.AdamOptions(**vars(Options())), 1, buffers(aligned, **addresses), 1, isa)
    run_step(aligned, isa=isa)
    for name, tensor in vars(aligned).items():
        assert torch.equal(shifted[name], tensor.view(torch.uint8)), name


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
def test_nan_and_infinity_spread_as_the_formula_says(decoupled, isa):
    special = torch.tensor([0.0, 1.0, -1.0, 1e-40, 1e18, torch.inf, -torch.inf, torch.nan])
    state = State(*(value.contiguous() for value in torch.cartesian_prod(*[special] * 4).unbind(1)))
    options = Options(decoupled_weight_decay=decoupled)
    expected = reference_step(state, 2, options, torch.float32)
    run_step(state, 2, options, isa=isa)
    for name, tensor in vars(state).items():
        torch.testing.assert_close(
            tensor, vars(expected)[name], rtol=2e-6, atol=1e-7, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_values_are_read_and_rounded_as_in_torch(dtype, isa):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    state = State(every.clone(), torch.zeros_like(every), every.clone(), torch.ones_like(every))
    run_step(state, options=replace(Options(), lr=0.0), isa=isa)
    rounded = (every.float() * Options().beta1).to(dtype)
    torch.testing.assert_close(state.exp_avg, rounded, rtol=0, atol=0, equal_nan=True)
    finite = every.isfinite()
    assert torch.equal(state.param[finite], every[finite])


@pytest.mark.parametrize("num_threads", [1, 4])
def test_rollback_returns_to_the_state_before_the_step(num_threads):
    for options in (Options(), Options(decoupled_weight_decay=False), Options(bias_correction=False)):
        before = make_state(1000)
        state = run_step(before.clone(), 5, options)
        _C.adam_rollback(_C.AdamOptions(**vars(options)), 5, buffers(state), num_threads)
        for name, tensor in vars(state).items():
            torch.testing.assert_close(tensor, vars(before)[name], rtol=1e-5, atol=1e-7, msg=name)


def test_rollback_refuses_what_cannot_be_undone():
    with pytest.raises(ValueError, match="beta of 0"):
        _C.adam_rollback(_C.AdamOptions(**vars(Options(beta1=0.0))), 1, buffers(make_state(4)), 1)
    with pytest.raises(ValueError, match="float32"):
        _C.adam_rollback(_C.AdamOptions(**vars(Options())), 1, buffers(make_state(4, COMBINATIONS[4])), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": float("nan")}, "lr"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"beta2": 1 - 1e-12}, "beta2"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run_step(make_state(4), options=replace(Options(), **options))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"numel": -1}, "numel"),
        ({"param": 0}, "null address"),
        ({"exp_avg_sq": 0}, "null address"),
        ({"grad_dtype": _C.Dtype.bfloat16, "param_dtype": _C.Dtype.float16}, "dtypes"),
        ({"state_dtype": _C.Dtype.bfloat16}, "dtypes"),
    ],
)
def test_impossible_buffers_are_refused_before_anything_is_written(overrides, message):
    state = make_state(4)
    with pytest.raises(ValueError, match=message):
        _C.adam_step(_C.AdamOptions(**vars(Options())), 1, buffers(state, **overrides), 1, ISAS[-1])
    assert_same_bits(state, make_state(4))


@pytest.mark.parametrize(("step", "num_threads", "message"), [(0, 1, "step"), (1, 0, "num_threads")])
def test_counts_below_one_are_refused(step, num_threads, message):
    with pytest.raises(ValueError, match=message):
        run_step(make_state(4), step, num_threads=num_threads)
