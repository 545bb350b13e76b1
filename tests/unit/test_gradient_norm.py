"""The norm of plain memory: against torch in double, and against itself bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from adam_cases import DTYPES, GRAIN, ISAS
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _C

NUMELS = [1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 1000, GRAIN - 1, GRAIN, GRAIN + 1, 3 * GRAIN + 77]


def norm_of(tensor: torch.Tensor, num_threads: int = 1, isa=ISAS[-1]) -> tuple[float, bool]:
    return _C.gradient_norm(tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype], num_threads, isa)


def random(numel: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale).to(dtype)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_torch_in_double(dtype, numel):
    grad = random(numel, dtype)
    norm, finite = norm_of(grad, num_threads=2)
    assert finite
    assert norm == pytest.approx(grad.double().norm().item(), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(exponent=st.integers(-40, 36), numel=st.integers(1, 300))
def test_neither_small_nor_large_squares_get_lost(exponent, numel):
    grad = random(numel, torch.float32, 10.0**exponent)
    norm, finite = norm_of(grad)
    assert finite
    assert norm == pytest.approx(grad.double().norm().item(), rel=1e-12)


def test_largest_floats_do_not_overflow():
    grad = torch.full((5000,), torch.finfo(torch.float32).max)
    assert norm_of(grad) == (pytest.approx(grad.double().norm().item(), rel=1e-12), True)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_instruction_sets_give_the_same_bits(dtype, numel):
    grad = random(numel, dtype)
    results = {norm_of(grad, num_threads, isa) for num_threads in (1, 2, 5) for isa in ISAS}
    assert len(results) == 1


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_that_is_not_finite_is_noticed_wherever_it_lies(dtype, value, isa):
    grad = random(GRAIN + 50, dtype)
    for index in (0, 31, 32, GRAIN - 1, GRAIN, GRAIN + 49):
        spoilt = grad.clone()
        spoilt[index] = value
        norm, finite = norm_of(spoilt, 2, isa)
        assert not finite
        assert math.isnan(norm) if math.isnan(value) else norm == math.inf


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_address_needs_no_alignment(dtype, offset, isa):
    grad = random(101, dtype)
    raw = torch.empty(grad.nbytes + offset, dtype=torch.uint8)
    raw[offset:].copy_(grad.view(torch.uint8))
    assert _C.gradient_norm(raw.data_ptr() + offset, 101, DTYPES[dtype], 1, isa) == norm_of(grad)


def test_nothing_has_norm_zero_and_is_finite():
    assert _C.gradient_norm(0, 0, _C.Dtype.float32, 1) == (0.0, True)


@pytest.mark.parametrize(
    ("address", "numel", "num_threads", "message"),
    [(0, 4, 1, "null address"), (64, -1, 1, "numel"), (64, 4, 0, "num_threads")],
)
def test_impossible_arguments_are_refused(address, numel, num_threads, message):
    with pytest.raises(ValueError, match=message):
        _C.gradient_norm(address, numel, _C.Dtype.float32, num_threads)
