"""Sums of squares of plain memory: against torch in double, and against themselves bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from adam_cases import DTYPES, ISAS
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _C

GRAIN = 1 << 15
NUMELS = [1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 1000, GRAIN - 1, GRAIN, GRAIN + 1, 3 * GRAIN + 77]


def squares(tensor: torch.Tensor, num_threads: int = 1, isa=ISAS[-1], before: float = 0.0) -> float:
    return _C.sum_of_squares(
        tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype], num_threads, isa, before
    )


def random(numel: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale).to(dtype)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_torch_in_double(dtype, numel):
    grad = random(numel, dtype)
    assert squares(grad, num_threads=2) == pytest.approx(grad.double().square().sum().item(), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(exponent=st.integers(-40, 36), numel=st.integers(1, 300))
def test_neither_small_nor_large_squares_get_lost(exponent, numel):
    grad = random(numel, torch.float32, 10.0**exponent)
    assert squares(grad) == pytest.approx(grad.double().square().sum().item(), rel=1e-12)


def test_largest_floats_do_not_overflow():
    grad = torch.full((5000,), torch.finfo(torch.float32).max)
    assert squares(grad) == pytest.approx(grad.double().square().sum().item(), rel=1e-12)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_instruction_sets_give_the_same_bits(dtype, numel):
    grad = random(numel, dtype)
    results = {squares(grad, num_threads, isa) for num_threads in (1, 2, 5) for isa in ISAS}
    assert len(results) == 1


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_that_is_not_finite_is_noticed_wherever_it_lies(dtype, value, isa):
    grad = random(GRAIN + 50, dtype)
    for index in (0, 31, 32, GRAIN - 1, GRAIN, GRAIN + 49):
        spoilt = grad.clone()
        spoilt[index] = value
        total = squares(spoilt, 2, isa)
        assert math.isnan(total) if math.isnan(value) else total == math.inf


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_address_needs_no_alignment(dtype, offset, isa):
    grad = random(101, dtype)
    raw = torch.empty(grad.nbytes + offset, dtype=torch.uint8)
    raw[offset:].copy_(grad.view(torch.uint8))
    assert _C.sum_of_squares(raw.data_ptr() + offset, 101, DTYPES[dtype], 1, isa) == squares(grad)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), max_size=3))
def test_a_sum_goes_on_where_the_last_call_left_it(cuts):
    grad = random(6 * GRAIN + 77, torch.bfloat16)
    total, start = 0.0, 0
    for end in [*sorted({cut * GRAIN for cut in cuts}), grad.numel()]:
        total = squares(grad[start:end], 2, before=total)
        start = end
    assert total == squares(grad)


def test_nothing_adds_nothing():
    assert _C.sum_of_squares(0, 0, _C.Dtype.float32, 1) == 0.0


@pytest.mark.parametrize(
    ("address", "numel", "num_threads", "message"),
    [(0, 4, 1, "null address"), (64, -1, 1, "numel"), (64, 4, 0, "num_threads")],
)
def test_impossible_arguments_are_refused(address, numel, num_threads, message):
    with pytest.raises(ValueError, match=message):
        _C.sum_of_squares(address, numel, _C.Dtype.float32, num_threads)
