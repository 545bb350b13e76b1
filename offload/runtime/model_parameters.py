"""The model parameters beside a streamed sub-group, wherever each of them lies."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from offload.io import Ticket
from offload.swap.chunk import Chunk
from offload.swap.slot import Slot
from offload.swap.stats import METER

if TYPE_CHECKING:
    from offload.runtime.streamed_zero3 import StreamedZeroOptimizer

Piece = tuple[Any, int, int, int]
"""A parameter that overlaps a chunk: its first and last element there, and how many come before it."""


class ModelParameters:
    """Chunk by chunk: on the accelerator or the CPU in one piece, or each in memory or on storage."""

    def __init__(self, zero: "StreamedZeroOptimizer") -> None:
        self._zero = zero

    def read(self, chunk: Chunk, slot: Slot) -> Sequence[tuple[str, Ticket]]:
        """Start reading those on storage into the slot."""
        if self._flat(chunk) is not None:
            return []
        out = slot.out_view(self._zero.dtype)
        transfers = []
        for param, first, last, skipped in self.pieces(chunk):
            if not param.nvme_swapper.on_storage(param):
                continue
            extent = param.nvme_swapper.get_path(param)
            values = out[first:last]
            offset = extent.offset + skipped * values.element_size()
            ticket = self._zero.optimizer_swapper.aio_handle.read(values, extent.path, offset)
            METER.read("parameters", values.nbytes)
            transfers.append((f"reading {extent.key}", ticket))
        return transfers

    def room(self, chunk: Chunk, slot: Slot) -> torch.Tensor:
        """Where new values go; `store` carries them on from there."""
        flat = self._flat(chunk)
        if flat is not None and flat.device.type == "cpu":
            return flat.narrow(0, chunk.start, chunk.numel)
        return slot.out_view(self._zero.dtype)

    def values(self, chunk: Chunk, slot: Slot) -> torch.Tensor:
        """The chunk's parameters, to be changed in place, once what `read` started has ended."""
        values, flat = self.room(chunk, slot), self._flat(chunk)
        if flat is None:
            for param, first, last, skipped in self.pieces(chunk):
                if _in_memory(param):
                    values[first:last].copy_(param.ds_tensor.data.narrow(0, skipped, last - first))
        elif flat.device.type != "cpu":
            values.copy_(flat.narrow(0, chunk.start, chunk.numel))
        return values

    def store(self, chunk: Chunk, values: torch.Tensor) -> Sequence[tuple[str, Ticket]]:
        """Carry new values to the accelerator, or to where each parameter lies in memory or on storage."""
        flat = self._flat(chunk)
        if flat is not None:
            if flat.device.type != "cpu":
                flat.narrow(0, chunk.start, chunk.numel).copy_(values)
            return []
        transfers = []
        for param, first, last, skipped in self.pieces(chunk):
            piece = values[first:last]
            if _in_memory(param):
                param.ds_tensor.data.narrow(0, skipped, last - first).copy_(piece)
                continue
            extent = param.nvme_swapper.get_path(param)
            offset = extent.offset + skipped * piece.element_size()
            ticket = self._zero.optimizer_swapper.aio_handle.write(piece, extent.path, offset)
            METER.written("parameters", piece.nbytes)
            transfers.append((f"writing {extent.key}", ticket))
        return transfers

    def pieces(self, chunk: Chunk) -> list[Piece]:
        """The parameters that overlap a chunk."""
        pieces = []
        end = chunk.start + chunk.numel
        for param, (offset, numel) in self._zero.partition_places(self.index(chunk)):
            first, last = max(offset, chunk.start), min(offset + numel, end)
            if first < last:
                pieces.append((param, first - chunk.start, last - chunk.start, first - offset))
        return pieces

    def index(self, chunk: Chunk) -> int:
        """ZeRO-3's number of the chunk's sub-group; those too small to be swapped count there too."""
        return self._indices[self._zero.optimizer_swapper.parameter_id(chunk.group.parameter)]

    @cached_property
    def _indices(self) -> dict[Any, int]:
        return {fp32.ds_id: index for index, fp32 in enumerate(self._zero.fp32_partitioned_groups_flat)}

    def _flat(self, chunk: Chunk) -> torch.Tensor | None:
        flat: torch.Tensor | None = self._zero.fp16_partitioned_groups_flat[self.index(chunk)]
        return flat


def _in_memory(param: Any) -> bool:
    return bool(param.ds_tensor.status.name == "AVAILABLE")
