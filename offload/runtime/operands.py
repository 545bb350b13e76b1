"""The tensors that DeepSpeed's CPU optimizers hand to their operators."""

import torch

from offload.swap.dtypes import DTYPES


def check_operands(who: str, params: torch.Tensor, **others: torch.Tensor) -> None:
    """Refuse tensors that a kernel cannot work on in place, by name."""
    for name, tensor in {"params": params, **others}.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"{who}: {name} is on {tensor.device}; move it to the CPU")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(f"{who}: {name} is not contiguous; a copy would not receive the step")
        if tensor.numel() != params.numel():
            raise ValueError(f"{who}: {name} has {tensor.numel()} elements, params has {params.numel()}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{who}: {name} is {tensor.dtype}; float32, bfloat16 and float16 are supported")
