"""Moves sub-groups of optimizer state between storage and memory: what all optimizer swappers share."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle
from offload.swap.area import SwapArea
from offload.swap.buffers import SwapBufferManager
from offload.swap.gradients import READ_STAGING_NBYTES, GradientStore
from offload.swap.layout import Extent
from offload.swap.staging import pieces, staging_writer
from offload.swap.stats import METER
from offload.swap.sub_group import MASTER, SubGroup
from offload.swap.sub_group_mover import KIND, SubGroupMover
from offload.swap.tensor_swapper import AsyncTensorSwapper
from offload.swap.transfers import MIN_SWAPPABLE_NBYTES, as_aio_config, naming, rank, wait_all

KEY = "zero_optimization.offload_optimizer.buffer_count"
STAGING_NBYTES = 8 << 20
"""Size of one staging buffer; two of them keep the drive busy while the next piece is converted."""


class OptimizerSwapper:
    """Base of the optimizer swappers; the subclasses decide when transfers are waited for.

    Args:
        swap_config: has `buffer_count` and `pin_memory`, as DeepSpeed's `offload_optimizer` section.
        aio_config: our `AioConfig`, or the mapping that DeepSpeed keeps.
        base_folder: where the swap area goes.
        optimizer: the torch optimizer whose `state` is swapped.
        largest_numel: elements of the largest sub-group.
        device: where the step runs; state is swapped through host memory.
        dtype: dtype of master weights.
        timers: kept for DeepSpeed's call; the time spent waiting is in `offload.stats()`.
        aio_handle: built by the subclass before this constructor runs.
    """

    writes_model = False
    """Whether `replace_state` sets the model parameters too."""

    @staticmethod
    def parameter_id(param: Any) -> Any:
        return param.ds_id

    def __init__(
        self,
        swap_config: Any,
        aio_config: Any,
        base_folder: str,
        optimizer: Any,
        largest_numel: int,
        device: Any,
        dtype: torch.dtype,
        timers: Any,
        aio_handle: AsyncIOHandle,
    ) -> None:
        self.swap_config = swap_config
        self.aio_config = as_aio_config(aio_config)
        self.aio_handle = aio_handle
        self.optimizer = optimizer
        self.dtype = dtype
        self.timers = timers
        self.swap_element_size = dtype.itemsize
        self.largest_numel = largest_numel
        self.min_aio_bytes = max(MIN_SWAPPABLE_NBYTES, self.aio_config.block_size)
        self.swap_buffer_manager = self._make_manager()
        self._area = SwapArea(base_folder, KIND, rank())
        self.swap_folder = str(self._area.path)
        self.swap_params_info: dict[Any, SubGroup] = {}
        self.gradients = GradientStore(aio_handle, self.swap_buffer_manager, self.min_aio_bytes)
        self._lost_write: OffloadIOError | None = None
        self._mover = SubGroupMover(optimizer, aio_handle, self.swap_buffer_manager, self.gradients)

    def _make_manager(self) -> SwapBufferManager:
        return SwapBufferManager(
            self.largest_numel,
            self.swap_config.buffer_count,
            self.dtype,
            self.aio_handle,
            lock=self.swap_config.pin_memory,
            key=KEY,
            staging_nbytes=2 * READ_STAGING_NBYTES,
        )

    def is_swappable_tensor(self, tensor: torch.Tensor | None = None, numel: int | None = None) -> bool:
        """Whether a tensor, or `numel` master weights, is large enough to live on storage."""
        if tensor is not None:
            return bool(getattr(tensor, "swappable", True)) and self.is_swappable_tensor(numel=tensor.numel())
        if numel is None:
            raise ValueError("give either a tensor or a number of elements")
        return numel * self.swap_element_size >= self.min_aio_bytes

    def init_timers(self) -> None:
        """DeepSpeed brackets a step with this; our figures are always on."""

    def log_timers(self) -> None:
        """DeepSpeed brackets a step with this; our figures are in `offload.stats()`."""

    def pre_backward(self) -> None:
        """DeepSpeed brackets backward with this; nothing has to be prepared."""

    def post_backward(self) -> None:
        """DeepSpeed brackets backward with this; nothing has to be finished."""

    def initialize_parameters(self, parameters: Sequence[Any], src_tensors: Sequence[torch.Tensor]) -> None:
        """Write the first master weights, converted from `src_tensors`, and swap the parameters out."""
        with self._staging_writer() as writer:
            for parameter, source in zip(parameters, src_tensors, strict=True):
                group = self._register(parameter, source.numel())
                target = group.swapped_tensor(MASTER, self.dtype)
                writer.swap_out(source, target.extent, target.dtype)

    def initialize_from_swapped_fp16_params(
        self,
        fp16_partitions_info: Sequence[Sequence[tuple[Any, int, Extent | None]]],
        fp16_num_elems: Sequence[int],
        fp16_pinned_buffers: Sequence[torch.Tensor],
        fp32_parameters: Sequence[Any],
    ) -> None:
        """Write the first master weights from 16-bit partitions that are themselves on storage.

        Each entry of `fp16_partitions_info` lists (tensor, elements, extent) of a sub-group's partitions; the
        extent is None for a partition in memory. The first of `fp16_pinned_buffers` stages what is read.
        """
        staging = fp16_pinned_buffers[0]
        with self._staging_writer() as writer:
            for partitions, numel, parameter in zip(
                fp16_partitions_info, fp16_num_elems, fp32_parameters, strict=True
            ):
                group = self._register(parameter, numel)
                target = group.swapped_tensor(MASTER, self.dtype).extent
                done = 0
                for tensor, partition_numel, extent in partitions:
                    for piece in pieces(tensor, partition_numel, extent, staging, self.aio_handle):
                        nbytes = piece.numel() * self.swap_element_size
                        place = Extent(target.path, done * self.swap_element_size, nbytes, target.key)
                        writer.swap_out(piece, place, self.dtype)
                        done += piece.numel()

    def begin_gradient_window(self) -> None:
        """Forget the gradients of the last step; a parameter that gets none in this one has gradient zero."""
        for group in self.swap_params_info.values():
            group.gradients.clear()
            self._mover.drop_gradient(group)
        self.gradients.begin_window()

    def swap_out_gradients(
        self, parameter: Any, gradient_offsets: Sequence[int], gradient_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Start writing gradients of one sub-group, each in the dtype it has; small ones stay in memory."""
        group = self._group(parameter)
        if group is not None:
            self.gradients.swap_out(group, gradient_offsets, gradient_tensors)

    def flush_gradients(self) -> None:
        """Wait until all gradients are on storage."""
        self.gradients.flush()

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
        raise NotImplementedError

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool = False) -> None:
        raise NotImplementedError

    def release_swap_buffers(self, parameter: Any) -> None:
        """Swap a sub-group out without writing it: it was only looked at."""
        group = self._group(parameter)
        if group is not None:
            self._mover.release(group)

    def writeback_optimizer_state_and_gradients(
        self, parameter: Any, write_opt_state: bool, write_gradients: bool
    ) -> None:
        """Swap a changed sub-group out; `write_*` say what changed. What cannot be written stays."""
        group = self._group(parameter)
        if group is None:
            return
        try:
            if write_gradients and parameter.grad is not None:
                self.gradients.write_back(group, parameter.grad)
            if write_opt_state:
                self._mover.start_store(group)
                self._mover.finish_store(group)
        finally:
            self.release_swap_buffers(parameter)

    def keeps(self, name: str) -> bool:
        """Whether the optimizer has a use for a state tensor of that name, should a checkpoint hold one."""
        return True

    def read_state(self, parameter: Any, name: str, offset: int, numel: int) -> torch.Tensor:
        """A copy of `numel` values from `offset` on of a swapped-out sub-group's tensor.

        Raises:
            KeyError: the optimizer has no such state (yet).
        """
        group, place = self._place(parameter, name, offset, numel)
        values = torch.empty(numel, dtype=group.swapped[name].dtype)
        with naming(f"reading {place.key}"):
            ticket = self.aio_handle.read(values, place.path, place.offset)
        wait_all([(f"reading {place.key}", ticket)], KIND)
        METER.read(KIND, place.nbytes)
        return values

    def write_state(self, parameter: Any, name: str, offset: int, values: torch.Tensor) -> None:
        """Write `values` over those from `offset` on of a swapped-out sub-group's tensor."""
        group, place = self._place(parameter, name, offset, values.numel())
        source = values.detach().to("cpu", group.swapped[name].dtype).contiguous()
        try:
            with naming(f"writing {place.key}"):
                ticket = self.aio_handle.write(source, place.path, place.offset)
            wait_all([(f"writing {place.key}", ticket)], KIND)
        except OffloadIOError as failure:
            self._lost_write = self._lost_write or failure
            raise
        METER.written(KIND, place.nbytes)

    def _place(self, parameter: Any, name: str, offset: int, numel: int) -> tuple[SubGroup, Extent]:
        group = self.swap_params_info[self.parameter_id(parameter)]
        self._settle(group)
        self._drop_reads(group)
        swapped = group.swapped[name]
        itemsize = swapped.dtype.itemsize
        start = swapped.extent.offset + offset * itemsize
        return group, Extent(swapped.extent.path, start, numel * itemsize, swapped.extent.key)

    def purge_state(self) -> None:
        """Forget all state but the master weights: a checkpoint is about to replace it."""
        for group in self.swap_params_info.values():
            self._discard(group)
            group.forget_state(keep=())

    def swapped_state(self, parameter: Any) -> Mapping[str, tuple[Extent, torch.dtype]]:
        """Extent and dtype of each tensor of a sub-group, complete on storage, by state name.

        Raises:
            OffloadIOError: it could not be written, now or before.
        """
        group = self.swap_params_info[self.parameter_id(parameter)]
        self._settle(group)
        return {name: (swapped.extent, swapped.dtype) for name, swapped in group.swapped.items()}

    def lost_write(self) -> OffloadIOError | None:
        """The first write that was refused for good: storage has a mix of old state and new ever since."""
        return self._lost_write

    def forget_lost_writes(self) -> None:
        """All state was replaced."""
        self._lost_write = None

    def drop_exports(self) -> None:
        """Remove what `swapped_state` wrote for its caller alone: nothing here."""

    def replace_state(self, parameter: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write `tensors` (keys as in `swapped_state`) over a sub-group's.

        State that the optimizer no longer has is forgotten, other state is kept.

        Raises:
            ValueError: a tensor does not have the sub-group's number of elements.
        """
        group = self.swap_params_info[self.parameter_id(parameter)]
        sources = {name: tensor.detach() for name, tensor in tensors.items()}  # they may be the state's own
        self._discard(group)
        group.forget_state(keep=self.optimizer.state.get(parameter, {}))
        with self._staging_writer() as writer:
            for name, tensor in sources.items():
                if tensor.numel() != group.numel:
                    raise ValueError(f"{group.describe(name)} cannot take {tensor.numel()} elements")
                target = group.swapped_tensor(name, self.dtype if name == MASTER else tensor.dtype)
                writer.swap_out(tensor, target.extent, target.dtype)
        self._mover.release(group)

    def close(self) -> None:
        """Finish what is under way and give up memory, descriptors and files; a second call does nothing."""
        with ExitStack() as stack:  # whatever fails on the way, the rest is done; last in, first out
            stack.callback(self._area.close)
            stack.callback(self.swap_buffer_manager.close)
            stack.callback(self.aio_handle.close)  # drains: from here on no transfer uses the memory
            stack.callback(self.gradients.close)
            for group in self.swap_params_info.values():
                self._discard(group)

    def _settle(self, group: SubGroup) -> None:
        """Bring a sub-group to storage, complete, also one that could not be written before."""
        if group.resident:
            self._mover.start_store(group)
        self._mover.finish_store(group)

    def _drop_reads(self, group: SubGroup) -> None:
        """Do without what was read ahead: it is about to change on storage."""
        self._mover.cancel_fetch(group)

    def _discard(self, group: SubGroup) -> None:
        """Give up what is in memory or on its way: it is about to be replaced."""
        self._mover.discard(group)

    def _register(self, parameter: Any, numel: int) -> SubGroup:
        key = self.parameter_id(parameter)
        if key in self.swap_params_info:
            raise ValueError(f"sub-group {key} is registered already")
        group = SubGroup(len(self.swap_params_info), parameter, numel, Path(self.swap_folder))
        self.swap_params_info[key] = group
        return group

    def _group(self, parameter: Any) -> SubGroup | None:
        return self.swap_params_info.get(self.parameter_id(parameter))

    def _staging_writer(self) -> AbstractContextManager[AsyncTensorSwapper]:
        budget = self.swap_buffer_manager.budget_nbytes
        nbytes = min(STAGING_NBYTES, max(self.min_aio_bytes, budget // 2))
        return staging_writer(self.aio_handle, self.swap_buffer_manager, nbytes, KIND)
