"""Writes tensors out through a few staging buffers while the caller goes on computing."""

from collections.abc import Sequence
from typing import Any

import torch

from offload.io import AsyncIOHandle, Ticket
from offload.swap.arena import ALIGNMENT
from offload.swap.buffers import SwapBuffer
from offload.swap.layout import Extent
from offload.swap.stats import METER
from offload.swap.transfers import first_failure, naming


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
            ValueError: it has buffers already, there are none in the list, or one is too small.
        """
        if self._lent or not buffer_list:
            raise ValueError(f"{len(buffer_list)} buffers for a swapper that holds {len(self._lent)}")
        if (smallest := min(buffer.nbytes for buffer in buffer_list)) < ALIGNMENT:
            raise ValueError(f"a staging buffer of {smallest} B is too small; give at least {ALIGNMENT} B")
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
        """Start writing `tensor`, converted to `dtype`, piece by piece as large as a staging buffer.

        Raises:
            OffloadIOError: this write cannot start, or an earlier one failed.
        """
        source = tensor.detach().reshape(-1)
        path, position, key = _place(target)
        start = 0
        while start < source.numel():
            self._make_free()
            staging = self._free[-1]
            piece_numel = min(source.numel() - start, staging.nbytes // dtype.itemsize)
            piece = SwapBuffer(staging).view(piece_numel, dtype)
            piece.copy_(source.narrow(0, start, piece_numel))
            what = f"writing {key}"
            with naming(what):
                ticket = self.aio_handle.write(piece, path, position + start * dtype.itemsize)
            self._writing.append((what, ticket, self._free.pop()))
            METER.written(self.kind, piece.nbytes)
            start += piece_numel

    def wait(self) -> None:
        """Wait until everything handed over so far is written.

        Raises:
            OffloadIOError: one of the writes failed; the others are finished all the same.
        """
        self._finish(len(self._writing))

    def release_buffers(self) -> list[torch.Tensor]:
        """Wait, then hand the staging buffers back; after Ctrl-C in between they are still in use.

        Raises:
            OffloadIOError: as `wait`; the buffers are handed back all the same.
        """
        try:
            self.wait()
        finally:
            buffers = self._lent
            if not self._writing:
                self._lent, self._free = [], []
        return buffers

    def _make_free(self) -> None:
        if not self._free:
            self._finish(1)

    def _finish(self, count: int) -> None:
        """Wait for the oldest `count` writes and take their buffers back."""
        oldest = self._writing[:count]
        failure = first_failure([(what, ticket) for what, ticket, _ in oldest], self.kind)
        del self._writing[:count]
        self._free += [staging for _, _, staging in oldest]
        if failure is not None:
            raise failure


def _place(target: Extent | str) -> tuple[str, int, str]:
    if isinstance(target, Extent):
        return target.path, target.offset, target.key
    return target, 0, target
