"""The CPU Adam operator that DeepSpeed otherwise compiles on first use, served from the extension."""

import logging
from typing import Any

import torch

from offload import _C
from offload.runtime.operands import check_operands
from offload.swap.dtypes import DTYPES

logger = logging.getLogger(__name__)


class CpuAdamOperator:
    """Stands in for the module `CPUAdamBuilder().load()` returns; names and arguments are DeepSpeed's."""

    def __init__(self) -> None:
        self._adamw_modes: dict[int, bool] = {}
        self._isa = _C.supported_isas()[-1]

    def create_adam(
        self,
        opt_id: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        adamw_mode: bool,
        should_log: bool,
    ) -> int:
        """Registers an optimizer. Only `adamw_mode` outlives the call: every step brings the other values."""
        self._adamw_modes[opt_id] = adamw_mode
        if should_log:
            settings = f"lr={lr:g}, betas=({beta1:g}, {beta2:g}), {eps=:g}, {weight_decay=:g}, {adamw_mode=}"
            logger.info("CPU Adam %d uses the %s kernel: %s", opt_id, self._isa.name, settings)
        return 0

    def destroy_adam(self, opt_id: int) -> int:
        """Forgets an optimizer; unknown ids pass, because finalisers call this."""
        self._adamw_modes.pop(opt_id, None)
        return 0

    def adam_update(
        self,
        opt_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        *tensors: torch.Tensor,
    ) -> int:
        """One step on params, grads, exp_avg, exp_avg_sq; `step` counts from 1 and includes this one."""
        options = self._options(opt_id, (lr, beta1, beta2, eps, weight_decay), bias_correction)
        _C.adam_step(options, step, _buffers(*tensors), torch.get_num_threads(), self._isa)
        return 0

    def adam_rollback(
        self,
        opt_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        *tensors: torch.Tensor,
    ) -> int:
        """Undoes the step that brought params, exp_avg, exp_avg_sq to `step`, within float32 rounding."""
        options = self._options(opt_id, (lr, beta1, beta2, eps, weight_decay), bias_correction)
        _C.adam_rollback(options, step, _buffers(*tensors), torch.get_num_threads())
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("zenflow_adam_"):
            return getattr(_stock_operator(), name)
        raise AttributeError(f"offload's CPU Adam operator has no {name!r}")

    def _options(self, opt_id: int, numbers: tuple[float, ...], bias_correction: bool) -> _C.AdamOptions:
        if opt_id not in self._adamw_modes:
            raise ValueError(f"no CPU Adam optimizer has the id {opt_id}; create_adam comes first")
        lr, beta1, beta2, eps, weight_decay = map(float, numbers)
        return _C.AdamOptions(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=self._adamw_modes[opt_id],
            bias_correction=bool(bias_correction),
        )


def _buffers(
    params: torch.Tensor, grads: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> _C.AdamBuffers:
    check_operands("CPU Adam", params, grads=grads, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    if exp_avg.dtype != exp_avg_sq.dtype:
        raise ValueError(f"CPU Adam: moments of two dtypes, {exp_avg.dtype} and {exp_avg_sq.dtype}")
    return _C.AdamBuffers(
        param=params.data_ptr(),
        grad=grads.data_ptr(),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        numel=params.numel(),
        param_dtype=DTYPES[params.dtype],
        grad_dtype=DTYPES[grads.dtype],
        state_dtype=DTYPES[exp_avg.dtype],
    )


def _stock_operator() -> Any:
    """DeepSpeed's own operator, compiled by it if need be: ZenFlow's worker pool is not served from here."""
    from deepspeed.ops.adam.cpu_adam import CPUAdamBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    return OpBuilder.load(CPUAdamBuilder())


cpu_adam_operator = CpuAdamOperator()
