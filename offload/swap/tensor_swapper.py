"""Writes tensors out through a few staging buffers while the caller goes on computing."""

from collections.abc import Sequence
from typing import Any

import torch

from offload.io import AsyncIOHandle, Ticket
from offload.swap.buffers import SwapBuffer
from offload.swap.layout import Extent
from offload.swap.stats import METER
from offload.swap.transfers import wait_all


class AsyncTensorSwapper:
    """Copies tensors into staging buffers and writes those; the tensors may be reused at once.

    Args:
        aio_handle: does the writes.
        numel_alignment: elements that a packed tensor is rounded up to.
        timers: kept for DeepSpeed's call; the time spent waiting is in `offload.stats()`.
        kind: under which head the bytes are counted.
    """

    def __init__(
        self, aio_handle: AsyncIOHandle, numel_alignment: int, timers: Any = None, kind: str = "gradients"
    ) -> None:
        self.aio_handle = aio_handle
        self.numel_alignment = numel_alignment
        self.timers = timers
        self.kind = kind
        self._lent: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []
        self._writing: list[tuple[str, Ticket, torch.Tensor]] = []

    def has_buffers(self) -> bool:
        return bool(self._lent)

    def add_buffers(self, buffer_list: Sequence[torch.Tensor]) -> None:
        """Lend the staging buffers.

        Raises:
            ValueError: it has buffers already, or there are none in the list.
        """
        if self._lent or not buffer_list:
            raise ValueError(f"{len(buffer_list)} buffers for a swapper that holds {len(self._lent)}")
        self._lent = list(buffer_list)
        self._free = list(buffer_list)

    def get_timer_names(self) -> list[str]:
        return []

    def swap_out_tensors(
        self, tensor_list: Sequence[torch.Tensor], path_list: Sequence[Extent | str]
    ) -> None:
        """Start writing each tensor to its extent, or to the start of its file, in the buffers' dtype.

        Raises:
            ValueError: no buffers were added, or the lists differ in length.
            OffloadIOError: an earlier write failed.
        """
        if not self._lent:
            raise ValueError("add_buffers first: there is nothing to stage the tensors in")
        for tensor, path in zip(tensor_list, path_list, strict=True):
            self.swap_out(tensor, path, self._lent[0].dtype)

    def swap_out(self, tensor: torch.Tensor, target: Extent | str, dtype: torch.dtype) -> None:
        """Start writing `tensor`, converted to `dtype`, piece by piece as large as a staging buffer."""
        source = tensor.detach().reshape(-1)
        path, position, key = _place(target)
        start = 0
        while start < source.numel():
            staging = self._take_buffer()
            piece_numel = min(source.numel() - start, staging.nbytes // dtype.itemsize)
            piece = SwapBuffer(staging).view(piece_numel, dtype)
            piece.copy_(source.narrow(0, start, piece_numel))
            ticket = self.aio_handle.write(piece, path, position + start * dtype.itemsize)
            METER.written(self.kind, piece.nbytes)
            self._writing.append((f"writing {key}", ticket, staging))
            start += piece_numel

    def wait(self) -> None:
        """Wait until everything handed over so far is written.

        Raises:
            OffloadIOError: one of the writes failed; the others are finished all the same.
        """
        writing, self._writing = self._writing, []
        self._free += [staging for _, _, staging in writing]
        wait_all([(what, ticket) for what, ticket, _ in writing], self.kind)

    def release_buffers(self) -> list[torch.Tensor]:
        """Wait, then hand the staging buffers back."""
        try:
            self.wait()
        finally:
            buffers, self._lent, self._free = self._lent, [], []
        return buffers

    def _take_buffer(self) -> torch.Tensor:
        if not self._free:
            what, ticket, staging = self._writing.pop(0)
            self._free.append(staging)
            wait_all([(what, ticket)], self.kind)
        return self._free.pop()


def _place(target: Extent | str) -> tuple[str, int, str]:
    if isinstance(target, Extent):
        return target.path, target.offset, target.key
    return target, 0, target
