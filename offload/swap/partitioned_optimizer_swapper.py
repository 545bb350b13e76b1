"""The optimizer swapper without overlap: read, step, write, one sub-group after the other."""

from typing import Any

import torch

from offload.swap.optimizer_swapper import OptimizerSwapper
from offload.swap.transfers import as_aio_config


class PartitionedOptimizerSwapper(OptimizerSwapper):
    """Waits for every transfer before it returns."""

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

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
        group = self._group(parameter)
        if group is None:
            return
        self._mover.start_fetch(group, grow=True)
        self._mover.finish_fetch(group)

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool = False) -> None:
        group = self._group(parameter)
        if group is None:
            return
        self._mover.start_store(group)
        self._mover.finish_store(group)
