"""The memory that swap buffers are cut from."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from offload.errors import OffloadMemoryError, OffloadWarning
from offload.io import pinned
from offload.swap.arena import Arena, align_up
from offload.swap.swap_buffer import LockedMemoryHandle, SwapBuffer, SwapBufferPool

SLAB_NBYTES = 64 << 20
"""Locked memory is taken in pieces of this size when needed: a small model never locks a large arena."""


class SwapBufferManager:
    """Cuts buffers of any size from page-locked memory that it owns and frees through the handle.

    `num_elems * count` elements of `dtype` are the budget. It is taken in slabs as it is needed: the first at
    once, the others when the buffers in use fill what is there.

    Args:
        num_elems, count, dtype: the budget; `num_elems * count * dtype.itemsize` bytes.
        aio_handle: lends and takes back the locked memory.
        lock: False takes ordinary page-aligned memory (`pin_memory: false`): not one byte is locked.
        key: the setting to name when more than the budget is needed.
        staging_nbytes: added to the budget, for what is staged while the buffers are full.
    """

    def __init__(
        self,
        num_elems: int,
        count: int,
        dtype: torch.dtype,
        aio_handle: LockedMemoryHandle,
        *,
        lock: bool = True,
        key: str = "buffer_count",
        staging_nbytes: int = 0,
    ) -> None:
        self.num_elems = num_elems
        self.count = count
        self.dtype = dtype
        self.aio_handle = aio_handle
        self.lock = lock
        self.key = key
        self.budget_nbytes = align_up(num_elems * dtype.itemsize) * count + align_up(staging_nbytes)
        self._slabs: list[tuple[torch.Tensor, Arena]] = []
        self._warned = False
        self._reclaim: weakref.WeakMethod[Callable[[], None]] | None = None
        self._finalizer = weakref.finalize(self, _free_slabs, self._slabs, aio_handle, lock)
        if self.budget_nbytes:
            self._add_slab(min(self.budget_nbytes, SLAB_NBYTES))

    @property
    def nbytes(self) -> int:
        """Memory held now."""
        return sum(arena.nbytes for _, arena in self._slabs)

    @property
    def free_nbytes(self) -> int:
        """What the budget still allows to lend."""
        used = sum(arena.nbytes - arena.free_nbytes for _, arena in self._slabs)
        return max(0, self.budget_nbytes - used)

    def reclaim_with(self, method: Callable[[], None]) -> None:
        """Before the memory grows, `method` gives back what is only waited for, or kept for later.

        A bound method, held weakly: its object owns this one.
        """
        self._reclaim = weakref.WeakMethod(method)

    def lend(self, nbytes: int, *, grow: bool = False) -> SwapBuffer | None:
        """A buffer of `nbytes` bytes (dtype uint8); None when the budget is used up and `grow` is False.

        `grow` is for what cannot do without: where giving back elsewhere does not help, it takes memory above
        the budget and warns once with the numbers.

        Raises:
            ValueError: the manager is closed, or `nbytes` is negative.
        """
        if not self._finalizer.alive:
            raise ValueError("the swap buffer manager is closed")
        if nbytes < 0:
            raise ValueError(f"a buffer cannot have {nbytes} B")
        buffer = self._cut_within_budget(nbytes)
        if buffer is not None or not grow:
            return buffer
        reclaim = self._reclaim and self._reclaim()
        if reclaim is not None:
            reclaim()
            buffer = self._cut_within_budget(nbytes)
        if buffer is None:
            self._warn_growth(nbytes)
            self._add_slab(nbytes)
            buffer = self._cut(nbytes)
        return buffer

    def allocate(self, num_elems: int, count: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
        """`count` buffers of `num_elems` elements each, or None when the budget does not hold them all."""
        _check_elements(num_elems)
        buffers: list[torch.Tensor] = []
        for _ in range(count):
            lent = self.lend(num_elems * dtype.itemsize)
            if lent is None:
                self.free(buffers)
                return None
            buffers.append(lent.view(num_elems, dtype))
        return buffers

    def allocate_all(self, num_elems: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """As many buffers of `num_elems` elements as the budget still holds."""
        _check_elements(num_elems)
        buffers: list[torch.Tensor] = []
        while (lent := self.lend(num_elems * dtype.itemsize)) is not None:
            buffers.append(lent.view(num_elems, dtype))
        return buffers

    def free(self, buffers: Sequence[torch.Tensor]) -> None:
        """Give back what `allocate` returned; ValueError for anything else."""
        for buffer in buffers:
            slab, arena = self._slab_of(buffer)
            arena.free(buffer.data_ptr() - slab.data_ptr())

    def close(self) -> None:
        """Free all memory through the handle; a second call does nothing."""
        self._finalizer()

    def _cut_within_budget(self, nbytes: int) -> SwapBuffer | None:
        return self._cut(nbytes) or (self._cut(nbytes) if self._make_room(nbytes) else None)

    def _cut(self, nbytes: int) -> SwapBuffer | None:
        for slab, arena in self._slabs:
            offset = arena.allocate(nbytes)
            if offset is not None:
                view = slab.narrow(0, offset, nbytes)
                return SwapBuffer(view, release=partial(arena.free, offset))
        return None

    def _make_room(self, nbytes: int) -> bool:
        """Add a slab within the budget, if need be after giving idle ones back."""
        wanted = align_up(max(nbytes, 1))
        if wanted > self.free_nbytes:
            return False
        if self.nbytes + wanted > self.budget_nbytes:
            idle = [entry for entry in self._slabs if entry[1].idle]
            self._slabs[:] = [entry for entry in self._slabs if not entry[1].idle]
            _free_slabs(idle, self.aio_handle, self.lock)
        room = self.budget_nbytes - self.nbytes
        if wanted > room:
            return False  # free, but in pieces
        self._add_slab(max(wanted, min(room, SLAB_NBYTES)))
        return True

    def _add_slab(self, nbytes: int) -> None:
        nbytes = align_up(nbytes)
        self._slabs.append((self._new_slab(nbytes), Arena(nbytes)))

    def _new_slab(self, nbytes: int) -> torch.Tensor:
        if not self.lock:
            return pinned.new(nbytes, lock=False)
        try:
            return self.aio_handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        except OffloadMemoryError:
            return pinned.new(nbytes, strict=False)  # beyond the limit: unlocked, with one warning for all

    def _slab_of(self, buffer: torch.Tensor) -> tuple[torch.Tensor, Arena]:
        for slab, arena in self._slabs:
            if slab.data_ptr() <= buffer.data_ptr() < slab.data_ptr() + arena.nbytes:
                return slab, arena
        raise ValueError(f"a buffer of {buffer.nbytes} B does not come from this manager")

    def _warn_growth(self, nbytes: int) -> None:
        if self._warned:
            return
        self._warned = True
        in_use = self.budget_nbytes - self.free_nbytes
        warnings.warn(
            f"swap buffers: {nbytes} B more are needed while {in_use} of {self.budget_nbytes} B are in use; "
            f"more memory is taken. Raise {self.key} to have it counted from the start",
            OffloadWarning,
            stacklevel=4,
        )


def _check_elements(num_elems: int) -> None:
    """An empty tensor has no address, so nobody could give it back."""
    if num_elems < 1:
        raise ValueError(f"a buffer cannot have {num_elems} elements")


def _free_slabs(slabs: list[tuple[torch.Tensor, Arena]], handle: LockedMemoryHandle, lock: bool) -> None:
    while slabs:
        slab, _ = slabs.pop()
        with suppress(ValueError):  # a transfer that nobody waited for uses it: it goes with its last view
            if lock and handle.is_pinned(slab):
                handle.free_cpu_locked_tensor(slab)
            elif pinned.is_managed(slab):
                pinned.free(slab)


__all__ = ["LockedMemoryHandle", "SwapBuffer", "SwapBufferManager", "SwapBufferPool"]
