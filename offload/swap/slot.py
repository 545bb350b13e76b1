"""Memory of one chunk under way, and how a budget is cut into several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload.io import Ticket
from offload.swap.arena import ALIGNMENT
from offload.swap.buffers import SwapBufferManager
from offload.swap.chunk import Chunk
from offload.swap.formats import Column
from offload.swap.host_cache import Cached
from offload.swap.swap_buffer import SwapBuffer

LARGEST_CHUNK_NUMEL = 1 << 20
MOST_SLOTS = 8
FEWEST_SLOTS = 3
"""One chunk is read, one computed on, one written."""


@dataclass
class Slot:
    """Buffers of one chunk, and the transfers that use them."""

    own: dict[Column, SwapBuffer]
    out: SwapBuffer
    gradient: SwapBuffer | None = None
    complete: bool = False
    """Whether also what is read last of all is on its way."""
    cached: Cached | None = None
    chunk: Chunk | None = None
    reading: list[tuple[str, Ticket]] = field(default_factory=list)
    writing: list[tuple[str, Ticket]] = field(default_factory=list)

    @property
    def buffers(self) -> Mapping[Column, SwapBuffer]:
        """The columns' memory: the chunk's own in the cache, or the slot's."""
        return self.own if self.cached is None else self.cached.buffers

    def view(self, name: str) -> torch.Tensor:
        """The current chunk's part of a column."""
        column = next(column for column in self.own if column.name == name)
        return self.buffers[column].view(column.numel(self._chunk().numel), column.dtype)

    def out_view(self, dtype: torch.dtype) -> torch.Tensor:
        """Room for the chunk's model parameters."""
        return self.out.view(self._chunk().numel, dtype)

    def gradient_view(self, dtype: torch.dtype) -> torch.Tensor:
        """The chunk's gradient, where that is read from storage."""
        if self.gradient is None:
            raise ValueError("gradients are not on storage")
        return self.gradient.view(self._chunk().numel, dtype)

    def written(self) -> bool:
        return all(ticket.done() for _, ticket in self.writing)

    def release(self) -> None:
        """Give the memory back."""
        for buffer in (*self.own.values(), self.out, self.gradient):
            if buffer is not None:
                buffer.release()

    def _chunk(self) -> Chunk:
        if self.chunk is None:
            raise ValueError("this slot holds no chunk")
        return self.chunk


def make_slots(
    manager: SwapBufferManager, columns: Sequence[Column], out_itemsize: int, gradient_itemsize: int
) -> tuple[int, list[Slot]]:
    """Elements per chunk, and as many slots of that size as the manager's budget holds.

    Raises:
        MemoryError: not even the fewest can be had.
    """

    def lend(nbytes: int) -> SwapBuffer:
        buffer = manager.lend(nbytes, grow=True)
        if buffer is None:
            raise MemoryError(f"no memory for {count} chunks of {chunk_numel} elements")
        return buffer

    chunk_numel, count = ring_shape(manager.budget_nbytes, columns, out_itemsize + gradient_itemsize)
    slots = [
        Slot(
            own={column: lend(column.nbytes(chunk_numel)) for column in columns},
            out=lend(chunk_numel * out_itemsize),
            gradient=lend(chunk_numel * gradient_itemsize) if gradient_itemsize else None,
        )
        for _ in range(count)
    ]
    return chunk_numel, slots


def ring_shape(budget_nbytes: int, columns: Sequence[Column], out_itemsize: int) -> tuple[int, int]:
    """Elements per chunk and number of slots for a budget: large chunks first, then many of them."""

    def slots(chunk_numel: int) -> int:
        return budget_nbytes // (
            sum(column.nbytes(chunk_numel) for column in columns) + chunk_numel * out_itemsize
        )

    least = max(column.weights_per_file_block for column in columns)
    chunk_numel = LARGEST_CHUNK_NUMEL
    while chunk_numel > max(least, ALIGNMENT) and slots(chunk_numel) < MOST_SLOTS:
        chunk_numel //= 2
    return chunk_numel, max(FEWEST_SLOTS, min(MOST_SLOTS, slots(chunk_numel)))
