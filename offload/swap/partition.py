"""One parameter's partition: where it lies on storage and, for the moment, in memory."""

from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle, Ticket
from offload.swap.buffers import SwapBuffer
from offload.swap.layout import Extent
from offload.swap.stats import METER
from offload.swap.transfers import first_failure, naming, placeholder, wait_all

KIND = "parameters"


@dataclass
class Partition:
    """The states ZeRO-3 tells apart (NOT_AVAILABLE, INFLIGHT, AVAILABLE) are kept on `param.ds_tensor`.

    `buffer` is held while the values are in memory or on their way; a write gives it back when it is done.
    When a write fails, the values stay in memory, `unsaved`, until `retry_write` succeeds or new ones come.
    """

    param: Any
    numel: int
    dtype: torch.dtype
    extent: Extent
    handle: AsyncIOHandle
    buffer: SwapBuffer | None = None
    reading: Ticket | None = None
    writing: Ticket | None = None
    unsaved: bool = False

    @property
    def available(self) -> bool:
        """Whether the values are in memory and no transfer uses them."""
        return self.buffer is not None and self.reading is None and self.writing is None

    @property
    def in_use(self) -> bool:
        """Whether the gathered parameter is being filled from the partition, or is a view of it."""
        if self.param.ds_tensor is None or self.param.ds_status.name == "INFLIGHT":
            return True
        if self.buffer is None or not self.param.data.numel():
            return False
        start = self.buffer.buffer.data_ptr()
        return bool(start <= self.param.data.data_ptr() < start + self.extent.nbytes)

    def values(self) -> torch.Tensor:
        """The partition's memory, as the parameter's dtype."""
        if self.buffer is None:
            raise ValueError(f"{self.extent.key} is not in memory")
        return self.buffer.view(self.numel, self.dtype)

    def start_read(self, buffer: SwapBuffer) -> None:
        """Start reading into `buffer`; when that is refused, the buffer goes back at once."""
        self.buffer = buffer
        try:
            with naming(f"reading {self.extent.key}"):
                self.reading = self.handle.read(self.values(), self.extent.path, self.extent.offset)
        except BaseException:
            self._release()
            raise
        METER.read(KIND, self.extent.nbytes)
        self._set_status("INFLIGHT")

    def finish_read(self) -> None:
        """Wait for the read, if one is under way; a failed one leaves the parameter swapped out."""
        if self.reading is None:
            return
        failure = first_failure([(f"reading {self.extent.key}", self.reading)], KIND)
        self.reading = None
        if failure is not None:
            self.drop()
            raise failure
        self._set_available()

    def start_write(self) -> None:
        """Start writing; the values count as swapped out, unless that is refused."""
        try:
            with naming(f"writing {self.extent.key}"):
                self.writing = self.handle.write(self.values(), self.extent.path, self.extent.offset)
        except OffloadIOError:
            self._keep()
            raise
        METER.written(KIND, self.extent.nbytes)
        self._set_swapped_out()

    def finish_write(self) -> None:
        """Wait for the write, if one is under way, and give the memory back."""
        if self.writing is None:
            return
        failure = first_failure([(f"writing {self.extent.key}", self.writing)], KIND)
        self.writing = None
        if failure is not None:
            self._keep()
            raise failure
        self.unsaved = False
        self._release()

    def retry_write(self) -> None:
        """Write again what could not be written, unless the gathered parameter needs it just now."""
        if self.unsaved and self.writing is None and not self.in_use:
            self.start_write()

    def read_into(self, destination: torch.Tensor) -> None:
        """Read the values into the caller's own memory; the parameter stays where it is."""
        self.finish_write()
        if self.unsaved:
            destination.copy_(self.values())
            return
        with naming(f"reading {self.extent.key}"):
            ticket = self.handle.read(destination, self.extent.path, self.extent.offset)
        METER.read(KIND, self.extent.nbytes)
        wait_all([(f"reading {self.extent.key}", ticket)], KIND)

    def forget(self) -> None:
        """Drop a copy of what is on storage that nobody uses."""
        if self.buffer is not None and self.writing is None and not self.unsaved and not self.in_use:
            self.drop()

    def drop(self) -> None:
        """Give the memory and the values in it up, after waiting for transfers that still use it."""
        for ticket in (self.reading, self.writing):
            if ticket is not None:
                first_failure([(self.extent.key, ticket)], KIND)  # nobody will miss what it moved
        self.reading = self.writing = None
        self.unsaved = False
        self._release()
        self._set_swapped_out()

    def _keep(self) -> None:
        self.unsaved = True
        self._set_available()

    def _release(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.release()

    def _set_available(self) -> None:
        if self.param.ds_tensor is None:
            return  # the partition is only being made
        self.param.ds_tensor.data = self.values()
        self._set_status("AVAILABLE")

    def _set_swapped_out(self) -> None:
        if self.param.ds_tensor is None:
            return
        self.param.ds_tensor.data = placeholder(self.dtype)
        self._set_status("NOT_AVAILABLE")

    def _set_status(self, name: str) -> None:
        tensor = self.param.ds_tensor
        tensor.status = type(tensor.status)[name]
