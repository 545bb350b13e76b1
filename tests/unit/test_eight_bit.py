"""Adam with 8-bit moments: the codes, and the step against one with float32 moments."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from adam_cases import DTYPES, GRAIN, ISAS, Options, State, any_options, buffers, make_state
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _C

BLOCK = _C.MOMENT_BLOCK
NUMELS = [0, 1, 15, 16, 17, 127, 128, 129, 300, 1000]


@dataclass
class Moment:
    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def is_signed(self) -> bool:
        return self.codes.dtype == torch.int8


def empty_moment(numel: int, is_signed: bool) -> Moment:
    codes = torch.zeros(numel, dtype=torch.int8 if is_signed else torch.uint8)
    return Moment(codes, torch.zeros(math.ceil(numel / BLOCK)))


def encode(values: torch.Tensor, is_signed: bool, num_threads: int = 1, isa=ISAS[-1]) -> Moment:
    moment = empty_moment(values.numel(), is_signed)
    addresses = (values.data_ptr(), moment.codes.data_ptr(), moment.scales.data_ptr())
    _C.encode_8bit(*addresses, values.numel(), is_signed, num_threads, isa)
    return moment


def decode(moment: Moment, num_threads: int = 1, isa=ISAS[-1]) -> torch.Tensor:
    values = torch.empty(moment.codes.numel())
    addresses = (moment.codes.data_ptr(), moment.scales.data_ptr(), values.data_ptr())
    _C.decode_8bit(*addresses, values.numel(), moment.is_signed, num_threads, isa)
    return values


def assert_same(left: Moment, right: Moment) -> None:
    assert torch.equal(left.codes, right.codes)
    assert torch.equal(left.scales.view(torch.int32), right.scales.view(torch.int32))


def values_of(numel: int, is_signed: bool, seed: int = 0) -> torch.Tensor:
    """Magnitudes over six decades."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10 ** (-6 * torch.rand(numel, generator=generator))
    signs = torch.randn(numel, generator=generator).sign() if is_signed else 1.0
    return magnitudes * signs


signedness = pytest.mark.parametrize("is_signed", [True, False], ids=["signed", "unsigned"])


@signedness
def test_a_code_is_the_fourth_root_of_its_share_of_the_scale(is_signed):
    levels = 127 if is_signed else 255
    codes = torch.arange(-levels if is_signed else 0, levels + 1)
    for start in range(0, codes.numel(), BLOCK - 1):
        part = torch.cat([codes[start : start + BLOCK - 1], torch.tensor([levels])])
        exact = (part.double() / levels) ** 4 * part.sign() * 3.5
        moment = encode(exact.float(), is_signed)
        assert moment.codes.tolist() == part.tolist()
        torch.testing.assert_close(decode(moment).double(), exact, rtol=1e-6, atol=0)


@signedness
def test_rounding_to_nearest_misses_by_half_a_gap_at_most(is_signed):
    values, levels = values_of(10 * BLOCK, is_signed), 127 if is_signed else 255
    moment = encode(values, is_signed)
    code = moment.codes.double().abs()
    scale = moment.scales.repeat_interleave(BLOCK).double()
    error = (decode(moment).double() - values.double()).abs()
    gap = (((code + 1) ** 4 - code**4) / levels**4 * scale)[error > 0]
    # A variance above 0 gets code 1 however small it is.
    raised = (code == 1)[error > 0] if not is_signed else torch.tensor(False)
    assert ((error[error > 0] <= gap * 0.5001) | raised).all()


@signedness
def test_what_was_decoded_encodes_to_the_same_codes(is_signed):
    moment = encode(values_of(10 * BLOCK, is_signed), is_signed)
    assert torch.equal(encode(decode(moment), is_signed).codes, moment.codes)


@signedness
def test_the_largest_element_keeps_its_value(is_signed):
    values = values_of(BLOCK, is_signed)
    moment = encode(values, is_signed)
    largest = values.abs().argmax()
    assert moment.scales[0] == values.abs().max()
    torch.testing.assert_close(decode(moment)[largest], values[largest], rtol=2.5e-7, atol=0)


def test_no_variance_above_zero_becomes_zero():
    values = torch.full((BLOCK,), 1e-20)
    values[3], values[5] = 1.0, 0.0
    decoded = decode(encode(values, is_signed=False))
    assert decoded[5] == 0
    assert (decoded[torch.arange(BLOCK) != 5] > 0).all()


