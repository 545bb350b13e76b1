"""Chunks of sub-groups through a fixed ring of buffers: read ahead, computed on, written behind."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle, Ticket
from offload.swap.arena import align_up
from offload.swap.buffers import SwapBufferManager
from offload.swap.chunk import Chunk
from offload.swap.formats import Column
from offload.swap.host_cache import HostCache
from offload.swap.slot import Slot, make_slots
from offload.swap.stats import METER
from offload.swap.sub_group import SubGroup
from offload.swap.swap_buffer import SwapBuffer
from offload.swap.transfers import first_failure, naming, wait_all

KIND = "optimizer"

Compute = Callable[[Chunk, Slot], Sequence[tuple[str, Ticket]]]
"""Steps the chunk that the slot holds; returns further transfers that read the slot's buffers."""

ReadModel = Callable[[Chunk, Slot], Sequence[tuple[str, Ticket]]]
"""Starts to read a chunk's model parameters into the slot."""


class Stream:
    """One pass over sub-groups per optimizer step, within a fixed budget of memory.

    Args:
        handle: does the transfers.
        manager: lends the slots' buffers, once.
        columns: what travels.
        out_itemsize: bytes of one model parameter.
        read_model: starts reading a chunk's model parameters, where they too lie on storage and the columns
            mean nothing without them.
        cache: chunks that stay in memory from step to step.
        gradient_dtype: of gradients that lie on storage, for `run` to read with each chunk.
    """

    def __init__(
        self,
        handle: AsyncIOHandle,
        manager: SwapBufferManager,
        columns: Sequence[Column],
        out_itemsize: int,
        read_model: ReadModel | None = None,
        cache: HostCache | None = None,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self._handle = handle
        self._cache = cache or HostCache(0, columns)
        self._columns = tuple(columns)
        self._read_model = read_model
        self._written = frozenset(self._columns)
        self._replacing = False
        self._gradient_dtype = gradient_dtype
        gradient_itemsize = gradient_dtype.itemsize if gradient_dtype is not None else 0
        self.chunk_numel, slots = make_slots(manager, self._columns, out_itemsize, gradient_itemsize)
        self._free: deque[Slot] = deque(slots)
        self.gradient_buffers = [slot.gradient for slot in self._free if slot.gradient is not None]
        """Each slot's room for gradients: idle but for `run`."""
        self._reading: deque[Slot] = deque()
        self._writing: deque[Slot] = deque()
        self._ahead: Iterator[Chunk] = iter(())
        self._groups_left = 0
        self.lost_write: OffloadIOError | None = None
        """The first write that was refused: its chunk is older on storage than the others, and half new."""

    @property
    def active(self) -> bool:
        """Whether a pass has begun and not all of its sub-groups were stepped."""
        return self._groups_left > 0

    def start(self, groups: Sequence[SubGroup]) -> None:
        """Begin a pass: start reading the first chunks. What an earlier, unfinished pass read is dropped."""
        self.cancel()
        self._cache.choose(chunk for group in groups for chunk in self.chunks(group))
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
                self._step_chunk(expected, compute, with_gradient=self._gradient_dtype is not None)
        except BaseException as failure:
            self.abandon(failure)
            raise
        self._groups_left -= 1

    def transform(
        self,
        group: SubGroup,
        first: int,
        last: int,
        compute: Compute,
        written: Collection[Column] = (),
        *,
        replacing: bool = False,
    ) -> None:
        """Outside of a pass: compute on the chunks that hold elements `first` to `last`, write some columns.

        `replacing`: what is written, and the model parameters, are not read before. They may be unreadable.
        Of the rest only what the cache is to hold is read.

        Raises:
            OffloadIOError: naming the tensor.
        """
        chunks = [c for c in self.chunks(group) if c.start < last and first < c.start + c.numel]
        self.cancel()
        self._ahead = iter(chunks)
        self._written, self._replacing = frozenset(written), replacing
        try:
            for chunk in chunks:
                self._step_chunk(chunk, compute)
            self.finish()
        except BaseException as failure:
            self.abandon(failure)
            raise
        finally:
            self._written, self._replacing = frozenset(self._columns), False

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

    def flush(self, group: SubGroup) -> None:
        """Bring what only the cache holds of a sub-group to storage; it stays in the cache.

        Raises:
            OffloadIOError: naming the tensor; what was not written is written by the next call.
        """
        self.finish()
        for chunk, cached in self._cache.dirty(group):
            what = f"writing {_describe(chunk)}"
            extents = self._extents(cached.buffers, chunk, self._columns)
            with naming(what):
                ticket = self._handle.writev(extents)
            wait_all([(what, ticket)], KIND)
            METER.written(KIND, sum(tensor.nbytes for tensor, _, _ in extents))
            cached.dirty = False

    def forget(self, group: SubGroup) -> None:
        """Drop what the cache holds of a sub-group: it changes on storage, or is replaced."""
        self._cache.forget(group)

    def cancel(self) -> None:
        """Drop what was read ahead and finish the writes: state is about to be read or changed elsewhere."""
        self._ahead = iter(())
        self._groups_left = 0
        while self._reading:
            with suppress(
                OffloadIOError
            ):  # nobody uses what was read; who wants it reads it again and is told
                self._finish_read()
        self.finish()

    def idle_buffers(self) -> list[SwapBuffer]:
        """The columns' memory of all slots that nothing uses, until the next call of another method."""
        return [buffer for slot in self._free for buffer in slot.own.values()]

    def close(self) -> None:
        """Finish and give the memory back."""
        try:
            self.cancel()
        finally:
            self._cache.close()
            while self._free:
                self._free.popleft().release()

    def _step_chunk(self, expected: Chunk, compute: Compute, *, with_gradient: bool = False) -> None:
        self._read_ahead()
        self._read_the_rest(with_gradient)
        if self._reading[0].chunk != expected:
            raise ValueError(f"the pass is at {self._reading[0].chunk}, not at {expected}")
        slot = self._finish_read()
        if slot.cached is not None and self._written:
            slot.cached.dirty = True  # also when the arithmetic is interrupted
        slot.writing += compute(expected, slot)
        self._write(slot, expected)

    def _read_ahead(self) -> None:
        while (slot := self._free_slot()) is not None:
            chunk = next(self._ahead, None)
            if chunk is None:
                return
            self._free.remove(slot)
            self._reading.append(slot)
            slot.complete = False
            try:
                self._read(slot, chunk)
            except BaseException as failure:
                self.abandon(failure)  # nothing may be computed on what was not read
                raise

    def _read_the_rest(self, with_gradient: bool) -> None:
        """What may change until its chunk is stepped: model parameters, and gradients still on their way."""
        for slot in self._reading:
            if slot.complete or slot.chunk is None:
                continue
            if self._read_model is not None and not self._replacing:
                slot.reading += self._read_model(slot.chunk, slot)
            if with_gradient and self._gradient_dtype is not None:
                self._read_gradient(slot, slot.chunk, self._gradient_dtype)
            slot.complete = True

    def _read_gradient(self, slot: Slot, chunk: Chunk, dtype: torch.dtype) -> None:
        extent = chunk.group.gradient_extent(0, chunk.group.numel, dtype)
        values = slot.gradient_view(dtype)
        what = f"reading {extent.key}"
        with naming(what):
            ticket = self._handle.read(values, extent.path, extent.offset + chunk.start * dtype.itemsize)
        slot.reading.append((what, ticket))
        METER.read("gradients", values.nbytes)

    def _finish_read(self) -> Slot:
        """Wait for the oldest read; from then on its slot is among those whose writes are waited for."""
        slot = self._reading[0]
        failure = first_failure(slot.reading, KIND)
        if (
            slot.cached is not None and slot.reading and failure is None
        ):  # a read that was refused is not there
            slot.cached.valid = True
        slot.reading = []
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
            slot.cached = None
            self._free.append(self._writing.popleft())
        if failure is not None:
            self.lost_write = self.lost_write or failure
            raise failure

    def _free_slot(self) -> Slot | None:
        """A slot nothing uses; waits for a write only when no chunk is read ahead."""
        while self._writing and (self._writing[0].written() or not (self._free or self._reading)):
            self._finish_writes(1)
        return self._free[0] if self._free else None

    def _read(self, slot: Slot, chunk: Chunk) -> None:
        slot.chunk = chunk
        slot.cached = self._cache.entry(chunk)
        if slot.cached is not None and slot.cached.valid:
            METER.hit(KIND, sum(column.nbytes(chunk.numel) for column in self._columns))
        else:
            self._read_columns(slot, chunk)

    def _read_columns(self, slot: Slot, chunk: Chunk) -> None:
        absent = self._written if self._replacing else ()
        wanted = self._written if self._replacing and slot.cached is None else self._columns
        present = [c for c in wanted if c.name in chunk.group.swapped and c not in absent]
        for column in wanted:
            if column not in present:
                slot.buffers[column].buffer.zero_()  # state that does not exist yet starts at zero
        extents = self._extents(slot.buffers, chunk, present)
        what = f"reading {_describe(chunk)}"
        with naming(what):
            slot.reading.append((what, self._handle.readv(extents)))
        METER.read(KIND, sum(tensor.nbytes for tensor, _, _ in extents))

    def _write(self, slot: Slot, chunk: Chunk) -> None:
        written = [column for column in self._columns if column in self._written]
        if not written or slot.cached is not None:
            return
        extents = self._extents(slot.buffers, chunk, written)
        what = f"writing {_describe(chunk)}"
        with naming(what):
            slot.writing.append((what, self._handle.writev(extents)))
        METER.written(KIND, sum(tensor.nbytes for tensor, _, _ in extents))

    def _extents(
        self, buffers: Mapping[Column, SwapBuffer], chunk: Chunk, columns: Sequence[Column]
    ) -> list[tuple[torch.Tensor, str, int]]:
        """Whole blocks: what follows a sub-group's last element is padding, in the buffer and in the file."""
        places = ((column, chunk.group.swapped[column.name].extent) for column in columns)
        return [
            (
                buffers[column].buffer.narrow(0, 0, align_up(column.nbytes(chunk.numel))),
                extent.path,
                extent.offset + column.nbytes(chunk.start),
            )
            for column, extent in places
        ]


def _describe(chunk: Chunk) -> str:
    return chunk.group.describe(f"elements {chunk.start} to {chunk.start + chunk.numel}")
