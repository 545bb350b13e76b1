"""Gradients of streamed sub-groups on storage: added up as they arrive, read chunk by chunk in the step."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload import _C
from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle, Ticket
from offload.swap.dtypes import DTYPES
from offload.swap.layout import Extent
from offload.swap.stats import METER
from offload.swap.sub_group import SubGroup
from offload.swap.swap_buffer import SwapBuffer
from offload.swap.transfers import first_failure, naming, wait_all

KIND = "gradients"
READ_AHEAD = 2
"""Pieces of a gradient that is added to: one is read while another is computed on."""

_Transfers = list[tuple[str, Ticket]]


class StoredGradients:
    """One gradient per weight, in the dtype that gradients accumulate in.

    Args:
        handle: does the transfers.
        buffers: staging, at least three of one size; used only between `begin_window` and the end of `flush`.
        dtype: of a gradient.
    """

    def __init__(self, handle: AsyncIOHandle, buffers: Sequence[SwapBuffer], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._handle = handle
        self._piece_numel = buffers[0].buffer.nbytes // dtype.itemsize
        self._ring: deque[tuple[SwapBuffer, _Transfers]] = deque((buffer, []) for buffer in buffers)
        self._failure: OffloadIOError | None = None

    def begin_window(self) -> None:
        """Gradients of the next step follow; what happened to the last ones no longer matters."""
        for _, transfers in self._ring:
            first_failure(transfers, KIND)
            transfers.clear()
        self._failure = None

    def put(self, group: SubGroup, offset: int, gradient: torch.Tensor, *, add: bool) -> float:
        """Write the gradient at `offset` (elements), or add it to what is there; the sum of its squares.

        Returns:
            Of the gradient as it is stored; infinite or NaN exactly if one of its elements is.

        Raises:
            OffloadIOError: it cannot be read or written, or one before it could not.
        """
        extent = self._extent(group)
        source = gradient.detach().reshape(-1)
        total = 0.0
        opened: deque[tuple[int, torch.Tensor, SwapBuffer, _Transfers]] = deque()
        starts = iter(range(0, source.numel(), self._piece_numel))
        with self._remembering():
            try:
                while True:
                    self._open(opened, starts, extent, offset, source.numel(), add)
                    if not opened:
                        return total
                    start, piece, buffer, transfers = opened[0]
                    wait_all(transfers, KIND)
                    transfers.clear()
                    arrived = source.narrow(0, start, piece.numel()).to("cpu", self.dtype)
                    if add:
                        piece.add_(arrived)
                    else:
                        piece.copy_(arrived)
                    total = sum_of_squares(piece, total)
                    transfers.append(self._write(piece, extent, offset + start))
                    self._ring.append((buffer, transfers))
                    opened.popleft()
            finally:
                self._ring.extend((buffer, transfers) for _, _, buffer, transfers in opened)

    def read(self, group: SubGroup, offset: int, numel: int) -> torch.Tensor:
        """A copy of the gradient of `numel` weights from `offset` on."""
        self.flush()
        extent = self._extent(group)
        values = torch.empty(numel, dtype=self.dtype)
        what = f"reading {extent.key}"
        with naming(what):
            ticket = self._handle.read(values, extent.path, extent.offset + offset * self.dtype.itemsize)
        wait_all([(what, ticket)], KIND)
        METER.read(KIND, values.nbytes)
        return values

    def flush(self) -> None:
        """Wait until everything is written.

        Raises:
            OffloadIOError: a gradient of this window could not be written.
        """
        with self._remembering():
            wait_all([transfer for _, transfers in self._ring for transfer in transfers], KIND)
        for _, transfers in self._ring:
            transfers.clear()
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """A gradient that is not on storage must not be taken for the one of an earlier step that is."""
        try:
            yield
        except OffloadIOError as error:
            self._failure = self._failure or error
            raise

    def _open(
        self,
        opened: deque[tuple[int, torch.Tensor, SwapBuffer, _Transfers]],
        starts: Iterator[int],
        extent: Extent,
        offset: int,
        numel: int,
        read: bool,
    ) -> None:
        """Take staging for the next pieces; where `read`, start reading what they are added to."""
        while len(opened) < (READ_AHEAD if read else 1):
            start = next(starts, None)
            if start is None:
                return
            wait_all(self._ring[0][1], KIND)
            buffer, transfers = self._ring.popleft()
            transfers.clear()
            piece = buffer.view(min(self._piece_numel, numel - start), self.dtype)
            opened.append((start, piece, buffer, transfers))
            if read:
                what = f"reading {extent.key}"
                position = extent.offset + (offset + start) * self.dtype.itemsize
                with naming(what):
                    transfers.append((what, self._handle.read(piece, extent.path, position)))
                METER.read(KIND, piece.nbytes)

    def _write(self, piece: torch.Tensor, extent: Extent, position: int) -> tuple[str, Ticket]:
        what = f"writing {extent.key}"
        with naming(what):
            ticket = self._handle.write(piece, extent.path, extent.offset + position * self.dtype.itemsize)
        METER.written(KIND, piece.nbytes)
        return what, ticket

    def _extent(self, group: SubGroup) -> Extent:
        return group.gradient_extent(0, group.numel, self.dtype)


def sum_of_squares(values: torch.Tensor, before: float = 0.0) -> float:
    """`before` plus the sum of squares of contiguous values in host memory, in double."""
    return _C.sum_of_squares(
        values.data_ptr(),
        values.numel(),
        DTYPES[values.dtype],
        torch.get_num_threads(),
        before=before,
    )