@signedness
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_a_block_that_is_not_finite_reads_as_nan_and_spoils_no_other(isa, value, is_signed):
    values = values_of(3 * BLOCK, is_signed)
    clean = decode(encode(values, is_signed))
    values[BLOCK + 7] = value
    decoded = decode(encode(values, is_signed, isa=isa), isa=isa)
    assert decoded[BLOCK : 2 * BLOCK].isnan().all()
    others = torch.arange(3 * BLOCK) // BLOCK != 1
    assert torch.equal(decoded[others], clean[others])


@signedness
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-37, 1e30])
def test_extreme_scales_come_back_or_are_zero(scale, is_signed):
    values = values_of(BLOCK, is_signed) * scale
    expected = values if scale > 1e-38 else torch.zeros(BLOCK)
    torch.testing.assert_close(decode(encode(values, is_signed)), expected, rtol=0.15, atol=scale * 2e-5)


@signedness
@pytest.mark.parametrize("numel", [*NUMELS, GRAIN + 130])
def test_conversions_give_the_same_bits_on_every_instruction_set_and_thread(numel, is_signed):
    values = values_of(numel, is_signed)
    moment = encode(values, is_signed, isa=_C.Isa.portable)
    back = decode(moment, isa=_C.Isa.portable)
    for isa in ISAS:
        assert_same(encode(values, is_signed, 2, isa), moment)
        assert torch.equal(decode(moment, 2, isa), back)


