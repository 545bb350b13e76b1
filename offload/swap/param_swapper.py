"""Moves parameter partitions between storage and a small arena; ZeRO-3 drives it parameter by parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadConfigError, OffloadIOError
from offload.io import Ticket
from offload.swap.area import SwapArea
from offload.swap.buffers import SwapBuffer, SwapBufferManager
from offload.swap.layout import Extent, SwapFile
from offload.swap.stats import METER
from offload.swap.transfers import MIN_SWAPPABLE_NBYTES, as_aio_config, naming, placeholder, rank, wait_all

KIND = "parameters"
KEY = "zero_optimization.offload_param.buffer_count or buffer_size"


@dataclass
class _Slot:
    """One parameter's partition: where it lies on storage and, for the moment, in memory."""

    param: Any
    numel: int
    extent: Extent
    buffer: SwapBuffer | None = None
    reading: Ticket | None = None
    writing: Ticket | None = None


class AsyncPartitionedParameterSwapper:
    """The parameter swapper that `deepspeed.zero.Init` and ZeRO-3 call.

    `buffer_count * buffer_size` elements of the old configuration are the arena that partitions are cut from,
    each to its own size. Prefetching stays within it; what a module needs at once may go beyond, with a warning.

    Args:
        ds_config: has `zero_config.offload_param` and `aio_config`, as DeepSpeed's own config does.
        model_dtype: dtype of the parameters.
        backend: I/O backend of the handle.
    """

    def __init__(self, ds_config: Any, model_dtype: torch.dtype, *, backend: str = "auto") -> None:
        config = ds_config.zero_config.offload_param
        aio_config = as_aio_config(ds_config.aio_config)
        self.dtype = model_dtype
        self.swap_element_size = model_dtype.itemsize
        self.min_aio_bytes = max(MIN_SWAPPABLE_NBYTES, aio_config.block_size)
        self.aio_handle = aio_config.build_handle(backend=backend)
        self.swap_buffer_manager = SwapBufferManager(
            config.buffer_size, config.buffer_count, model_dtype, self.aio_handle, lock=config.pin_memory, key=KEY
        )
        self._area = SwapArea(config.nvme_path, "parameters", rank())
        self.swap_folder = str(self._area.path)
        self._file = SwapFile(Path(self.swap_folder) / "parameters.swp")
        self._slots: dict[int, _Slot] = {}
        self._reserved: list[SwapBuffer] = []

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Whether a partition is large enough to live on storage; smaller ones stay in memory and are counted."""
        if (param is None) == (numel is None):
            raise ValueError("give either a parameter or a number of elements")
        elements = param.ds_tensor.ds_numel if param is not None else numel
        if elements * self.swap_element_size >= self.min_aio_bytes:
            return True
        METER.keep_in_memory(KIND, elements * self.swap_element_size)
        return False

    def available_swap_in_buffers(self) -> int:
        """How many more partitions of the largest size the arena holds; ZeRO-3 prefetches no more than these."""
        largest = max((slot.extent.nbytes for slot in self._slots.values()), default=1)
        return self.swap_buffer_manager.free_nbytes // largest

    def get_path(self, param: Any, must_exist: bool = False) -> Extent:
        """The extent of `param`, complete on storage.

        Raises:
            KeyError: `param` was never swapped out.
        """
        slot = self._slots[param.ds_id]
        self._finish_write(slot)
        return slot.extent

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Memory for a new partition of `numel` elements, which `swap_out_and_release` will write."""
        slot = self._slots.get(param.ds_id)
        if slot is None:
            key = f"parameter {param.ds_id} ({numel} elements)"
            extent = self._file.allocate(numel * self.swap_element_size, key)
            slot = self._slots[param.ds_id] = _Slot(param, numel, extent)
        slot.buffer = slot.buffer or self._lend(slot)
        return slot.buffer.view(numel, self.dtype)

    def swap_out_and_release(
        self, params: Sequence[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Start writing the partitions; from now on their values are on storage, and the memory follows."""
        for param in params:
            slot = self._slots[param.ds_id]
            if slot.buffer is None:
                raise ValueError(f"{slot.extent.key} is not in memory, so there is nothing to write")
            self._start_write(slot)

    def swap_in(
        self, params: Sequence[Any], async_op: bool = True, swap_in_buffers: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Read partitions; without `async_op` they and all earlier reads are in memory when it returns.

        With `async_op` it is a prefetch: partitions that do not fit the arena's free part are left for later.
        """
        for param in params:
            slot = self._slots[param.ds_id]
            if slot.buffer is not None and slot.writing is None:
                continue
            self._finish_write(slot)
            buffer = self.swap_buffer_manager.lend(slot.extent.nbytes) if async_op else self._lend(slot)
            if buffer is None:
                break
            self._start_read(slot, buffer)
        if not async_op:
            self.synchronize_reads()

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Read a partition into the caller's own CPU memory; the parameter stays swapped out."""
        slot = self._slots[param.ds_id]
        self._finish_write(slot)
        ticket = self.aio_handle.read(dest_buffer, slot.extent.path, slot.extent.offset)
        METER.read(KIND, slot.extent.nbytes)
        wait_all([(f"reading {slot.extent.key}", ticket)], KIND)

    def synchronize_reads(self) -> None:
        """Wait for the reads; their partitions are then available.

        Raises:
            OffloadIOError: naming the parameter; it is swapped out as before, the other reads are finished.
        """
        first: OffloadIOError | None = None
        for slot in [slot for slot in self._slots.values() if slot.reading is not None]:
            try:
                self._finish_read(slot)
            except OffloadIOError as error:
                first = first or error
        if first is not None:
            raise first

    def synchronize_writes(self) -> None:
        """Wait for the writes and take their memory back.

        Raises:
            OffloadIOError: naming the parameter that could not be written.
        """
        first: OffloadIOError | None = None
        for slot in [slot for slot in self._slots.values() if slot.writing is not None]:
            try:
                self._finish_write(slot)
            except OffloadIOError as error:
                first = first or error
        if first is not None:
            raise first

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Forget the copies in memory; what is on storage stays.

        A partition that the gathered parameter is a view of (one rank, CPU), or that a gather still reads,
        keeps its memory until the parameter is partitioned again.
        """
        for param in params:
            slot = self._slots.get(param.ds_id)
            if slot is None or self._in_use(slot):
                continue
            self._drop(slot)

    def drop_prefetched(self) -> None:
        """Forget partitions that were read ahead and not used: after an optimizer step they would be stale."""
        for slot in self._slots.values():
            if slot.buffer is not None and slot.writing is None and not self._in_use(slot):
                self._drop(slot)

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Write new values, converted to the parameters' dtype, over the old ones."""
        for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
            slot = self._slots[param.ds_id]
            self._drop(slot)
            slot.buffer = self._lend(slot)
            slot.buffer.view(slot.numel, self.dtype).copy_(source)
            self._start_write(slot)

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Nothing to reserve: new values leave through the same arena, one partition at a time."""

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """Lend half of the free arena to the optimizer's initialisation."""
        nbytes = max(self.min_aio_bytes, self.swap_buffer_manager.free_nbytes // 2)
        buffer = self.swap_buffer_manager.lend(nbytes - nbytes % self.swap_element_size, grow=True)
        if buffer is None:
            return []
        self._reserved.append(buffer)
        return [buffer.view(buffer.buffer.nbytes // self.swap_element_size, self.dtype)]

    def release_reserved_buffers(self) -> None:
        while self._reserved:
            self._reserved.pop().release()

    def read_partition(self, param: Any) -> torch.Tensor:
        """A copy of a partition's current values in ordinary memory, wherever they are."""
        slot = self._slots.get(param.ds_id)
        if slot is None or (slot.buffer is not None and slot.reading is None and slot.writing is None):
            return param.ds_tensor.detach().cpu().clone()
        values = torch.empty(slot.numel, dtype=self.dtype)
        self.swap_into_buffer(param, values)
        return values

    def write_partition(self, param: Any, values: torch.Tensor) -> None:
        """Replace a partition's values, wherever they are."""
        if param.ds_id not in self._slots:
            param.ds_tensor.data.copy_(values)
            return
        self.swap_out_partitioned_params([param], [values])

    def close(self) -> None:
        """Finish what is under way and give up memory, descriptors and files; a second call does nothing."""
        try:
            self.synchronize_writes()
            self.synchronize_reads()
        finally:
            for slot in self._slots.values():
                if self._in_use(slot):
                    slot.param.data = slot.param.data.clone()  # a view of memory that goes away now
                self._drop(slot)
            self.release_reserved_buffers()
            self.swap_buffer_manager.close()
            self.aio_handle.close()
            self._area.close()

    def _lend(self, slot: _Slot) -> SwapBuffer:
        nbytes, budget = slot.extent.nbytes, self.swap_buffer_manager.budget_nbytes
        if nbytes > budget:
            raise OffloadConfigError(
                f"{slot.extent.key} needs {nbytes} B, but all parameter buffers together have {budget} B; raise {KEY}"
            )
        buffer = self.swap_buffer_manager.lend(nbytes)
        if buffer is None:
            self.synchronize_writes()
            buffer = self.swap_buffer_manager.lend(nbytes)
        if buffer is None:
            self._drop_unused(slot)
            buffer = self.swap_buffer_manager.lend(nbytes, grow=True)
        if buffer is None:
            raise OffloadConfigError(f"{slot.extent.key} needs {nbytes} B and there is no memory for it; raise {KEY}")
        return buffer

    def _drop_unused(self, wanted: _Slot) -> None:
        for slot in self._slots.values():
            idle = slot is not wanted and slot.buffer is not None and slot.reading is None and slot.writing is None
            if idle and slot.param.ds_tensor is not None and not self._in_use(slot):
                self._drop(slot)

    def _in_use(self, slot: _Slot) -> bool:
        """Whether the gathered parameter is being filled from the partition, or is a view of it."""
        param = slot.param
        if param.ds_tensor is None or param.ds_status.name == "INFLIGHT":
            return True
        if slot.buffer is None or not param.data.numel():
            return False
        start = slot.buffer.buffer.data_ptr()
        return bool(start <= param.data.data_ptr() < start + slot.extent.nbytes)

    def _start_read(self, slot: _Slot, buffer: SwapBuffer) -> None:
        slot.buffer = buffer
        view = buffer.view(slot.numel, self.dtype)
        with naming(f"reading {slot.extent.key}"):
            slot.reading = self.aio_handle.read(view, slot.extent.path, slot.extent.offset)
        METER.read(KIND, slot.extent.nbytes)
        self._set_status(slot, "INFLIGHT")

    def _finish_read(self, slot: _Slot) -> None:
        ticket, slot.reading = slot.reading, None
        if ticket is None or slot.buffer is None:
            return
        try:
            wait_all([(f"reading {slot.extent.key}", ticket)], KIND)
        except OffloadIOError:
            self._drop(slot)
            raise
        slot.param.ds_tensor.data = slot.buffer.view(slot.numel, self.dtype)
        self._set_status(slot, "AVAILABLE")

    def _start_write(self, slot: _Slot) -> None:
        if slot.buffer is None:
            return
        view = slot.buffer.view(slot.numel, self.dtype)
        with naming(f"writing {slot.extent.key}"):
            slot.writing = self.aio_handle.write(view, slot.extent.path, slot.extent.offset)
        METER.written(KIND, slot.extent.nbytes)
        self._set_swapped_out(slot)

    def _finish_write(self, slot: _Slot) -> None:
        ticket, slot.writing = slot.writing, None
        if ticket is None:
            return
        buffer, slot.buffer = slot.buffer, None
        try:
            wait_all([(f"writing {slot.extent.key}", ticket)], KIND)
        finally:
            if buffer is not None:
                buffer.release()

    def _drop(self, slot: _Slot) -> None:
        """Give back the memory of a slot, after waiting for transfers that still use it."""
        ticket, slot.reading = slot.reading, None
        self._finish_write(slot)
        buffer, slot.buffer = slot.buffer, None
        try:
            if ticket is not None:
                wait_all([(f"reading {slot.extent.key}", ticket)], KIND)
        finally:
            if buffer is not None:
                buffer.release()
            self._set_swapped_out(slot)

    def _set_swapped_out(self, slot: _Slot) -> None:
        if slot.param.ds_tensor is None:
            return  # the partition is only being made
        slot.param.ds_tensor.data = placeholder(self.dtype)
        self._set_status(slot, "NOT_AVAILABLE")

    @staticmethod
    def _set_status(slot: _Slot, name: str) -> None:
        tensor = slot.param.ds_tensor
        tensor.status = type(tensor.status)[name]
