"""What a streamed sub-group keeps on storage for each weight, and how float32 values are read from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from offload import _C
from offload.swap.arena import ALIGNMENT
from offload.swap.sub_group import MASTER

FormatName = Literal["fp32", "split", "8bit"]

View = Callable[[str], torch.Tensor]
"""A chunk's part of the column of that name."""


@dataclass(frozen=True)
class Column:
    """One file of a sub-group: an element of `dtype` for every `block` weights."""

    name: str
    dtype: torch.dtype
    block: int = 1

    def numel(self, weights: int) -> int:
        return -(-weights // self.block)

    def nbytes(self, weights: int) -> int:
        return self.numel(weights) * self.dtype.itemsize

    @property
    def weights_per_file_block(self) -> int:
        return ALIGNMENT * self.block // self.dtype.itemsize


class StateFormat:
    """Every tensor as float32.

    `names` are the tensors that the optimizer knows, master weights first; `columns` lie on storage.
    """

    def __init__(self, state_names: Sequence[str]) -> None:
        self.names = (MASTER, *state_names)
        self.columns = tuple(column for name in self.names for column in self.columns_of(name))

    def columns_of(self, name: str) -> tuple[Column, ...]:
        return (Column(name, torch.float32),)

    def is_plain(self, name: str) -> bool:
        """Whether the tensor lies on storage as it is."""
        return self.columns_of(name) == (Column(name, torch.float32),)

    def decode(self, name: str, view: View, model: torch.Tensor | None, values: torch.Tensor) -> None:
        """Fill `values` (float32) from the columns, and for master weights from the model parameters."""
        values.copy_(view(name))

    def encode(self, name: str, view: View, model: torch.Tensor | None, values: torch.Tensor) -> None:
        """Fill the columns, and for master weights the model parameters, from `values` (float32)."""
        view(name).copy_(values)


class SplitFormat(StateFormat):
    """Master weights without the upper half, which the bfloat16 parameter is: exact, 2 bytes less.

    The parameter is the master weight rounded to nearest, ties away from zero; torch rounds ties to even.
    """

    def columns_of(self, name: str) -> tuple[Column, ...]:
        return (Column(MASTER, torch.int16),) if name == MASTER else super().columns_of(name)

    def decode(self, name: str, view: View, model: torch.Tensor | None, values: torch.Tensor) -> None:
        if name == MASTER:
            _convert(_C.split_decode, (_given(model), view(MASTER), values), values.numel())
        else:
            super().decode(name, view, model, values)

    def encode(self, name: str, view: View, model: torch.Tensor | None, values: torch.Tensor) -> None:
        if name == MASTER:
            _convert(_C.split_encode, (values, _given(model), view(MASTER)), values.numel())
        else:
            super().encode(name, view, model, values)


class EightBitFormat(SplitFormat):
    """Split master weights and moments of 8 bits with a scale per block, after Dettmers et al. 2021: lossy.

    "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861; 4.06 bytes per weight.
    """

    _CODES: ClassVar = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}

    def columns_of(self, name: str) -> tuple[Column, ...]:
        if name == MASTER:
            return super().columns_of(name)
        return Column(name, self._CODES[name]), Column(scale_of(name), torch.float32, _C.MOMENT_BLOCK)

    def decode(self, name: str, view: View, model: torch.Tensor | None, values: torch.Tensor) -> None:
        if name == MASTER:
            super().decode(name, view, model, values)
            return
        codes, scales = view(name), view(scale_of(name))
        _convert(_C.decode_8bit, (codes, scales, values), values.numel(), codes.dtype == torch.int8)

    def encode(self, name: str, view: View, model: torch.Tensor | None, values: torch.Tensor) -> None:
        if name == MASTER:
            super().encode(name, view, model, values)
            return
        codes, scales = view(name), view(scale_of(name))
        _convert(_C.encode_8bit, (values, codes, scales), values.numel(), codes.dtype == torch.int8)


def _convert(kernel: Callable[..., None], tensors: Sequence[torch.Tensor], *settings: int) -> None:
    kernel(*(tensor.data_ptr() for tensor in tensors), *settings, torch.get_num_threads())


def _given(model: torch.Tensor | None) -> torch.Tensor:
    if model is None:
        raise ValueError("master weights of this format need the model parameters")
    return model


def scale_of(name: str) -> str:
    """Name of the column with the scales of a moment's blocks."""
    return f"{name}.scale"


FORMATS: dict[FormatName, type[StateFormat]] = {
    "fp32": StateFormat,
    "split": SplitFormat,
    "8bit": EightBitFormat,
}
