"""Gradients of swapped sub-groups: out as they arrive, in the dtype they arrive in; back for the step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle, Ticket
from offload.swap.buffers import SwapBuffer, SwapBufferManager
from offload.swap.stats import METER
from offload.swap.sub_group import Gradient, SubGroup
from offload.swap.tensor_swapper import AsyncTensorSwapper
from offload.swap.transfers import first_failure, naming, wait_all

KIND = "gradients"
WRITE_STAGING_NBYTES = 4 << 20
WRITE_STAGING_COUNT = 4
"""Gradients leave during backward, when no sub-group is in memory: the idle buffers stage them."""

READ_STAGING_NBYTES = 2 << 20
"""They come back when a sub-group fills the buffers, so little is left for staging."""


class GradientStore:
    """Keeps gradients on storage between backward and the optimizer step.

    A gradient smaller than `min_nbytes` stays where it is: DeepSpeed holds it in host memory until the next
    backward.
    """

    def __init__(self, aio_handle: AsyncIOHandle, manager: SwapBufferManager, min_nbytes: int) -> None:
        self._handle = aio_handle
        self._manager = manager
        self._min_nbytes = min_nbytes
        self._swapper = AsyncTensorSwapper(aio_handle, 1, kind=KIND)
        self._staging: list[SwapBuffer] = []
        self._failure: OffloadIOError | None = None

    def begin_window(self) -> None:
        """Gradients of the next step follow; what happened to the last ones no longer matters."""
        self._failure = None

    def swap_out(self, group: SubGroup, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Start writing `tensors`, the gradients at `offsets` (elements) of the sub-group."""
        for offset, tensor in zip(offsets, tensors, strict=True):
            if tensor.nbytes < self._min_nbytes:
                resident = tensor.detach().reshape(-1).cpu()
                group.gradients[offset] = Gradient(offset, tensor.numel(), tensor.dtype, tensor=resident)
                continue
            self._write(group, offset, tensor)

    def write_back(self, group: SubGroup, gradient: torch.Tensor) -> None:
        """Write a changed full gradient, in its own dtype: what was set must come back exactly."""
        self._write(group, 0, gradient)
        for offset in [offset for offset in group.gradients if offset != 0]:
            del group.gradients[offset]
        self.flush()

    def swap_in(self, group: SubGroup, destination: torch.Tensor) -> None:
        """Fill `destination` with the sub-group's gradient; where no gradient arrived it is zero.

        Raises:
            OffloadIOError: it cannot be read, or one of this step's gradients could not be written.
        """
        self.flush()
        if self._failure is not None:
            raise self._failure
        present = sorted(group.gradients.values(), key=lambda gradient: gradient.offset)
        if sum(gradient.numel for gradient in present) < destination.numel():
            destination.zero_()
        for gradient in present:
            part = destination.narrow(0, gradient.offset, gradient.numel)
            if gradient.tensor is not None:
                part.copy_(gradient.tensor)
            else:
                self._read(group, gradient, part)

    def flush(self) -> None:
        """Wait until everything is written and give the staging memory back."""
        if not self._swapper.has_buffers():
            return
        try:
            with self._remembering():
                self._swapper.release_buffers()
        finally:
            if not self._swapper.has_buffers():  # after Ctrl-C the drive may still read them: they stay lent
                self._return_staging()

    def close(self) -> None:
        """As `flush`, but nobody will miss what cannot be written any more."""
        with suppress(OffloadIOError):
            self.flush()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """A gradient that is not on storage must not be taken for the one of an earlier step that is."""
        try:
            yield
        except OffloadIOError as error:
            self._failure = error
            raise

    def _write(self, group: SubGroup, offset: int, tensor: torch.Tensor) -> None:
        if offset in group.gradients:
            self.flush()  # two writes to one place must not be in flight together
        with self._remembering():
            extent = group.gradient_extent(offset, tensor.numel(), tensor.dtype)
            if not self._swapper.has_buffers():
                staging = self._lend_staging(WRITE_STAGING_COUNT, WRITE_STAGING_NBYTES)
                self._swapper.add_buffers([buffer.buffer for buffer in staging])
            self._swapper.swap_out(tensor, extent, tensor.dtype)
        group.gradients[offset] = Gradient(offset, tensor.numel(), tensor.dtype, extent=extent)

    def _read(self, group: SubGroup, gradient: Gradient, destination: torch.Tensor) -> None:
        """Read through two staging buffers: one fills while the other is converted."""
        if gradient.extent is None:
            raise ValueError(f"{group.describe(f'gradient at {gradient.offset}')} is not on storage")
        what = f"reading {gradient.extent.key}"
        buffers = self._lend_staging(2, READ_STAGING_NBYTES)
        numel = READ_STAGING_NBYTES // gradient.dtype.itemsize
        starts = range(0, gradient.numel, numel)
        pending: list[tuple[int, torch.Tensor, Ticket]] = []

        def convert_oldest() -> None:
            start, piece, ticket = pending[0]
            wait_all([(what, ticket)], KIND)
            del pending[0]
            destination.narrow(0, start, piece.numel()).copy_(piece)

        try:
            for turn, start in enumerate(starts):
                piece = buffers[turn % 2].view(min(numel, gradient.numel - start), gradient.dtype)
                position = gradient.extent.offset + start * gradient.dtype.itemsize
                with naming(what):
                    pending.append((start, piece, self._handle.read(piece, gradient.extent.path, position)))
                METER.read(KIND, piece.nbytes)
                if len(pending) == 2:
                    convert_oldest()
            while pending:
                convert_oldest()
        finally:
            first_failure([(what, ticket) for _, _, ticket in pending], KIND)  # the first one is under way
            self._return_staging()

    def _lend_staging(self, count: int, nbytes: int) -> list[SwapBuffer]:
        for _ in range(count):
            buffer = self._manager.lend(nbytes, grow=True)
            if buffer is not None:
                self._staging.append(buffer)
        return self._staging

    def _return_staging(self) -> None:
        while self._staging:
            self._staging.pop().release()
