"""What `safe_get_*` and `safe_set_*` reach between steps, wherever it lives."""

from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from offload.swap.sub_group import MASTER


class StateAccess(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """ZeRO-3's optimizer whose state can be read and set while it is on storage."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._set_by_user: set[int] = set()
        self._edit: tuple[str, int, torch.Tensor] | None = None
        super().__init__(*arguments, **settings)

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        index, offset, numel = self.grad_position[self.get_param_id(param)]
        if not self._swappable_optimizer_subgroup(index):
            values, index = super()._get_fp32_opt_state_partition(
                param, release_swap_buffers, optim_state_key
            )
            return values, index
        fp32 = self.fp32_partitioned_groups_flat[index]
        name = MASTER if optim_state_key is None else optim_state_key
        values = self.optimizer_swapper.read_state(fp32, name, offset, numel)
        if not release_swap_buffers:
            self._edit = (name, offset, values)  # the caller writes into it and then swaps the sub-group out
        return values, index

    def _optimizer_states_and_gradient_swap_out(self, sub_group_id: int, timer_names: Any = None) -> None:
        edit, self._edit = self._edit, None
        if edit is None:
            super()._optimizer_states_and_gradient_swap_out(sub_group_id, timer_names)
            return
        self.optimizer_swapper.write_state(self.fp32_partitioned_groups_flat[sub_group_id], *edit)

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        index, offset, numel = self.grad_position[self.get_param_id(param)]
        if not self._swappable_optimizer_subgroup(index):
            values, index = super()._get_fp32_grad_state_partition(param, release_swap_buffers)
            return values, index
        self._optimizer_states_and_gradient_swap_in(index)
        gradient = self.fp32_partitioned_groups_flat[index].grad
        return self._partition_of(gradient, offset, numel, index, release_swap_buffers), index

    def _partition_of(
        self, source: torch.Tensor, offset: int, numel: int, index: int, release: bool
    ) -> torch.Tensor:
        part = source.detach().narrow(0, offset, numel)
        if not release:
            return part
        copy = part.clone()  # the memory below `part` is lent on as soon as it is released
        self._release_swap_buffers(index)
        return copy

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        super().set_fp32_grad_for_param(value, param)
        self._set_by_user.add(param.ds_id)

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        if not param.requires_grad:
            return
        _check_partition_numel(value, param)
        if self.offload_optimizer:
            self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(value)
        gradient, index = self._get_fp32_grad_state_partition(param, release_swap_buffers=False)
        gradient.data.copy_(value.flatten())
        if self._swappable_optimizer_subgroup(index):
            self._writeback_swap_state(index, write_opt_state=False, write_gradients=True)
        self._set_by_user.add(param.ds_id)

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if not param.requires_grad:
            return
        _check_partition_numel(value, param)
        values, index = self._get_fp32_opt_state_partition(param, False, optim_state_key)
        values.data.copy_(value.flatten())
        if self._swappable_optimizer_subgroup(index):
            self._optimizer_states_and_gradient_swap_out(index)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Any]) -> None:
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)
        self._set_by_user.update(param.ds_id for param in param_list)


def _check_partition_numel(value: torch.Tensor, param: Any) -> None:
    """Stock counts the elements in memory, of which a partition on storage has none."""
    if value.numel() != param.ds_tensor.ds_numel:
        raise ValueError(f"a partition of {param.ds_tensor.ds_numel} elements cannot take {value.numel()}")