@dataclass
class Small:
    """The state of a step in the 8-bit format."""

    param16: torch.Tensor
    residual: torch.Tensor
    grad: torch.Tensor
    exp_avg: Moment
    exp_avg_sq: Moment

    def master(self) -> torch.Tensor:
        master = torch.empty(self.param16.numel())
        addresses = (self.param16.data_ptr(), self.residual.data_ptr(), master.data_ptr())
        _C.split_decode(*addresses, master.numel(), 1)
        return master

    def tensors(self) -> list[torch.Tensor]:
        moments = (self.exp_avg, self.exp_avg_sq)
        return [self.param16, self.residual, *(t for moment in moments for t in vars(moment).values())]

    def part(self, begin: int, end: int) -> Small:
        whole, blocks = slice(begin, end), slice(begin // BLOCK, math.ceil(end / BLOCK))
        moments = (self.exp_avg, self.exp_avg_sq)
        cut = [Moment(moment.codes[whole], moment.scales[blocks]) for moment in moments]
        return Small(self.param16[whole], self.residual[whole], self.grad[whole], *cut)


def small_of(state: State) -> Small:
    numel = state.param.numel()
    param16, residual = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    _C.split_encode(state.param.data_ptr(), param16.data_ptr(), residual.data_ptr(), numel, 1)
    exp_avg, exp_avg_sq = encode(state.exp_avg, True), encode(state.exp_avg_sq, False)
    return Small(param16, residual, state.grad.clone(), exp_avg, exp_avg_sq)


DEFAULTS = Options()


def run_small(
    small: Small, step: int = 2, options=DEFAULTS, scale: float = 1.0, num_threads: int = 1, isa=ISAS[-1]
) -> Small:
    fields = {name: getattr(small, name).data_ptr() for name in ("param16", "residual", "grad")}
    for name in ("exp_avg", "exp_avg_sq"):
        moment = getattr(small, name)
        fields |= {f"{name}8": moment.codes.data_ptr(), f"{name}8_scale": moment.scales.data_ptr()}
    numel, grad_dtype = small.param16.numel(), DTYPES[small.grad.dtype]
    at = _C.EightBitBuffers(**fields, numel=numel, grad_dtype=grad_dtype, grad_scale=scale)
    _C.adam_step_8bit(_C.AdamOptions(**vars(options)), step, at, num_threads, isa)
    return small


def assert_same_small(left: Small, right: Small) -> None:
    for ours, theirs in zip(left.tensors(), right.tensors(), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(options=any_options, step=st.integers(1, 1000), numel=st.integers(0, 400), isa=st.sampled_from(ISAS))
def test_the_parameter_takes_the_step_of_the_decoded_moments(options, step, numel, isa):
    state = make_state(numel, (torch.float32, torch.bfloat16, torch.float32), seed=step)
    small = small_of(state)
    state.exp_avg, state.exp_avg_sq = decode(small.exp_avg), decode(small.exp_avg_sq)
    _C.adam_step(_C.AdamOptions(**vars(options)), step, buffers(state, grad_scale=0.3), 1, isa)
    run_small(small, step, options, 0.3, isa=isa)
    assert torch.equal(small.master(), state.param)
    blocks = state.exp_avg.split(BLOCK) if numel else ()
    largest = [block.abs().max() for block in blocks]
    assert small.exp_avg.scales.tolist() == [value.item() for value in largest]


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(grad_dtype, numel):
    state = make_state(numel, (torch.float32, grad_dtype, torch.float32))
    portable = run_small(small_of(state), isa=_C.Isa.portable)
    for isa in ISAS:
        assert_same_small(run_small(small_of(state), isa=isa), portable)


def test_cuts_at_blocks_and_threads_give_the_same_bits():
    state = make_state(2 * GRAIN + 200)
    whole, parts = run_small(small_of(state)), small_of(state)
    for begin, end in [(0, BLOCK), (BLOCK, GRAIN + BLOCK), (GRAIN + BLOCK, 2 * GRAIN + 200)]:
        run_small(parts.part(begin, end), num_threads=2)
    assert_same_small(parts, whole)


def test_rounding_at_random_keeps_the_expected_variance_of_slow_moments():
    """beta2 moves a variance by a thousandth a step: to nearest, it would never leave its code."""
    numel, steps = 64 * BLOCK, 400
    state = make_state(numel)
    state.exp_avg_sq = torch.full((numel,), 1e-4)
    # Not all the same: equal values would be rounded the same way.
    state.grad = 2e-2 * (1 + 0.01 * state.grad)
    state.grad[::BLOCK] = 0.3
    state.exp_avg_sq[::BLOCK] = 0.09
    small = small_of(state)
    for step in range(1, steps + 1):
        run_small(small, step)
    kept = Options().beta2 ** steps
    expected = kept * decode(small_of(state).exp_avg_sq)[1] + (1 - kept) * 4e-4
    ours = decode(small.exp_avg_sq)[torch.arange(numel) % BLOCK != 0]
    assert ours.mean().item() == pytest.approx(expected.item(), rel=0.03)


@pytest.mark.parametrize("missing", ["param16", "residual", "grad", "exp_avg8", "exp_avg_sq8_scale"])
def test_a_missing_buffer_is_refused(missing):
    names = ("param16", "residual", "grad", "exp_avg8", "exp_avg8_scale", "exp_avg_sq8", "exp_avg_sq8_scale")
    fields = {name: 64 * (name != missing) for name in names}
    at = _C.EightBitBuffers(**fields, numel=4, grad_dtype=_C.Dtype.float32)
    with pytest.raises(ValueError, match="null address"):
        _C.adam_step_8bit(_C.AdamOptions(**vars(Options())), 1, at, 1, ISAS[-1])


def test_a_conversion_without_memory_is_refused():
    with pytest.raises(ValueError, match="null address"):
        _C.encode_8bit(0, 64, 64, 4, True, 1)
    with pytest.raises(ValueError, match="num_threads"):
        _C.decode_8bit(64, 64, 64, 4, True, 0)


def test_the_largest_element_of_a_block_keeps_its_code_whatever_the_random_number():
    """With one less, a saved block would come back with another scale."""
    numel = BLOCK * 20_000
    options = _C.AdamOptions(
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        decoupled_weight_decay=True,
        bias_correction=True,
    )
    model, residual = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.int16)
    moments = {name: empty_moment(numel, name == "exp_avg") for name in ("exp_avg", "exp_avg_sq")}
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 41):
        grad = torch.rand(numel, generator=generator).to(torch.bfloat16)
        chunk = _C.EightBitBuffers(
            param16=model.data_ptr(),
            residual=residual.data_ptr(),
            grad=grad.data_ptr(),
            grad_dtype=_C.Dtype.bfloat16,
            exp_avg8=moments["exp_avg"].codes.data_ptr(),
            exp_avg8_scale=moments["exp_avg"].scales.data_ptr(),
            exp_avg_sq8=moments["exp_avg_sq"].codes.data_ptr(),
            exp_avg_sq8_scale=moments["exp_avg_sq"].scales.data_ptr(),
            numel=numel,
        )
        _C.adam_step_8bit(options, step, chunk, 2, ISAS[-1])
        for name, moment in moments.items():
            largest = moment.codes.view(-1, BLOCK).abs() if moment.is_signed else moment.codes.view(-1, BLOCK)
            assert torch.all(largest.amax(1) == (127 if moment.is_signed else 255)), (name, step)
