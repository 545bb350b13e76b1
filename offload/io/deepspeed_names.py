"""DeepSpeed's method names on our handle: its argument order, its return values, our errors."""

import os

import torch

from offload.io import pinned
from offload.io.tickets import Ledger, Ticket

Path = str | os.PathLike[str]


class DeepSpeedNames:
    """What scripts written for `aio_handle` call. `async_*` give 0, the next `wait()` gives their number;
    `sync_*` wait for everything that is queued, as there, and give the number. A failure raises.
    """

    _ledger: Ledger
    _block_size: int
    _queue_depth: int
    _single_submit: bool
    _overlap_events: bool
    _intra_op_parallelism: int

    def _start(
        self, writing: bool, tensor: torch.Tensor, file: Path | int, offset: int, private: bool
    ) -> Ticket:
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> int:
        raise NotImplementedError

    def async_pread(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        self._start(False, buffer, filename, file_offset, False)
        return 0

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: Path | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Takes an open file's descriptor in place of the name, or as `fd`."""
        target = filename if fd is None else fd
        if target is None or (filename is not None and fd is not None):
            raise TypeError("give either a filename or the descriptor fd of an open file")
        self._start(True, buffer, target, file_offset, False)
        return 0

    def sync_pread(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        return self._finish(self._start(False, buffer, filename, file_offset, True))

    def sync_pwrite(self, buffer: torch.Tensor, filename: Path | int, file_offset: int = 0) -> int:
        return self._finish(self._start(True, buffer, filename, file_offset, True))

    def pread(
        self, buffer: torch.Tensor, filename: Path, validate: bool, async_op: bool, file_offset: int = 0
    ) -> int:
        """`validate` changes nothing: every completion is looked at anyway."""
        if async_op:
            return self.async_pread(buffer, filename, file_offset)
        return self.sync_pread(buffer, filename, file_offset)

    def pwrite(
        self, buffer: torch.Tensor, filename: Path, validate: bool, async_op: bool, file_offset: int = 0
    ) -> int:
        """`validate` changes nothing: every completion is looked at anyway."""
        if async_op:
            return self.async_pwrite(buffer, filename, file_offset)
        return self.sync_pwrite(buffer, filename, file_offset)

    def _finish(self, ticket: Ticket) -> int:
        ticket.wait()
        return 1 + self.wait()

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: torch.Tensor, *, strict: bool = True
    ) -> torch.Tensor:
        """A page-locked tensor of the example's dtype; not `strict`: the lock limit only costs the lock."""
        return pinned.new(num_elem, example_tensor.dtype, strict=strict)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        pinned.free(tensor)
        return True

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return pinned.is_pinned(buffer)

    def get_block_size(self) -> int:
        return self._block_size

    def get_queue_depth(self) -> int:
        return self._queue_depth

    def get_single_submit(self) -> bool:
        return self._single_submit

    def get_overlap_events(self) -> bool:
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """Buffers of any size are taken; multiples of this move without the page cache."""
        return 4096
