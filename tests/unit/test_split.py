"""The split format: a float32 weight as a bfloat16 parameter and a residual that gives every bit back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adam_cases import (
    DTYPES,
    GRAIN,
    ISAS,
    NUMELS,
    Options,
    State,
    any_options,
    assert_same_bits,
    buffers,
    make_state,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _C

BOUNDARIES = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=np.uint32)
"""Lower halves at which rounding, its tie, or the residual's sign changes."""


def encode(bits: np.ndarray, num_threads: int = 1, isa=ISAS[-1]) -> tuple[np.ndarray, np.ndarray]:
    param16, residual = np.empty(bits.size, np.uint16), np.empty(bits.size, np.int16)
    addresses = (bits.ctypes.data, param16.ctypes.data, residual.ctypes.data)
    _C.split_encode(*addresses, bits.size, num_threads, isa)
    return param16, residual


def decode(param16: np.ndarray, residual: np.ndarray, num_threads: int = 1, isa=ISAS[-1]) -> np.ndarray:
    bits = np.empty(param16.size, np.uint32)
    addresses = (param16.ctypes.data, residual.ctypes.data, bits.ctypes.data)
    _C.split_decode(*addresses, bits.size, num_threads, isa)
    return bits


def assert_exact(bits: np.ndarray, num_threads: int = 1, isa=ISAS[-1]) -> None:
    """Rounding away from zero at a tie, and every bit back; of a NaN only that it is one, and its sign."""
    param16, residual = encode(bits, num_threads, isa)
    back = decode(param16, residual, num_threads, isa)
    rounded = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    if (bits[-1] >> np.uint32(23)) & 0xFF == 0xFF or bits.size < 1 << 20:
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000
        quiet = bits >> np.uint32(31) << np.uint32(31) | np.uint32(0x7FC00000)
        rounded = np.where(is_nan, quiet >> np.uint32(16), rounded).astype(np.uint16)
        bits = np.where(is_nan, quiet, bits)
        assert not residual[is_nan].any()
    assert np.array_equal(param16, rounded)
    assert np.array_equal(back, bits)


@pytest.mark.slow
def test_all_float32_bit_patterns_come_back_exactly():
    chunk = np.arange(1 << 22, dtype=np.uint32)
    for start in range(0, 1 << 32, chunk.size):
        assert_exact(chunk + np.uint32(start), num_threads=2)


@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_all_parameters_with_every_boundary_come_back_exactly(isa):
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    for lower in BOUNDARIES:
        assert_exact(upper | lower, isa=isa)


@pytest.mark.parametrize("isa", ISAS, ids=str)
@pytest.mark.parametrize("upper", [0x0000, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x8000, 0xBF80, 0xFF7F, 0xFFFF])
def test_all_residuals_of_a_parameter_come_back_exactly(upper, isa):
    assert_exact(np.arange(1 << 16, dtype=np.uint32) | np.uint32(upper << 16), isa=isa)


def test_a_tie_rounds_away_from_zero():
    weights = np.array([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8], np.float32)
    param16, residual = encode(weights.view(np.uint32))
    as_float = (param16.astype(np.uint32) << 16).view(np.float32)
    assert as_float.tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6]
    assert residual.tolist() == [-(1 << 15)] * 3


def test_all_but_ties_round_as_torch_does():
    bits = np.random.default_rng(0).integers(0, 0x7F800000, 100_000, dtype=np.uint32)
    bits = bits[(bits & 0xFFFF) != 0x8000]
    theirs = torch.from_numpy(bits.view(np.float32)).to(torch.bfloat16).view(torch.int16)
    assert np.array_equal(encode(bits)[0].view(np.int16), theirs.numpy())


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("numel", [*NUMELS, GRAIN + 1, 3 * GRAIN + 5])
def test_any_size_and_number_of_threads(numel, num_threads):
    bits = np.random.default_rng(numel).integers(0, 1 << 32, numel, dtype=np.uint32)
    for isa in ISAS:
        ours, plain = encode(bits, num_threads, isa), encode(bits, 1, _C.Isa.portable)
        assert all(map(np.array_equal, ours, plain))
        assert np.array_equal(decode(*ours, num_threads, isa), decode(*plain, 1, _C.Isa.portable))


def split_step(state: State, options: Options, step: int, scale: float, num_threads: int, isa) -> None:
    param16, residual = encode(state.param.numpy().view(np.uint32))
    fields = {name: tensor.data_ptr() for name, tensor in vars(state).items() if name != "param"}
    fields |= {"param16": param16.ctypes.data, "residual": residual.ctypes.data}
    fields |= {"numel": state.param.numel(), "grad_dtype": DTYPES[state.grad.dtype], "grad_scale": scale}
    split = _C.SplitBuffers(**fields)
    _C.adam_step_split(_C.AdamOptions(**vars(options)), step, split, num_threads, isa)
    state.param.copy_(torch.from_numpy(decode(param16, residual).view(np.float32)))


@settings(max_examples=60, deadline=None)
@given(
    options=any_options,
    step=st.integers(1, 1000),
    numel=st.integers(0, 150),
    grad_dtype=st.sampled_from(list(DTYPES)),
    isa=st.sampled_from(ISAS),
)
def test_a_step_in_the_split_format_gives_the_bits_of_a_step_in_float32(
    options, step, numel, grad_dtype, isa
):
    split = make_state(numel, (torch.float32, grad_dtype, torch.float32), seed=step)
    whole = split.clone()
    split_step(split, options, step, 0.3, 1, isa)
    _C.adam_step(_C.AdamOptions(**vars(options)), step, buffers(whole, grad_scale=0.3), 1, isa)
    assert_same_bits(split, whole)


@pytest.mark.parametrize("numel", [GRAIN + 1, 2 * GRAIN + 17])
def test_threads_share_a_split_step(numel):
    shared, alone = make_state(numel), make_state(numel)
    split_step(shared, Options(), 3, 1.0, 3, ISAS[-1])
    split_step(alone, Options(), 3, 1.0, 1, ISAS[-1])
    assert_same_bits(shared, alone)


@pytest.mark.parametrize("missing", ["param16", "residual", "grad", "exp_avg", "exp_avg_sq"])
def test_a_missing_buffer_is_refused(missing):
    names = ("param16", "residual", "grad", "exp_avg", "exp_avg_sq")
    fields = {name: 64 * (name != missing) for name in names}
    split = _C.SplitBuffers(**fields, numel=4, grad_dtype=_C.Dtype.float32)
    with pytest.raises(ValueError, match="null address"):
        _C.adam_step_split(_C.AdamOptions(**vars(Options())), 1, split, 1, ISAS[-1])
