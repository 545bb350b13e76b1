"""Memory that tensors stand in while they are not on storage."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import torch

from offload.errors import OffloadMemoryError, OffloadWarning
from offload.io import pinned
from offload.swap.arena import ALIGNMENT, Arena, align_up
from offload.swap.layout import Extent

SLAB_NBYTES = 64 << 20
"""Locked memory is taken in pieces of this size as it is needed, so a small model never locks a large arena."""


class LockedMemoryHandle(Protocol):
    """The part of a handle that lends page-locked memory."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor: ...

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool: ...

    def is_pinned(self, tensor: torch.Tensor) -> bool: ...


class SwapBuffer:
    """A locked buffer, or a view of one, that tensors are packed into, each at an aligned offset."""

    def __init__(self, buffer: torch.Tensor, release: Callable[[], None] | None = None) -> None:
        self.buffer = buffer
        self._release = release
        self.reset()

    def reset(self) -> None:
        """Forget what was packed."""
        self.offset = 0
        self._packed: list[tuple[torch.Tensor, torch.Tensor, Extent | str | None]] = []

    def has_space(self, numel: int) -> bool:
        return self.offset + numel <= self.buffer.numel()

    def allocate_tensor(
        self, swap_path: Extent | str | None, numel: int, aligned_numel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A view of `aligned_numel` elements for I/O and, of the same bytes, one of `numel` for arithmetic.

        Raises:
            ValueError: the buffer has less room than that.
        """
        if not self.has_space(aligned_numel):
            room = self.buffer.numel() - self.offset
            raise ValueError(f"{aligned_numel} elements do not fit the {room} that are left in this buffer")
        swap_tensor = self.buffer.narrow(0, self.offset, aligned_numel)
        compute_tensor = swap_tensor.narrow(0, 0, numel)
        self._packed.append((swap_tensor, compute_tensor, swap_path))
        self.offset += aligned_numel
        return swap_tensor, compute_tensor

    def insert_tensor(
        self, tensor: torch.Tensor, swap_path: Extent | str | None, aligned_numel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack a copy of `tensor`, converted to the buffer's dtype."""
        swap_tensor, compute_tensor = self.allocate_tensor(swap_path, tensor.numel(), aligned_numel)
        compute_tensor.copy_(tensor.reshape(-1))
        return swap_tensor, compute_tensor

    def get_swap_tensors(self) -> list[torch.Tensor]:
        return [swap_tensor for swap_tensor, _, _ in self._packed]

    def get_compute_tensors(self) -> list[torch.Tensor]:
        return [compute_tensor for _, compute_tensor, _ in self._packed]

    def get_swap_paths(self) -> list[Extent | str | None]:
        return [path for _, _, path in self._packed]

    def get_num_elem(self) -> int:
        return sum(tensor.numel() for tensor in self.get_compute_tensors())

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of the buffer's bytes, read as `dtype`."""
        return self.buffer.view(torch.uint8).narrow(0, 0, numel * dtype.itemsize).view(dtype)

    def release(self) -> None:
        """Give the memory back to its manager; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> "SwapBuffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SwapBufferPool:
    """Several buffers filled one after the other."""

    def __init__(self, buffers: Sequence[torch.Tensor], aio_handle: LockedMemoryHandle) -> None:
        if not all(aio_handle.is_pinned(buffer) for buffer in buffers):
            raise ValueError("a swap buffer pool takes page-locked buffers only")
        self.buffers = [SwapBuffer(buffer) for buffer in buffers]
        self.current_index = 0

    def reset(self) -> None:
        self.current_index = 0
        for buffer in self.buffers:
            buffer.reset()

    def has_space(self, numel: int) -> bool:
        return self._with_space(numel) is not None

    def allocate_tensor(
        self, numel: int, swap_path: Extent | str | None, aligned_numel: int
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """As `SwapBuffer.allocate_tensor`, in the first buffer with room; (None, None) when all are full."""
        buffer = self._with_space(aligned_numel)
        return (None, None) if buffer is None else buffer.allocate_tensor(swap_path, numel, aligned_numel)

    def insert_tensor(
        self, tensor: torch.Tensor, swap_path: Extent | str | None, aligned_numel: int
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """As `SwapBuffer.insert_tensor`, in the first buffer with room; (None, None) when all are full."""
        buffer = self._with_space(aligned_numel)
        return (None, None) if buffer is None else buffer.insert_tensor(tensor, swap_path, aligned_numel)

    def get_swap_tensors(self) -> list[torch.Tensor]:
        return [tensor for buffer in self.buffers for tensor in buffer.get_swap_tensors()]

    def get_compute_tensors(self) -> list[torch.Tensor]:
        return [tensor for buffer in self.buffers for tensor in buffer.get_compute_tensors()]

    def get_swap_paths(self) -> list[Extent | str | None]:
        return [path for buffer in self.buffers for path in buffer.get_swap_paths()]

    def _with_space(self, numel: int) -> SwapBuffer | None:
        for index in range(self.current_index, len(self.buffers)):
            if self.buffers[index].has_space(numel):
                self.current_index = index
                return self.buffers[index]
        return None


class SwapBufferManager:
    """Cuts buffers of any size from page-locked memory that it owns and frees through the handle.

    `num_elems * count` elements of `dtype` are the budget. It is taken in slabs as it is needed: the first one
    at once, the others when the buffers in use fill what is there.

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

    def lend(self, nbytes: int, *, grow: bool = False) -> SwapBuffer | None:
        """A buffer of `nbytes` bytes (dtype uint8); None when the budget is used up and `grow` is False.

        `grow` is for what cannot wait: it takes memory above the budget and warns once with the numbers.
        """
        buffer = self._cut(nbytes)
        if buffer is None and self._make_room(nbytes):
            buffer = self._cut(nbytes)
        if buffer is None and grow:
            self._warn_growth(nbytes)
            self._add_slab(nbytes)
            buffer = self._cut(nbytes)
        return buffer

    def allocate(self, num_elems: int, count: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
        """`count` buffers of `num_elems` elements each, or None when the budget does not hold them all."""
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

    def _cut(self, nbytes: int) -> SwapBuffer | None:
        for slab, arena in self._slabs:
            offset = arena.allocate(nbytes)
            if offset is not None:
                view = slab.narrow(0, offset, nbytes)
                return SwapBuffer(view, release=lambda arena=arena, offset=offset: arena.free(offset))
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
            return pinned.new(nbytes, strict=False)  # beyond the limit: unlocked, with one warning that says so

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


def _free_slabs(slabs: list[tuple[torch.Tensor, Arena]], handle: LockedMemoryHandle, lock: bool) -> None:
    while slabs:
        slab, _ = slabs.pop()
        if lock and handle.is_pinned(slab):
            handle.free_cpu_locked_tensor(slab)
        elif pinned.is_managed(slab):
            pinned.free(slab)


__all__ = ["ALIGNMENT", "LockedMemoryHandle", "SwapBuffer", "SwapBufferManager", "SwapBufferPool"]
