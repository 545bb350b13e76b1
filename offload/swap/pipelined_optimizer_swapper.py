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
    ) -> None:
        aio_handle = as_aio_config(aio_config).build_handle(backend=backend)
        super().__init__(
            swap_config, aio_config, base_folder, optimizer, largest_numel, device, dtype, timers, aio_handle
        )
        self._reads_ahead = bool(swap_config.pipeline_read)
        self._writes_behind = bool(swap_config.pipeline_write)

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
        group = self._group(parameter)
        if group is None or group.resident:
            return
        if not group.reading and not self._start_fetch(group, grow=False):
            self._finish_stores()
            self._drop_read_ahead(group)
            self._start_fetch(group, grow=True)
        self._finish_fetch(group)
        ahead = None if async_parameter is None else self._group(async_parameter)
        if self._reads_ahead and ahead is not None and not ahead.resident and not ahead.reading:
            self._start_fetch(ahead, grow=False)

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool = False) -> None:
        group = self._group(parameter)
        if group is None:
            return
        self._start_store(group)
        if not (self._writes_behind and async_swap):
            self._finish_stores()

    def _finish_stores(self) -> None:
        for group in self.swap_params_info.values():
            self._finish_store(group)

    def _drop_read_ahead(self, wanted: SubGroup | None = None) -> None:
        for group in self.swap_params_info.values():
            if group is not wanted and group.reading:
                self._cancel_fetch(group)
