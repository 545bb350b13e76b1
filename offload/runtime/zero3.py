"""ZeRO-3's optimizer with our swappers inside."""

from contextlib import ExitStack
from typing import Any

import torch

from offload.config import read_config
from offload.runtime.space import check_room
from offload.runtime.state_in_checkpoints import StateInCheckpoints
from offload.swap.host_memory import give_back_freed
from offload.swap.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from offload.swap.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from offload.swap.stats import METER
from offload.swap.sub_group_mover import KIND as OPTIMIZER


class OffloadZeroOptimizer(StateInCheckpoints):
    """Routes sub-groups through our swappers and keeps DeepSpeed's behaviour elsewhere, with one difference.

    A parameter that gets no gradient in a step has gradient zero. Stock ZeRO-3 applies the gradient it got in
    an earlier step once more.
    """

    def __init__(
        self, module: Any, init_optimizer: Any, param_names: Any, timers: Any, ds_config: Any, **settings: Any
    ) -> None:
        self._swap_config = read_config(ds_config, probe_storage=False)
        if self._swap_config.uses_nvme:
            half = settings.get("bf16_master_weights_and_gradients") or settings.get(
                "fp16_master_weights_and_gradients"
            )
            gradient_nbytes = self._stored_gradient_nbytes(
                init_optimizer,
                torch.float32 if not half else torch.bfloat16,
                settings["gradient_accumulation_dtype"],
            )
            check_room(self._swap_config, module, init_optimizer, 2 if half else 4, gradient_nbytes)
            torch.distributed.barrier()
        self._in_window = False
        self._handed_over: set[int] = set()
        self._kept_nbytes = 0
        give_back_freed()  # what `zero.Init` made and partitioned
        super().__init__(module, init_optimizer, param_names, timers, ds_config, **settings)
        give_back_freed()
        if self.swap_optimizer:
            numels = self.fp16_partitioned_groups_flat_numel
            small = [
                numel for index, numel in enumerate(numels) if not self._swappable_optimizer_subgroup(index)
            ]
            self._keep_in_memory(sum(small) * self.master_weights_and_grads_dtype.itemsize)

    def _keep_in_memory(self, nbytes: int) -> None:
        """Count master weights of sub-groups that are too small to be worth swapping."""
        self._kept_nbytes += nbytes
        METER.keep_in_memory(OPTIMIZER, nbytes)

    # -- building and closing

    def _stored_gradient_nbytes(
        self, optimizer: Any, master_dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> int:
        """Bytes per weight of gradients that go to the drive."""
        return gradient_dtype.itemsize

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:
        section = self._swap_config.offload_optimizer
        kind = PipelinedOptimizerSwapper if section.pipelined else PartitionedOptimizerSwapper
        self.optimizer_swapper = kind(**self._swapper_arguments())

    def _swapper_arguments(self) -> dict[str, Any]:
        section = self._swap_config.offload_optimizer
        return {
            "swap_config": section,
            "aio_config": self._swap_config.aio,
            "base_folder": str(section.nvme_path),
            "optimizer": self.optimizer,
            "largest_numel": max(self.fp16_partitioned_groups_flat_numel),
            "device": self.device,
            "dtype": self.master_weights_and_grads_dtype,
            "timers": self.timers,
            "backend": self._swap_config.offload.backend,
            "checksums": self._swap_config.offload.checksums,
        }

    def param_swappers(self) -> list[Any]:
        return param_swappers(self.module)

    def destroy(self) -> None:
        """Take DeepSpeed's hooks out, then give up memory, descriptors and swap files."""
        with ExitStack() as stack:  # whatever fails on the way, the rest is done
            if self.optimizer_swapper:
                stack.callback(self.optimizer_swapper.close)
            stack.callback(close_param_swappers, self.module)
            self._keep_in_memory(-self._kept_nbytes)
            super().destroy()

    # -- gradients

    def grad_partition(self, param: Any) -> torch.Tensor:
        """This rank's part of a parameter's gradient, in host memory in the dtype gradients accumulate in."""
        partitions: dict[int, torch.Tensor] = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return partitions[param.ds_id]

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        self._begin_window()
        if self.micro_step_id > 0:
            for param in params_to_release:
                if not self.has_gradient(param):
                    self.grad_partition(param).zero_()  # it is added to; what is there is an older step's
        return super().partition_grads(params_to_release, grad_partitions)

    def _begin_window(self) -> None:
        if self._in_window:
            return
        self._in_window = True
        if self.swap_optimizer:
            self.optimizer_swapper.begin_gradient_window()

    def _offload_grad_partition_at_boundary(
        self, param: Any, grad_buffer: torch.Tensor, gradients: dict[int, Any], offsets: dict[int, Any]
    ) -> None:
        self._handed_over.add(param.ds_id)
        index, offset, _ = self.grad_position[self.get_param_id(param)]
        if not self._swappable_optimizer_subgroup(index):
            super()._offload_grad_partition_at_boundary(param, grad_buffer, gradients, offsets)
            return
        self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(grad_buffer)
        gradients.setdefault(index, []).append(grad_buffer)
        offsets.setdefault(index, []).append(offset)

    def independent_gradient_partition_epilogue(self) -> None:
        super().independent_gradient_partition_epilogue()
        if self.offload_optimizer and self.is_gradient_accumulation_boundary():
            self._hand_over_leftovers()

    def has_gradient(self, param: Any) -> bool:
        """Whether the parameter got a gradient in this accumulation window."""
        return param.ds_id in self._offload_boundary_param_ids

    def _hand_over_leftovers(self) -> None:
        """Parameters that got gradients in this window, but none in its last micro-batch."""
        gradients: dict[int, Any] = {}
        offsets: dict[int, Any] = {}
        for param in (param for group in self.fp16_groups for param in group):
            if self.has_gradient(param) and param.ds_id not in self._handed_over:
                self._offload_grad_partition_at_boundary(
                    param, self.grad_partition(param), gradients, offsets
                )
        self._swap_out_offload_fp32_gradients(gradients, offsets)

    def clear_backward_seen_flag(self) -> None:
        """DeepSpeed calls this before every forward; one that follows a failed backward starts afresh."""
        if self._backward_active_depth or any(bucket.params for bucket in self.ipg_buckets.values()):
            self._abandon_backward()
        super().clear_backward_seen_flag()

    def _abandon_backward(self) -> None:
        """Forget the gradients of an accumulation window whose last backward raised halfway."""
        for bucket in self.ipg_buckets.values():
            bucket.clear_params()
        for param in (param for group in self.fp16_groups for param in group):
            param.grad = None  # zero_grad stumbles over gradients on the CPU
        self._backward_active_depth = 0
        self.zero_grad(set_to_none=True)

    def _zero_missing_gradients(self) -> None:
        for index, group in enumerate(self.fp16_groups):
            in_memory = self.offload_optimizer and not self._swappable_optimizer_subgroup(index)
            for param in (param for param in group if not self.has_gradient(param)):
                is_set = param.ds_id in self._set_by_user
                # Also where the step reads another copy: DeepSpeed looks for overflows in this one.
                if self._has_grad_partition(index) and (self.offload_optimizer or not is_set):
                    self.grad_partition(param).zero_()
                if in_memory and not is_set:
                    _, offset, numel = self.grad_position[self.get_param_id(param)]
                    self.fp32_partitioned_groups_flat[index].grad.narrow(0, offset, numel).zero_()

    def _has_grad_partition(self, index: int) -> bool:
        """Whether gradients of a sub-group accumulate in DeepSpeed's buffer in host memory."""
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._end_window()

    def _end_window(self) -> None:
        self._in_window = False
        self._offload_boundary_param_ids: set[int] = set()
        self._handed_over.clear()
        self._set_by_user.clear()
        if self.offload_optimizer:
            self.norm_for_param_grads: dict[int, torch.Tensor] = {}

    # -- the step

    def step(self, closure: Any = None) -> None:
        self.stepping = False
        try:
            self._zero_missing_gradients()
            super().step(closure)
            for swapper in self.param_swappers():
                swapper.synchronize_writes()
        except BaseException as failure:
            if self.stepping:
                self.tear(failure)
            raise
        finally:
            self._end_window()  # also after a step that failed: its gradients are not those of the next one

    def _optimizer_step(self, sub_group_id: int) -> None:
        self.stepping = True
        super()._optimizer_step(sub_group_id)

    def _partition_all_parameters(self) -> None:
        super()._partition_all_parameters()
        for swapper in self.param_swappers():
            swapper.drop_prefetched()


def param_swappers(module: torch.nn.Module) -> list[Any]:
    """The parameter swappers of a model, each once."""
    swappers = (getattr(param, "nvme_swapper", None) for param in module.parameters())
    return list(dict.fromkeys(swapper for swapper in swappers if swapper is not None))


def close_param_swappers(module: torch.nn.Module) -> None:
    with ExitStack() as stack:  # whatever fails on the way, the rest is done
        for swapper in param_swappers(module):
            stack.callback(swapper.close)
