"""The CPU Lion and CPU Adagrad operators that DeepSpeed otherwise compiles on first use."""

import logging

import torch

from offload import _C
from offload.runtime.operands import check_operands
from offload.swap.dtypes import DTYPES

logger = logging.getLogger(__name__)


class _Registry:
    """Which optimizers exist. Every step brings all its values, so their ids are all there is to know."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._ids: set[int] = set()
        self.isa = _C.supported_isas()[-1]

    def add(self, opt_id: int, should_log: bool, settings: str) -> int:
        self._ids.add(opt_id)
        if should_log:
            logger.info("%s %d uses the %s kernel: %s", self._who, opt_id, self.isa.name, settings)
        return 0

    def discard(self, opt_id: int) -> int:
        """Unknown ids pass, because finalisers call this."""
        self._ids.discard(opt_id)
        return 0

    def check(self, opt_id: int) -> None:
        if opt_id not in self._ids:
            raise ValueError(f"no {self._who} optimizer has the id {opt_id}; create it first")


class CpuLionOperator:
    """Stands in for the module `CPULionBuilder().load()` returns; names and arguments are DeepSpeed's."""

    def __init__(self) -> None:
        self._registry = _Registry("CPU Lion")

    def create_lion(
        self, opt_id: int, lr: float, beta1: float, beta2: float, weight_decay: float, should_log: bool
    ) -> int:
        settings = f"lr={lr:g}, betas=({beta1:g}, {beta2:g}), {weight_decay=:g}"
        return self._registry.add(opt_id, should_log, settings)

    def destroy_lion(self, opt_id: int) -> int:
        return self._registry.discard(opt_id)

    def lion_update(
        self,
        opt_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        *tensors: torch.Tensor,
    ) -> int:
        """One step on params, grads, exp_avg; `step` counts from 1 and includes this one."""
        self._registry.check(opt_id)
        params, grads, exp_avg = tensors
        grads = grads.contiguous()
        check_operands("CPU Lion", params, grads=grads, exp_avg=exp_avg)
        options = _C.LionOptions(
            lr=float(lr), beta1=float(beta1), beta2=float(beta2), weight_decay=float(weight_decay)
        )
        buffers = _buffers(params, grads, exp_avg)
        _C.lion_step(options, step, buffers, torch.get_num_threads(), self._registry.isa)
        return 0


class CpuAdagradOperator:
    """Stands in for the module `CPUAdagradBuilder().load()` returns; names and arguments are DeepSpeed's."""

    def __init__(self) -> None:
        self._registry = _Registry("CPU Adagrad")

    def create_adagrad(
        self, opt_id: int, lr: float, eps: float, weight_decay: float, should_log: bool
    ) -> int:
        return self._registry.add(opt_id, should_log, f"lr={lr:g}, {eps=:g}, {weight_decay=:g}")

    def destroy_adagrad(self, opt_id: int) -> int:
        return self._registry.discard(opt_id)

    def adagrad_update(
        self,
        opt_id: int,
        step: int,
        lr: float,
        eps: float,
        weight_decay: float,
        *tensors: torch.Tensor,
    ) -> int:
        """One step on params, grads, exp_avg_sq, the sum of squares; the values alone of sparse ones."""
        self._registry.check(opt_id)
        params, grads, exp_avg_sq = tensors
        grads = grads.contiguous()
        check_operands("CPU Adagrad", params, grads=grads, exp_avg_sq=exp_avg_sq)
        options = _C.AdagradOptions(lr=float(lr), eps=float(eps), weight_decay=float(weight_decay))
        buffers = _buffers(params, grads, exp_avg_sq)
        _C.adagrad_step(options, step, buffers, torch.get_num_threads(), self._registry.isa)
        return 0


def _buffers(params: torch.Tensor, grads: torch.Tensor, state: torch.Tensor) -> _C.SingleStateBuffers:
    return _C.SingleStateBuffers(
        param=params.data_ptr(),
        grad=grads.data_ptr(),
        state=state.data_ptr(),
        numel=params.numel(),
        param_dtype=DTYPES[params.dtype],
        grad_dtype=DTYPES[grads.dtype],
        state_dtype=DTYPES[state.dtype],
    )


cpu_lion_operator = CpuLionOperator()
cpu_adagrad_operator = CpuAdagradOperator()
