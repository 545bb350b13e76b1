"""Moves parameter partitions between storage and a small arena; ZeRO-3 drives it parameter by parameter."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadConfigError, OffloadIOError
from offload.swap.area import SwapArea
from offload.swap.arena import ALIGNMENT, align_up
from offload.swap.buffers import SwapBuffer, SwapBufferManager
from offload.swap.layout import Extent, SwapFile
from offload.swap.partition import KIND, Partition
from offload.swap.stats import METER
from offload.swap.transfers import MIN_SWAPPABLE_NBYTES, as_aio_config, rank

KEY = "zero_optimization.offload_param.buffer_count or buffer_size"
RESERVED_NBYTES = 16 << 20
"""What the optimizer's initialisation borrows: enough to keep a drive busy."""


class AsyncPartitionedParameterSwapper:
    """The parameter swapper that `deepspeed.zero.Init` and ZeRO-3 call.

    `buffer_count * buffer_size` elements of the old configuration are the arena that partitions are cut from,
    each to its own size. Prefetching stays within it; what a module needs at once may go beyond, with a
    warning.

    Args:
        ds_config: has `zero_config.offload_param` and `aio_config`, as DeepSpeed's own config does.
        model_dtype: dtype of the parameters.
        backend: I/O backend of the handle.
        checksums: whether reads are compared with what was written.
    """

    def __init__(
        self, ds_config: Any, model_dtype: torch.dtype, *, backend: str = "auto", checksums: bool = False
    ) -> None:
        config = ds_config.zero_config.offload_param
        aio_config = as_aio_config(ds_config.aio_config)
        self.dtype = model_dtype
        self.swap_element_size = model_dtype.itemsize
        self.min_aio_bytes = max(MIN_SWAPPABLE_NBYTES, aio_config.block_size)
        self.aio_handle = aio_config.build_handle(backend, checksums)
        self.swap_buffer_manager = SwapBufferManager(
            config.buffer_size,
            config.buffer_count,
            model_dtype,
            self.aio_handle,
            lock=config.pin_memory,
            key=KEY,
        )
        self.swap_buffer_manager.reclaim_with(self._give_back)
        self._area = SwapArea(config.nvme_path, "parameters", rank())
        self.swap_folder = str(self._area.path)
        self._file = SwapFile(Path(self.swap_folder) / "parameters.swp")
        self._partitions: dict[int, Partition] = {}
        self._reserved: list[SwapBuffer] = []
        self._kept_nbytes = 0

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Whether a partition is large enough to live on storage; a smaller one stays in memory, counted."""
        if (param is None) == (numel is None):
            raise ValueError("give either a parameter or a number of elements")
        elements: int = numel if numel is not None else param.ds_tensor.ds_numel
        if elements * self.swap_element_size >= self.min_aio_bytes:
            return True
        self._keep_in_memory(elements * self.swap_element_size)
        return False

    def _keep_in_memory(self, nbytes: int) -> None:
        self._kept_nbytes += nbytes
        METER.keep_in_memory(KIND, nbytes)

    def available_swap_in_buffers(self) -> int:
        """How many more partitions of the largest size fit the arena: ZeRO-3 prefetches no more."""
        largest = max((partition.extent.nbytes for partition in self._partitions.values()), default=1)
        return self.swap_buffer_manager.free_nbytes // largest

    def get_path(self, param: Any, must_exist: bool = False) -> Extent:
        """The extent of `param`, complete on storage.

        Raises:
            KeyError: `param` was never swapped out.
            OffloadIOError: it could not be written.
        """
        partition = self._partitions[param.ds_id]
        partition.finish_write()
        partition.retry_write()
        partition.finish_write()
        return partition.extent

    def on_storage(self, param: Any) -> bool:
        """Whether `param` lives on storage, also while a copy is in memory."""
        return self._swapped(param) is not None

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Memory for a new partition of `numel` elements, which `swap_out_and_release` will write."""
        partition = self._partitions.get(param.ds_id)
        if partition is None:
            key = f"parameter {param.ds_id} ({numel} elements)"
            extent = self._file.allocate(numel * self.swap_element_size, key)
            partition = self._partitions[param.ds_id] = Partition(
                param, numel, self.dtype, extent, self.aio_handle
            )
        partition.buffer = partition.buffer or self._lend(partition)
        return partition.values()

    def swap_out_and_release(
        self, params: Sequence[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Start writing the partitions; from now on their values are on storage, and the memory follows."""
        for param in params:
            self._partitions[param.ds_id].start_write()

    def swap_in(self, params: Sequence[Any], async_op: bool = True) -> None:
        """Read partitions; without `async_op` they and all earlier reads are in memory when it returns.

        With `async_op` it is a prefetch: partitions that do not fit the arena's free part are left for later.
        """
        for param in params:
            partition = self._partitions[param.ds_id]
            if partition.buffer is not None and partition.writing is None:
                continue
            partition.finish_write()
            nbytes = partition.extent.nbytes
            buffer = self.swap_buffer_manager.lend(nbytes) if async_op else self._lend(partition)
            if buffer is None:
                break
            partition.start_read(buffer)
        if not async_op:
            self.synchronize_reads()

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Read a partition into the caller's own CPU memory; the parameter stays swapped out."""
        self._partitions[param.ds_id].read_into(dest_buffer)

    def synchronize_reads(self) -> None:
        """Wait for the reads; their partitions are then available.

        Raises:
            OffloadIOError: naming the parameter; it is swapped out as before, the other reads are finished.
        """
        self._finish(Partition.finish_read)

    def synchronize_writes(self) -> None:
        """Wait for the writes, those that failed before tried once more, and take their memory back.

        Raises:
            OffloadIOError: naming the parameter that could not be written; its values stay in memory.
        """
        self._finish(Partition.finish_write)
        self._finish(Partition.retry_write)
        self._finish(Partition.finish_write)

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Forget the copies in memory; what is on storage stays.

        A partition that the gathered parameter is a view of (one rank, CPU), or that a gather still reads,
        keeps its memory until the parameter is partitioned again.
        """
        for param in params:
            partition = self._partitions.get(param.ds_id)
            if partition is not None:
                partition.forget()

    def drop_prefetched(self) -> None:
        """Forget partitions that were read ahead and not used: an optimizer step makes them stale."""
        for partition in self._partitions.values():
            partition.forget()

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Write new values, converted to the parameters' dtype, over the old ones."""
        for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
            partition = self._partitions[param.ds_id]
            partition.drop()
            partition.buffer = self._lend(partition)
            partition.values().copy_(source)
            partition.start_write()

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Nothing to reserve: new values leave through the same arena, one partition at a time."""

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """Lend a part of the arena to the optimizer's initialisation, which reads partitions through it."""
        nbytes = min(RESERVED_NBYTES, align_up(self.swap_buffer_manager.free_nbytes // 2))
        buffer = self.swap_buffer_manager.lend(max(nbytes, ALIGNMENT), grow=True)
        if buffer is None:
            return []
        self._reserved.append(buffer)
        return [buffer.view(buffer.buffer.nbytes // self.swap_element_size, self.dtype)]

    def release_reserved_buffers(self) -> None:
        while self._reserved:
            self._reserved.pop().release()

    def read_partition(self, param: Any) -> torch.Tensor:
        """A copy of a partition's current values in ordinary memory, wherever they are."""
        partition = self._swapped(param)
        if partition is None or partition.available:
            copy: torch.Tensor = param.ds_tensor.detach().cpu().clone()
            return copy
        values = torch.empty(partition.numel, dtype=self.dtype)
        partition.read_into(values)
        return values

    def write_partition(self, param: Any, values: torch.Tensor) -> None:
        """Replace a partition's values, wherever they are."""
        if self._swapped(param) is None:
            param.ds_tensor.data.copy_(values)
            return
        self.swap_out_partitioned_params([param], [values])

    def close(self) -> None:
        """Finish what is under way and give up memory, descriptors and files; a second call does nothing."""
        with ExitStack() as stack:  # whatever fails on the way, the rest is done; last in, first out
            stack.callback(self._area.close)
            stack.callback(self.swap_buffer_manager.close)
            stack.callback(self.aio_handle.close)  # drains: from here on no transfer uses the memory
            stack.callback(self.release_reserved_buffers)
            self._keep_in_memory(-self._kept_nbytes)
            for partition in self._partitions.values():
                if partition.in_use:
                    partition.param.data = partition.param.data.clone()  # a view of memory that goes away now
                if partition.buffer is not None:
                    partition.drop()

    def _swapped(self, param: Any) -> Partition | None:
        """None for a parameter that lives in memory: a small one, or one DeepSpeed moved there for good."""
        return self._partitions.get(param.ds_id) if param.ds_tensor.final_location == "nvme" else None

    def _lend(self, partition: Partition) -> SwapBuffer:
        nbytes, budget = partition.extent.nbytes, self.swap_buffer_manager.budget_nbytes
        if nbytes > budget:
            raise OffloadConfigError(
                f"{partition.extent.key} needs {nbytes} B, all parameter buffers have {budget} B; raise {KEY}"
            )
        buffer = self.swap_buffer_manager.lend(nbytes, grow=True)
        if buffer is None:
            raise OffloadConfigError(
                f"{partition.extent.key} needs {nbytes} B, which are not to be had; raise {KEY}"
            )
        return buffer

    def _give_back(self) -> None:
        self._finish(Partition.finish_write)

    def _finish(self, verb: Callable[[Partition], None]) -> None:
        """Finish every partition's transfer, also after one failed; then raise the first error."""
        first: OffloadIOError | None = None
        for partition in self._partitions.values():
            try:
                verb(partition)
            except OffloadIOError as error:
                first = first or error
        if first is not None:
            raise first
