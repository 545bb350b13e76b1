"""Whole tensors to and from storage through a little memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.io import AsyncIOHandle
from offload.swap.buffers import SwapBufferManager
from offload.swap.layout import Extent
from offload.swap.stats import METER
from offload.swap.tensor_swapper import AsyncTensorSwapper
from offload.swap.transfers import naming, wait_all


@contextmanager
def staging_writer(
    handle: AsyncIOHandle, manager: SwapBufferManager, nbytes: int, kind: str
) -> Iterator[AsyncTensorSwapper]:
    """A writer with two staging buffers of `nbytes`; when it is left, everything is on storage."""
    lent = [buffer for _ in range(2) if (buffer := manager.lend(nbytes, grow=True)) is not None]
    writer = AsyncTensorSwapper(handle, 1, kind=kind)
    writer.add_buffers([buffer.buffer for buffer in lent])
    try:
        yield writer
    finally:
        try:
            writer.release_buffers()
        finally:
            if not writer.has_buffers():  # after Ctrl-C the drive may still read them: they stay lent
                for buffer in lent:
                    buffer.release()


def pieces(
    tensor: torch.Tensor, numel: int, extent: Extent | None, staging: torch.Tensor, handle: AsyncIOHandle
) -> Iterator[torch.Tensor]:
    """A partition's values, from memory at once or from storage piece by piece through `staging`."""
    if extent is None:
        yield tensor
        return
    for start in range(0, numel, staging.numel()):
        piece = staging.narrow(0, 0, min(staging.numel(), numel - start))
        position = extent.offset + start * staging.element_size()
        what = f"reading {extent.key}"
        with naming(what):
            ticket = handle.read(piece, extent.path, position)
        wait_all([(what, ticket)], "parameters")
        METER.read("parameters", piece.nbytes)
        yield piece
