"""Scaling the gradient and copying the parameter out within the step, against passes of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from adam_cases import DTYPES, GRAIN, ISAS, NUMELS, Options, State, assert_same_bits, buffers, make_state
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _C

GRAD_DTYPES = list(DTYPES)
OUT_DTYPES = [None, *DTYPES]
GUARD = 7
"""Elements behind a copied parameter that no kernel may touch."""


def fused_step(state: State, scale: float, out: torch.Tensor | None, num_threads: int = 1, isa=ISAS[-1]):
    extra = {} if out is None else {"param_out": out.data_ptr(), "param_out_dtype": DTYPES[out.dtype]}
    options = _C.AdamOptions(**vars(Options()))
    _C.adam_step(options, 3, buffers(state, grad_scale=scale, **extra), num_threads, isa)


def separate_passes(state: State, scale: float, out: torch.Tensor | None) -> None:
    scaled = replace(state, grad=state.grad.float().clone().mul_(scale))
    _C.adam_step(_C.AdamOptions(**vars(Options())), 3, buffers(scaled), 1, ISAS[-1])
    if out is not None:
        out[: state.param.numel()].copy_(state.param)


def empty_out(dtype: torch.dtype | None, numel: int) -> torch.Tensor | None:
    return None if dtype is None else torch.full((numel + GUARD,), 3.0, dtype=dtype)


def assert_same_out(left: torch.Tensor | None, right: torch.Tensor | None) -> None:
    if left is not None and right is not None:
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES, ids=str)
def test_one_pass_gives_the_bits_of_three(grad_dtype, out_dtype, isa):
    for numel in NUMELS:
        combination = (torch.float32, grad_dtype, torch.float32)
        ours, theirs = make_state(numel, combination), make_state(numel, combination)
        our_out, their_out = empty_out(out_dtype, numel), empty_out(out_dtype, numel)
        fused_step(ours, 0.3, our_out, isa=isa)
        separate_passes(theirs, 0.3, their_out)
        assert_same_bits(ours, theirs)
        assert_same_out(our_out, their_out)


@settings(max_examples=60, deadline=None)
@given(
    scale=st.floats(1e-6, 1e6),
    grad_dtype=st.sampled_from(GRAD_DTYPES),
    out_dtype=st.sampled_from(OUT_DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_scale_gives_the_bits_of_a_separate_multiplication(scale, grad_dtype, out_dtype, seed):
    ours = make_state(70, (torch.float32, grad_dtype, torch.float32), seed)
    theirs = ours.clone()
    our_out, their_out = empty_out(out_dtype, 70), empty_out(out_dtype, 70)
    fused_step(ours, scale, our_out)
    separate_passes(theirs, scale, their_out)
    assert_same_bits(ours, theirs)
    assert_same_out(our_out, their_out)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_share_the_copy_too(num_threads):
    numel = 3 * GRAIN + 5
    combination = (torch.float32, torch.bfloat16, torch.float32)
    ours, theirs = make_state(numel, combination), make_state(numel, combination)
    our_out, their_out = empty_out(torch.bfloat16, numel), empty_out(torch.bfloat16, numel)
    fused_step(ours, 0.125, our_out, num_threads)
    separate_passes(theirs, 0.125, their_out)
    assert_same_bits(ours, theirs)
    assert_same_out(our_out, their_out)


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_copy_rounds_every_pattern_as_torch_does(dtype, isa):
    """Each 16-bit value as a float32, its neighbours, and the ties between it and the next."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    param = (upper[:, None] | lower).flatten().to(torch.int32).view(torch.float32).contiguous()
    zeros = torch.zeros_like(param)
    state = State(param, zeros, zeros.clone(), torch.ones_like(param))
    out = torch.empty_like(param, dtype=dtype)
    options = _C.AdamOptions(**vars(Options(lr=0.0)))
    extra = {"param_out": out.data_ptr(), "param_out_dtype": DTYPES[dtype]}
    _C.adam_step(options, 1, buffers(state, **extra), 1, isa)
    # torch writes this NaN or that one, as its vector width has it; a NaN stays a NaN here.
    torch.testing.assert_close(out, param.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[~out.isnan()], param.signbit()[~param.isnan()])


@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_addresses_of_copy_and_gradient_need_no_alignment(isa):
    numel, combination = 100, (torch.float32, torch.bfloat16, torch.float32)
    ours, theirs = make_state(numel, combination), make_state(numel, combination)
    grad, out = (torch.empty(2 * numel + 1, dtype=torch.uint8) for _ in range(2))
    grad[1:].copy_(ours.grad.view(torch.uint8))
    extra = {"param_out": out.data_ptr() + 1, "param_out_dtype": _C.Dtype.bfloat16}
    extra["grad"] = grad.data_ptr() + 1
    _C.adam_step(_C.AdamOptions(**vars(Options())), 3, buffers(ours, **extra), 1, isa)
    expected = torch.empty(numel, dtype=torch.bfloat16)
    separate_passes(theirs, 1.0, expected)
    assert torch.equal(out[1:], expected.view(torch.uint8))


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(scale):
    with pytest.raises(ValueError, match="grad_scale"):
        fused_step(make_state(4), scale, None)


def test_a_copy_of_16_bit_parameters_is_refused():
    state = make_state(4, (torch.bfloat16, torch.bfloat16, torch.float32))
    with pytest.raises(ValueError, match="param_out"):
        fused_step(state, 1.0, torch.empty(4))


def test_rollback_scales_the_gradient_as_the_step_did():
    before = make_state(100)
    state = before.clone()
    fused_step(state, 0.25, None)
    _C.adam_rollback(_C.AdamOptions(**vars(Options())), 3, buffers(state, grad_scale=0.25), 1)
    torch.testing.assert_close(state.param, before.param, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(state.exp_avg, before.exp_avg, rtol=1e-5, atol=1e-7)
