"""Chunks of optimizer state that stay in host memory from step to step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from offload.io import pinned
from offload.swap.arena import align_up
from offload.swap.chunk import Chunk
from offload.swap.formats import Column
from offload.swap.sub_group import SubGroup
from offload.swap.swap_buffer import SwapBuffer


@dataclass
class Cached:
    """A chunk's columns in memory: `valid` once they were read, `dirty` while storage has older ones."""

    buffers: dict[Column, SwapBuffer]
    valid: bool = False
    dirty: bool = False


class HostCache:
    """At most `nbytes` bytes of ordinary memory, taken when a chunk is first used.

    The chunks it keeps are spread evenly over a pass, so that the drive works on one while the cores work on
    another that is there already.
    """

    def __init__(self, nbytes: int, columns: Sequence[Column]) -> None:
        self.nbytes = nbytes
        self._columns = tuple(columns)
        self._chosen: frozenset[tuple[int, int]] = frozenset()
        self._entries: dict[tuple[int, int], tuple[Chunk, Cached]] = {}

    def choose(self, chunks: Iterable[Chunk]) -> None:
        """Settle, by the first pass, which chunks are kept."""
        if not self.nbytes or self._chosen:
            return
        candidates = [(chunk.group.index, chunk.start, self._nbytes(chunk)) for chunk in chunks]
        total = sum(nbytes for _, _, nbytes in candidates)
        share = min(1.0, self.nbytes / max(total, 1))
        chosen, saved = set(), 0.0
        for index, start, nbytes in candidates:
            saved += nbytes * share
            if saved >= nbytes:
                saved -= nbytes
                chosen.add((index, start))
        self._chosen = frozenset(chosen)

    def entry(self, chunk: Chunk) -> Cached | None:
        """Where a chunk is kept; None when it is not one of those."""
        key = (chunk.group.index, chunk.start)
        if key not in self._entries:
            if key not in self._chosen:
                return None
            self._entries[key] = (chunk, self._allocate(chunk))
        return self._entries[key][1]

    def dirty(self, group: SubGroup) -> Iterator[tuple[Chunk, Cached]]:
        """Chunks of a sub-group that storage does not have."""
        return (
            (chunk, cached)
            for chunk, cached in self._entries.values()
            if chunk.group is group and cached.dirty
        )

    def forget(self, group: SubGroup) -> None:
        for chunk, cached in self._entries.values():
            if chunk.group is group:
                cached.valid = cached.dirty = False

    def close(self) -> None:
        """Give the memory back."""
        self._entries.clear()
        self._chosen = frozenset()

    def _nbytes(self, chunk: Chunk) -> int:
        return sum(align_up(column.nbytes(chunk.numel)) for column in self._columns)

    def _allocate(self, chunk: Chunk) -> Cached:
        memory = pinned.new(self._nbytes(chunk), lock=False)
        sizes = [align_up(column.nbytes(chunk.numel)) for column in self._columns]
        parts = torch.split(memory, sizes)
        return Cached({column: SwapBuffer(part) for column, part in zip(self._columns, parts, strict=True)})
