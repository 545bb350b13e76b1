"""ZeRO-3's optimizer with swapped sub-groups stepped in chunks."""

import math
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist

from offload.errors import OffloadConfigError
from offload.runtime.gradients import HostGradients, StorageGradients
from offload.runtime.model_parameters import ModelParameters
from offload.runtime.space import trainable
from offload.runtime.step_rules import StepRule, format_refusal, refusal, rule_for
from offload.runtime.streamed_step import StreamedStep
from offload.runtime.zero3 import OffloadZeroOptimizer
from offload.swap.dtypes import DTYPES
from offload.swap.encoded_optimizer_swapper import EncodedOptimizerSwapper
from offload.swap.formats import FORMATS
from offload.swap.host_memory import available_nbytes, give_back_freed
from offload.swap.stored_gradients import sum_of_squares
from offload.swap.streamed_optimizer_swapper import StreamedOptimizerSwapper


class StreamedZeroOptimizer(OffloadZeroOptimizer):
    """Gradients keep the dtype they arrive in, in host memory or on storage; state streams past them once.

    Optimizers without a streamed kernel go through the whole-sub-group swappers of the base class.
    """

    optimizer_swapper: Any
    device: Any
    offload_optimizer_pin_memory: bool
    _streamed_step: StreamedStep | None = None
    _gradients: HostGradients | None = None
    _host_gradient_nbytes = 0
    _stored: StorageGradients | None = None
    _stores_gradients = False
    _grad_scale = 1.0
    _finite = True

    # -- building

    def _stored_gradient_nbytes(
        self, optimizer: Any, master_dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> int:
        if not self._swap_config.offload_optimizer.on_nvme:
            return 0
        wanted, reason = self._swap_config.offload.gradients, refusal(optimizer, master_dtype)
        if reason is not None:
            if wanted == "nvme":
                raise OffloadConfigError(f'offload.gradients is "nvme", but {reason}; set it to "host"')
            return super()._stored_gradient_nbytes(optimizer, master_dtype, gradient_dtype)
        numel = sum(getattr(param, "ds_numel", param.numel()) for param in trainable(optimizer))
        nbytes = numel * gradient_dtype.itemsize // comm.get_world_size()
        too_large = nbytes > available_nbytes() // 2
        self._stores_gradients = wanted == "nvme" or (wanted == "auto" and too_large)
        self._host_gradient_nbytes = 0 if self._stores_gradients else nbytes
        return gradient_dtype.itemsize if self._stores_gradients else 0

    def _cache_nbytes(self) -> int:
        """Bytes of the host cache; `auto` is half of what the gradients will leave free."""
        setting = self._swap_config.offload.host_cache
        if setting != "auto":
            return setting
        return max(0, available_nbytes() - self._host_gradient_nbytes) // 2

    def _setup_for_real_optimizer(self) -> None:
        give_back_freed()
        device, pins = self.device, self.offload_optimizer_pin_memory
        try:
            super()._setup_for_real_optimizer()
        finally:
            self.device, self.offload_optimizer_pin_memory = device, pins
        if self._stored is not None:
            self._place_small_gradients()

    def _place_small_gradients(self) -> None:
        """Sub-groups too small to be streamed keep their gradients in host memory."""
        params = [
            p for index, group in enumerate(self.fp16_groups) for p in group if not self._streamed(index)
        ]
        numels = [param.partition_numel() for param in params]
        flat = torch.zeros(sum(numels), dtype=self.gradient_accumulation_dtype, device=self.device)
        if self.offload_optimizer_pin_memory:
            flat = get_accelerator().pin_memory(flat)
        self.grad_partitions_flat_buffer = flat
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {
            param.ds_id: part for param, part in zip(params, torch.split(flat, numels), strict=True)
        }

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:
        reason = refusal(self.optimizer, self.master_weights_and_grads_dtype)
        rule = rule_for(self.optimizer, self.master_weights_and_grads_dtype)
        self._check_state_format(rule, reason)
        if rule is None:
            log_dist(f"offload: optimizer state moves by whole sub-groups, because {reason}", ranks=[0])
            super()._configure_tensor_swapping(offload_optimizer_config, aio_config)
            return
        model = ModelParameters(self)
        state_format = self._swap_config.offload.state_format
        kind = StreamedOptimizerSwapper if state_format == "fp32" else EncodedOptimizerSwapper
        extra: dict[str, Any] = {} if state_format == "fp32" else {"model": model}
        self.optimizer_swapper = kind(
            state_format=FORMATS[state_format](rule.state_names),
            buffer_bytes=self._swap_config.offload.buffer_bytes,
            cache_bytes=self._cache_nbytes(),
            model_itemsize=self.dtype.itemsize,
            gradient_dtype=self.gradient_accumulation_dtype if self._stores_gradients else None,
            **extra,
            **self._swapper_arguments(),
        )
        self.offload_optimizer_fast_init = True  # the other way holds a whole sub-group in float32
        if self._stores_gradients:
            self._stored = StorageGradients(self, model)
        self._gradients = self._stored or HostGradients(self, model)
        self._streamed_step = StreamedStep(self, rule, model, self._gradients, state_format)

    def _check_state_format(self, rule: StepRule | None, not_streamed: str | None) -> None:
        wanted = self._swap_config.offload.state_format
        if wanted == "fp32":
            return
        reason, possible = not_streamed or format_refusal(self.dtype), "fp32"
        if reason is None and rule is not None and wanted not in rule.kernels:
            reason, possible = f"{type(self.optimizer).__name__} has no kernel for it", "split"
        if reason is not None:
            raise OffloadConfigError(
                f'offload.state_format is "{wanted}", but {reason}; set it to "{possible}"'
            )

    def initialize_optimizer_states(self) -> None:
        if self._streamed_step is None:
            super().initialize_optimizer_states()
            return
        for index, fp32 in enumerate(self.fp32_partitioned_groups_flat):
            if self._streamed(index):
                continue
            gradient = torch.zeros(fp32.numel(), dtype=fp32.dtype, device=self.device)
            if self.offload_optimizer_pin_memory:
                gradient = get_accelerator().pin_memory(gradient)
            fp32.grad = gradient
            if self.fp16_partitioned_groups_flat[index] is None:
                self._partitioned_params_swap_out(index)
        if self._stored is not None:  # a buffer for all of them is what DeepSpeed allocates next
            self.device, self.offload_optimizer_pin_memory = torch.device("meta"), False

    def _streamed(self, index: int) -> bool:
        return self._streamed_step is not None and self._swappable_optimizer_subgroup(index)

    # -- gradients

    def _offload_grad_partition_at_boundary(
        self, param: Any, grad_buffer: torch.Tensor, gradients: dict[int, Any], offsets: dict[int, Any]
    ) -> None:
        index, _, _ = self.grad_position[self.get_param_id(param)]
        if not self._streamed(index):
            super()._offload_grad_partition_at_boundary(param, grad_buffer, gradients, offsets)
            return
        self._handed_over.add(param.ds_id)
        self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(grad_buffer)
        self._start_pass()

    def _hand_over_leftovers(self) -> None:
        super()._hand_over_leftovers()
        if self._gradients is not None:
            self._forget_overridden(self._gradients)

    def _forget_overridden(self, gradients: HostGradients) -> None:
        """What was set before the window's last backward ended gives way to the gradients that came, as in
        DeepSpeed."""
        for param in (param for group in self.fp16_groups for param in group):
            overridden = self.has_gradient(param) and gradients.set_by_user.pop(param.ds_id, None) is not None
            if overridden:
                total = sum_of_squares(gradients.of(param))
                self.norm_for_param_grads[self.get_param_id(param)] = self._norm(total)

    def _start_pass(self) -> None:
        """State is read while backward runs, or at the latest when the step begins."""
        if not self.optimizer_swapper.stream.active:
            self.optimizer_swapper.start_pass()

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        if self._stored is None:
            return super().partition_grads(params_to_release, grad_partitions)
        self._begin_window()
        small = []
        for param, partition in zip(params_to_release, grad_partitions, strict=True):
            if self._streamed(self.grad_position[self.get_param_id(param)][0]):
                self._store_gradient(self._stored, param, partition)
            else:
                small.append((param, partition))
        return super().partition_grads([param for param, _ in small], [partition for _, partition in small])

    def _store_gradient(self, stored: StorageGradients, param: Any, partition: torch.Tensor) -> None:
        param.grad = None
        if param.partition_numel() * self._get_param_partition_rank(param) >= param.ds_numel:
            return  # this rank has padding only
        total = stored.put(param, partition, first=self.micro_step_id == 0)
        self._offload_boundary_param_ids.add(param.ds_id)
        self._handed_over.add(param.ds_id)
        self.norm_for_param_grads[self.get_param_id(param)] = self._norm(total)
        if self.is_gradient_accumulation_boundary():
            self._start_pass()

    def _constant_buffered_norm2(self, input: torch.Tensor, buffer_size: int = 250000000) -> torch.Tensor:
        """Norm of one gradient, in one pass over it; notes on the way whether all of it is finite."""
        if input.device.type != "cpu" or input.dtype not in DTYPES or not input.is_contiguous():
            norm: torch.Tensor = super()._constant_buffered_norm2(input, buffer_size)
            self._finite = self._finite and bool(torch.isfinite(norm))
            return norm
        return self._norm(sum_of_squares(input))

    def _norm(self, sum_of_squares: float) -> torch.Tensor:
        self._finite = self._finite and math.isfinite(sum_of_squares)
        return torch.tensor(math.sqrt(sum_of_squares), dtype=torch.float32)

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether any rank met a gradient that is not finite; seen already while the norms were computed."""
        if self._streamed_step is None or not partition_gradients:
            return bool(super().has_overflow(partition_gradients))
        device = get_accelerator().current_device_name()
        overflow = torch.tensor([not self._finite], dtype=torch.uint8, device=device)
        comm.all_reduce(overflow, op=comm.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=overflow, op=comm.ReduceOp.MAX)
        return bool(overflow.item())

    def _zero_missing_gradients(self) -> None:
        if self._stored is not None:
            self.optimizer_swapper.stored_gradients.flush()  # before anything counts this step
        super()._zero_missing_gradients()

    def _has_grad_partition(self, index: int) -> bool:
        return self._stored is None or not self._streamed(index)

    def _end_window(self) -> None:
        super()._end_window()
        self._finite = True
        if self._gradients is not None:
            self._gradients.end_window()

    # -- the step

    def _prepare_sub_group(self, sub_group_id: int, timer_names: set[str]) -> None:
        if not self._streamed(sub_group_id):
            super()._prepare_sub_group(sub_group_id, timer_names)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        if not self._streamed(sub_group_id):
            super().unscale_and_clip_grads(sub_group_id, total_norm)
            return
        combined_scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            combined_scale = torch.clamp(clip, min=1.0) * self.loss_scale
        self._grad_scale = float(1.0 / combined_scale)

    def _optimizer_step(self, sub_group_id: int) -> None:
        if self._streamed_step is None or not self._streamed(sub_group_id):
            super()._optimizer_step(sub_group_id)
            return
        self._start_pass()
        self._streamed_step.step_group(sub_group_id, self._grad_scale)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        if not self._streamed(sub_group_id):
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)

    def _release_sub_group(self, sub_group_id: int, timer_names: set[str]) -> None:
        if not self._streamed(sub_group_id):
            super()._release_sub_group(sub_group_id, timer_names)

    def step(self, closure: Any = None) -> None:
        try:
            super().step(closure)
        except BaseException as failure:
            if self._streamed_step is not None:
                self.optimizer_swapper.stream.abandon(failure)
            raise

    def _post_step(self, timer_names: set[str]) -> None:
        if self._streamed_step is not None and self.params_in_nvme_and_cpu:
            self.optimizer_swapper.stream.finish()  # what comes next reads the parameters
        super()._post_step(timer_names)

    # -- access between steps

    def _optimizer_states_and_gradient_swap_in(self, sub_group_id: int, timer_names: Any = None) -> None:
        if not self._streamed(sub_group_id):
            super()._optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        index, _, _ = self.grad_position[self.get_param_id(param)]
        if self._gradients is None or not self._streamed(index):
            return super()._get_fp32_grad_state_partition(param, release_swap_buffers)
        values = self._gradients.of(param)
        if not release_swap_buffers:
            self._gradients.set_by_user[param.ds_id] = values  # the caller writes into it
        return values, index

    def _writeback_swap_state(self, sub_group_id: int, write_opt_state: bool, write_gradients: bool) -> None:
        if not self._streamed(sub_group_id):
            super()._writeback_swap_state(sub_group_id, write_opt_state, write_gradients)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Any]) -> None:
        if self._streamed_step is None:
            super().update_fp32_grad_for_param_vectorized(update_func, param_list)
            return
        for param in (param for param in param_list if param.requires_grad):
            self.set_fp32_grad_for_param(update_func(self.get_fp32_grad_for_param(param), param), param)

    def unread_state(self, index: int) -> dict[str, torch.Tensor]:
        if self._streamed_step is None:
            return {}
        zeros = torch.zeros(1).expand(int(self.fp16_partitioned_groups_flat_numel[index]))  # 4 bytes in all
        return dict.fromkeys(self._streamed_step.rule.unread_names, zeros)

    def partition_places(self, index: int) -> list[tuple[Any, tuple[int, int]]]:
        """A sub-group's parameters, each with offset and number of elements of its partition."""
        places = []
        offset = 0
        for param, partition in zip(
            self.fp16_groups[index], self.fp16_partitioned_groups[index], strict=True
        ):
            places.append((param, (offset, partition.ds_numel)))
            offset += partition.ds_numel
        return places
