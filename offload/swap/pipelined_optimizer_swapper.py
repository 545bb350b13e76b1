"""The optimizer swapper with overlap: while one sub-group steps, the next is read and the last written."""

from typing import Any

import torch

from offload.swap.optimizer_swapper import OptimizerSwapper
from offload.swap.sub_group import SubGroup
from offload.swap.transfers import as_aio_config


class PipelinedOptimizerSwapper(OptimizerSwapper):
    """Reads ahead and writes behind as far as the buffers allow; with few of them, not at all."""

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
        *,
        backend: str = "auto",
        checksums: bool = False,
    ) -> None:
        aio_handle = as_aio_config(aio_config).build_handle(backend, checksums)
        super().__init__(
            swap_config, aio_config, base_folder, optimizer, largest_numel, device, dtype, timers, aio_handle
        )
        self._fetching: SubGroup | None = None
        self.swap_buffer_manager.reclaim_with(self._give_back)
        self._reads_ahead = bool(swap_config.pipeline_read)
        self._writes_behind = bool(swap_config.pipeline_write)

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
        group = self._group(parameter)
        if group is None:
            return
        self._fetching = group
        self._mover.start_fetch(group, grow=True)
        self._mover.finish_fetch(group)
        ahead = None if async_parameter is None else self._group(async_parameter)
        if self._reads_ahead and ahead is not None:
            self._mover.start_fetch(ahead, grow=False)

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool = False) -> None:
        group = self._group(parameter)
        if group is None:
            return
        self._mover.start_store(group)
        if not (self._writes_behind and async_swap):
            self._mover.finish_stores(self.swap_params_info.values())

    def _give_back(self) -> None:
        """Wait for the writes behind, then do without what was read ahead."""
        self._mover.finish_stores(self.swap_params_info.values())
        for group in self.swap_params_info.values():
            if group is not self._fetching and group.reading:
                self._mover.cancel_fetch(group)
