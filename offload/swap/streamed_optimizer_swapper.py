"""The optimizer swapper for elementwise optimizers: the step runs on chunks, in constant memory."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from offload.errors import OffloadIOError
from offload.swap.buffers import SwapBufferManager
from offload.swap.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from offload.swap.stream import Compute, Stream
from offload.swap.sub_group import MASTER, SubGroup
from offload.swap.transfers import placeholder


class StreamedOptimizerSwapper(PartitionedOptimizerSwapper):
    """Streams the step through `buffer_bytes` of memory, whatever the size of model and sub-groups.

    Outside the step a sub-group's state is read and written in pieces, with `read_state` and `write_state`.

    Args:
        state_names: the optimizer's state tensors, each of one fp32 value per weight.
        buffer_bytes: all memory of the optimizer path.
        model_itemsize: bytes of one model parameter.
        others: as `PartitionedOptimizerSwapper`.
    """

    def __init__(
        self, *, state_names: Sequence[str], buffer_bytes: int, model_itemsize: int, **others: Any
    ) -> None:
        self._buffer_bytes = buffer_bytes
        self.state_names = tuple(state_names)
        super().__init__(**others)
        names = (MASTER, *self.state_names)
        self.stream = Stream(
            self.aio_handle, self.swap_buffer_manager, names, self.dtype.itemsize, model_itemsize
        )

    def _make_manager(self) -> SwapBufferManager:
        return SwapBufferManager(
            self._buffer_bytes,
            1,
            torch.uint8,
            self.aio_handle,
            lock=self.swap_config.pin_memory,
            key="offload.buffer_bytes",
        )

    def start_pass(self) -> None:
        """Start reading the first chunks; the gradients may still be on their way."""
        self.stream.start(list(self.swap_params_info.values()))

    def step_group(self, parameter: Any, compute: Compute) -> None:
        """Step the next sub-group of the pass chunk by chunk.

        Raises:
            OffloadIOError: naming the tensor.
        """
        group = self.swap_params_info[self.parameter_id(parameter)]
        self._create_state(group)
        self.stream.run(group, compute)

    def close(self) -> None:
        try:
            self.stream.close()
        finally:
            super().close()

    def _settle(self, group: SubGroup) -> None:
        self.stream.finish()
        super()._settle(group)

    def _drop_reads(self, group: SubGroup) -> None:
        self.stream.cancel()
        super()._drop_reads(group)

    def _discard(self, group: SubGroup) -> None:
        with suppress(OffloadIOError):  # nobody will miss what could not be written
            self.stream.cancel()
        super()._discard(group)

    def _register(self, parameter: Any, numel: int) -> SubGroup:
        """Reserve room for the state at once: a drive that is too small must not be found out in a step."""
        group = super()._register(parameter, numel)
        for name in self.state_names:
            group.swapped_tensor(name, self.dtype)
        return group

    def _create_state(self, group: SubGroup) -> None:
        """Make place for state that does not exist yet; its first values are written by the step itself."""
        state = self.optimizer.state[group.parameter]
        for name in self.state_names:
            if name not in group.swapped:
                group.swapped_tensor(name, self.dtype)
            if name not in state:
                state[name] = placeholder(self.dtype)
