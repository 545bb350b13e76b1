"""Which tensors may be moved: plain bytes in CPU memory, one after the other."""

import torch


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of `tensor` to read from and write to; ValueError names what stands in the way.

    An alias, because whoever owns the tensor may give it another storage while its bytes are in flight.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"a {tensor.layout} tensor has no single run of bytes: move its dense parts")
    if tensor.device.type != "cpu":
        raise ValueError(f"tensor is on {tensor.device}: copy it to a CPU tensor first")
    if not tensor.is_contiguous():
        raise ValueError(f"tensor of strides {tuple(tensor.stride())} is not contiguous: use .contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("tensor is a lazy conjugate or negative: use .resolve_conj().resolve_neg()")
    return tensor.detach()
