"""What DeepSpeed's operator builders hand out: its names and meanings, our handle underneath.

`read` and `write` block here and take `validate`, as there; on `AsyncIOHandle` they give tickets.
"""

import errno
import os
import threading
from types import SimpleNamespace

import torch

from offload.errors import io_error
from offload.io import pinned
from offload.io.file import File
from offload.io.handle import AsyncIOHandle, Target
from offload.io.tickets import Ticket


class aio_handle(AsyncIOHandle):
    """DeepSpeed's class: its defaults, its blocking `read` and `write`, device tensors through the host."""

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._given_block_size = block_size
        self._landings: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._landings_lock = threading.Lock()

    def get_block_size(self) -> int:
        """As it was given; blocks smaller than the device's are rounded up."""
        return self._given_block_size

    def read(  # type: ignore[override]
        self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0
    ) -> int:
        self.sync_pread(buffer, filename, file_offset)
        if validate:
            _compare(buffer, filename, file_offset)
        return 0

    def write(  # type: ignore[override]
        self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0
    ) -> int:
        self.sync_pwrite(buffer, filename, file_offset)
        if validate:
            _compare(buffer, filename, file_offset)
        return 0

    def wait(self, timeout: float | None = None) -> int:
        nfinished = super().wait(timeout)
        with self._landings_lock:
            landings, self._landings = self._landings, []
        for device_tensor, host_tensor in landings:
            device_tensor.copy_(host_tensor)
        return nfinished

    def _start(
        self, writing: bool, tensor: torch.Tensor, file: Target, offset: int, private: bool = False
    ) -> Ticket:
        if tensor.device.type == "cpu":
            return super()._start(writing, tensor, file, offset, private)
        if writing:
            return super()._start(True, tensor.cpu().contiguous(), file, offset, private)
        host_tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
        ticket = super()._start(False, host_tensor, file, offset, private)
        with self._landings_lock:
            self._landings.append((tensor, host_tensor))
        return ticket


class pin_handle:
    """Page-locked tensors without a handle for I/O."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        return pinned.new(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        pinned.free(locked_tensor)
        return True

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        pinned.free_at(address)
        return True

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return pinned.is_pinned(buffer)


def aio_read(
    buffer: torch.Tensor,
    filename: str | os.PathLike[str],
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """One blocking read with a handle of its own."""
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.read(buffer, os.fspath(filename), validate)


def aio_write(
    buffer: torch.Tensor,
    filename: str | os.PathLike[str],
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """One blocking write with a handle of its own."""
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.write(buffer, os.fspath(filename), validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copies all of `src`."""
    if dest.numel() != src.numel():
        raise ValueError(f"deepspeed_memcpy: {src.numel()} elements into a tensor of {dest.numel()}")
    dest.copy_(src.view_as(dest))
    return 0


def _compare(tensor: torch.Tensor, filename: str, offset: int) -> None:
    """`validate`: the file, read again and past the direct path, holds what the tensor holds."""
    wanted = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    found = torch.empty_like(wanted)
    with AsyncIOHandle(backend="posix") as handle, File(filename, direct=False) as file:
        handle.read(found, file, offset).wait()
    if torch.equal(wanted, found):
        return
    first = int(torch.nonzero(wanted != found)[0])
    raise io_error(
        errno.EIO,
        f"validate: byte {offset + first} of the file differs from the tensor",
        filename,
        offset=offset,
        nbytes_wanted=wanted.numel(),
        nbytes_moved=first,
    )


async_io_op = SimpleNamespace(
    aio_handle=aio_handle, aio_read=aio_read, aio_write=aio_write, deepspeed_memcpy=deepspeed_memcpy
)
"""Stands for the module that `AsyncIOBuilder().load()` gives."""

pin_memory_op = SimpleNamespace(pin_handle=pin_handle)
"""Stands for the module that `PinMemoryBuilder().load()` gives."""
