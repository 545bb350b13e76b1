"""What the tests of the Adam kernels share: states of every dtype, options, and the call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from offload import _C

DTYPES = {torch.float32: _C.Dtype.float32, torch.bfloat16: _C.Dtype.bfloat16, torch.float16: _C.Dtype.float16}
COMBINATIONS = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float32, torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float32),
    (torch.float16, torch.float16, torch.float16),
]
ISAS = _C.supported_isas()
NUMELS = [0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 1000]
GRAIN = 1 << 18
"""Elements per piece of work; larger tensors are shared among threads."""


def float32(value: float) -> float:
    return float(np.float32(value))


@dataclass(frozen=True)
class Options:
    """Hyper-parameters; the kernel takes float32, so the values here are exact in it."""

    lr: float = float32(1e-3)
    beta1: float = float32(0.9)
    beta2: float = float32(0.999)
    eps: float = float32(1e-8)
    weight_decay: float = float32(0.01)
    decoupled_weight_decay: bool = True
    bias_correction: bool = True


@dataclass
class State:
    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def clone(self) -> State:
        return State(*(tensor.clone() for tensor in vars(self).values()))

    def __getitem__(self, part: slice) -> State:
        return State(*(tensor[part] for tensor in vars(self).values()))


def make_state(numel: int, combination=COMBINATIONS[0], seed: int = 0) -> State:
    """Random values; gradients and variances keep away from 0, by which Adam divides."""
    param_dtype, grad_dtype, state_dtype = combination
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(numel, generator=generator) for _ in range(4)]
    values[1] += 0.3 * values[1].sign()
    return State(
        values[0].to(param_dtype),
        (values[1] * 0.1).to(grad_dtype),
        (values[2] * 0.1).to(state_dtype),
        (values[3].square() * 0.01 + 0.001).to(state_dtype),
    )


def buffers(state: State, **overrides):
    fields = {name: tensor.data_ptr() for name, tensor in vars(state).items()}
    fields |= {
        "numel": state.param.numel(),
        "param_dtype": DTYPES[state.param.dtype],
        "grad_dtype": DTYPES[state.grad.dtype],
        "state_dtype": DTYPES[state.exp_avg.dtype],
    }
    return _C.AdamBuffers(**(fields | overrides))


def run_step(state: State, step: int = 1, options: Options = Options(), num_threads: int = 1, isa=ISAS[-1]):
    _C.adam_step(_C.AdamOptions(**vars(options)), step, buffers(state), num_threads, isa)
    return state


def assert_same_bits(left: State, right: State) -> None:
    for name, tensor in vars(left).items():
        assert torch.equal(tensor.view(torch.uint8), vars(right)[name].view(torch.uint8)), name


def floats(low: float, high: float):
    return st.floats(float32(low), float32(high), width=32, allow_subnormal=False)


any_options = st.builds(
    Options,
    lr=st.just(0.0) | floats(1e-7, 0.1),
    beta1=floats(0, 0.99),
    beta2=floats(0, 0.9999),
    eps=floats(1e-10, 1e-3),
    weight_decay=st.just(0.0) | floats(1e-5, 0.3),
    decoupled_weight_decay=st.booleans(),
    bias_correction=st.booleans(),
)
