"""Memory that tensors stand in while they are not on storage."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import torch

from offload.swap.layout import Extent


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
