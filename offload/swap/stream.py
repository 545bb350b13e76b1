"""Chunks of sub-groups through a fixed ring of buffers: read ahead, computed on, written behind."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle, Ticket
from offload.swap.arena import ALIGNMENT, align_up
from offload.swap.buffers import SwapBufferManager
from offload.swap.stats import METER
from offload.swap.sub_group import SubGroup
from offload.swap.swap_buffer import SwapBuffer
from offload.swap.transfers import first_failure, naming

KIND = "optimizer"
LARGEST_CHUNK_NUMEL = 1 << 20
MOST_SLOTS = 8
FEWEST_SLOTS = 3
"""One chunk is read, one computed on, one written."""


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `start + numel` of a sub-group; a position of the pipeline."""

    group: SubGroup
    start: int
    numel: int


@dataclass
class Slot:
    """Buffers of one chunk, and the transfers that use them."""

    buffers: dict[str, SwapBuffer]
    out: SwapBuffer
    chunk: Chunk | None = None
    reading: Ticket | None = None
    writing: list[tuple[str, Ticket]] = field(default_factory=list)

    def view(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The current chunk's part of a state tensor."""
        return self.buffers[name].view(self._chunk().numel, dtype)

    def out_view(self, dtype: torch.dtype) -> torch.Tensor:
        """Room for the chunk's new model parameters."""
        return self.out.view(self._chunk().numel, dtype)

    def written(self) -> bool:
        return all(ticket.done() for _, ticket in self.writing)

    def _chunk(self) -> Chunk:
        if self.chunk is None:
            raise ValueError("this slot holds no chunk")
        return self.chunk


Compute = Callable[[Chunk, Slot], Sequence[tuple[str, Ticket]]]
"""Steps the chunk that the slot holds; returns further transfers that read the slot's buffers."""


class Stream:
    """One pass over sub-groups per optimizer step, within a fixed budget of memory.

    Args:
        handle: does the transfers.
        manager: lends the slots' buffers, once.
        names: the state tensors that travel, each `itemsize` bytes per element.
        itemsize: bytes of one element of a state tensor.
        out_itemsize: bytes of one model parameter.
    """

    def __init__(
        self,
        handle: AsyncIOHandle,
        manager: SwapBufferManager,
        names: Sequence[str],
        itemsize: int,
        out_itemsize: int,
    ) -> None:
        self._handle = handle
        self._names = tuple(names)
        self._itemsize = itemsize
        per_element = len(self._names) * itemsize + out_itemsize
        self.chunk_numel, count = ring_shape(manager.budget_nbytes, per_element)
        self._free: deque[Slot] = deque()
        for _ in range(count):
            lent = [manager.lend(self.chunk_numel * itemsize, grow=True) for _ in self._names]
            out = manager.lend(self.chunk_numel * out_itemsize, grow=True)
            buffers = {name: buffer for name, buffer in zip(self._names, lent, strict=True) if buffer}
            if out is None or len(buffers) < len(self._names):
                raise MemoryError(f"no memory for {count} chunks of {self.chunk_numel} elements")
            self._free.append(Slot(buffers, out))
        self._reading: deque[Slot] = deque()
        self._writing: deque[Slot] = deque()
        self._ahead: Iterator[Chunk] = iter(())
        self._groups_left = 0

    @property
    def active(self) -> bool:
        """Whether a pass has begun and not all of its sub-groups were stepped."""
        return self._groups_left > 0

    def start(self, groups: Sequence[SubGroup]) -> None:
        """Begin a pass: start reading the first chunks. What an earlier, unfinished pass read is dropped."""
        self.cancel()
        self._ahead = (chunk for group in groups for chunk in self.chunks(group))
        self._groups_left = len(groups)
        self._read_ahead()

    def chunks(self, group: SubGroup) -> Iterator[Chunk]:
        for start in range(0, group.numel, self.chunk_numel):
            yield Chunk(group, start, min(self.chunk_numel, group.numel - start))

    def run(self, group: SubGroup, compute: Compute) -> None:
        """Step one sub-group, the next of the pass; its last chunks may still be on their way out.

        Raises:
            OffloadIOError: naming the tensor; chunks computed before it are written or being written.
        """
        try:
            for expected in self.chunks(group):
                self._step_chunk(expected, compute)
        except BaseException as failure:
            self.abandon(failure)
            raise
        self._groups_left -= 1

    def abandon(self, failure: BaseException) -> None:
        """End a pass that failed: the next step begins a new one.

        A drive that refused one write has refused others: they are not told of once more.
        """
        self._groups_left = 0
        if isinstance(failure, OffloadIOError):
            with suppress(OffloadIOError):
                self.cancel()

    def finish(self) -> None:
        """Wait until everything computed so far is on storage.

        Raises:
            OffloadIOError: the first write that failed, naming its tensor.
        """
        self._finish_writes(len(self._writing))

    def cancel(self) -> None:
        """Drop what was read ahead and finish the writes: state is about to be read or changed elsewhere."""
        self._ahead = iter(())
        self._groups_left = 0
        while self._reading:
            with suppress(
                OffloadIOError
            ):  # nobody uses what was read; who wants it reads it again and is told
                self._finish_read("reading ahead")
        self.finish()

    def close(self) -> None:
        """Finish and give the memory back."""
        try:
            self.cancel()
        finally:
            while self._free:
                slot = self._free.popleft()
                for buffer in [*slot.buffers.values(), slot.out]:
                    buffer.release()

    def _step_chunk(self, expected: Chunk, compute: Compute) -> None:
        self._read_ahead()
        if self._reading[0].chunk != expected:
            raise ValueError(f"the pass is at {self._reading[0].chunk}, not at {expected}")
        slot = self._finish_read(f"reading {_describe(expected)}")
        slot.writing += compute(expected, slot)
        self._write(slot, expected)

    def _read_ahead(self) -> None:
        while (slot := self._free_slot()) is not None:
            chunk = next(self._ahead, None)
            if chunk is None:
                return
            self._read(slot, chunk)
            self._free.remove(slot)
            self._reading.append(slot)

    def _finish_read(self, what: str) -> Slot:
        """Wait for the oldest read; from then on its slot is among those whose writes are waited for."""
        slot = self._reading[0]
        failure = first_failure([(what, slot.reading)] if slot.reading else [], KIND)
        slot.reading = None
        self._writing.append(self._reading.popleft())
        if failure is not None:
            raise failure
        return slot

    def _finish_writes(self, count: int) -> None:
        """Wait for the writes of the oldest `count` slots and set these free."""
        oldest = list(self._writing)[:count]
        failure = first_failure([transfer for slot in oldest for transfer in slot.writing], KIND)
        for slot in oldest:
            slot.writing = []
            self._free.append(self._writing.popleft())
        if failure is not None:
            raise failure

    def _free_slot(self) -> Slot | None:
        """A slot nothing uses; waits for a write only when no chunk is read ahead."""
        while self._writing and (self._writing[0].written() or not (self._free or self._reading)):
            self._finish_writes(1)
        return self._free[0] if self._free else None

    def _read(self, slot: Slot, chunk: Chunk) -> None:
        slot.chunk = chunk
        present = [name for name in self._names if name in chunk.group.swapped]
        for name in self._names:
            if name not in present:
                slot.buffers[name].buffer.zero_()  # state that does not exist yet starts at zero
        extents = self._extents(slot, chunk, present)
        with naming(f"reading {_describe(chunk)}"):
            slot.reading = self._handle.readv(extents)
        METER.read(KIND, sum(tensor.nbytes for tensor, _, _ in extents))

    def _write(self, slot: Slot, chunk: Chunk) -> None:
        extents = self._extents(slot, chunk, self._names)
        what = f"writing {_describe(chunk)}"
        with naming(what):
            slot.writing.append((what, self._handle.writev(extents)))
        METER.written(KIND, sum(tensor.nbytes for tensor, _, _ in extents))

    def _extents(self, slot: Slot, chunk: Chunk, names: Sequence[str]) -> list[tuple[torch.Tensor, str, int]]:
        """Whole blocks: what follows a sub-group's last element is padding, in the buffer and in the file."""
        nbytes = align_up(chunk.numel * self._itemsize)
        offset = chunk.start * self._itemsize
        places = ((name, chunk.group.swapped[name].extent) for name in names)
        return [
            (slot.buffers[name].buffer.narrow(0, 0, nbytes), extent.path, extent.offset + offset)
            for name, extent in places
        ]


def ring_shape(budget_nbytes: int, per_element: int) -> tuple[int, int]:
    """Elements per chunk and number of slots for a budget: large chunks first, then many of them."""
    chunk_numel = LARGEST_CHUNK_NUMEL
    while chunk_numel > ALIGNMENT and _slots_in(budget_nbytes, chunk_numel, per_element) < MOST_SLOTS:
        chunk_numel //= 2
    return chunk_numel, max(FEWEST_SLOTS, min(MOST_SLOTS, _slots_in(budget_nbytes, chunk_numel, per_element)))


def _slots_in(budget_nbytes: int, chunk_numel: int, per_element: int) -> int:
    return budget_nbytes // (chunk_numel * per_element)


def _describe(chunk: Chunk) -> str:
    return chunk.group.describe(f"elements {chunk.start} to {chunk.start + chunk.numel}")
