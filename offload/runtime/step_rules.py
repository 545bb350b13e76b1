"""The optimizers whose state streams: for each its tensors, its hyper-parameters and its kernels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.torch_autocast import get_autocast_dtype, is_autocast_initialized

from offload import _C
from offload.errors import OffloadError
from offload.swap.dtypes import DTYPES
from offload.swap.formats import FormatName, scale_of
from offload.swap.slot import Slot
from offload.swap.sub_group import MASTER


class StepRule(ABC):
    """One optimizer's step on chunks of its state."""

    kernels: ClassVar[Mapping[FormatName, Callable[..., None]]]
    """By the formats that the state can be kept in."""

    state_names: tuple[str, ...]
    """The state tensors that the step reads and writes, as the optimizer calls them."""

    unread_names: ClassVar[tuple[str, ...]] = ()
    """State tensors that the optimizer makes, as zeros, and never reads: they are in checkpoints alone."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @classmethod
    def refusal(cls, optimizer: Any) -> str | None:
        """Why an optimizer of this type cannot be streamed; None when it can."""
        return None if optimizer.fp32_optimizer_states else "its state is not float32"

    def names_in(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of `state_names` that the parameters of a group have."""
        return self.state_names

    def count(self, state: dict[str, Any]) -> int:
        """Number of the step that begins, from 1 on; kept where the optimizer keeps it."""
        state["step"] = state.get("step", 0) + 1
        return int(state["step"])

    @abstractmethod
    def options(self, group: Mapping[str, Any]) -> Any:
        """The hyper-parameters of a parameter group, as the kernels take them."""

    @abstractmethod
    def buffers(
        self, state_format: FormatName, slot: Slot, model: torch.Tensor, common: Mapping[str, Any]
    ) -> Any:
        """Where a chunk's weights and state lie; `common` says so of its gradient."""


class AdamRule(StepRule):
    """Adam and AdamW."""

    kernels: ClassVar = {"fp32": _C.adam_step, "split": _C.adam_step_split, "8bit": _C.adam_step_8bit}
    state_names = ("exp_avg", "exp_avg_sq")

    def options(self, group: Mapping[str, Any]) -> _C.AdamOptions:
        beta1, beta2 = group["betas"]
        return _C.AdamOptions(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled_weight_decay=bool(self._optimizer.adam_w_mode),
            bias_correction=bool(group["bias_correction"]),
        )

    def buffers(
        self, state_format: FormatName, slot: Slot, model: torch.Tensor, common: Mapping[str, Any]
    ) -> Any:
        exp_avg, exp_avg_sq = (slot.view(name).data_ptr() for name in self.state_names)
        if state_format == "8bit":
            return _C.EightBitBuffers(
                **_split(slot, model, "param16"),
                exp_avg8=exp_avg,
                exp_avg8_scale=slot.view(scale_of("exp_avg")).data_ptr(),
                exp_avg_sq8=exp_avg_sq,
                exp_avg_sq8_scale=slot.view(scale_of("exp_avg_sq")).data_ptr(),
                **common,
            )
        moments: dict[str, Any] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if state_format == "split":
            return _C.SplitBuffers(**_split(slot, model, "param16"), **moments, **common)
        dtypes: dict[str, Any] = {"param_dtype": _C.Dtype.float32, "state_dtype": _C.Dtype.float32}
        return _C.AdamBuffers(**_whole(slot, model), **moments, **dtypes, **common)


class _SingleStateRule(StepRule):
    """At most one state tensor."""

    def buffers(
        self, state_format: FormatName, slot: Slot, model: torch.Tensor, common: Mapping[str, Any]
    ) -> _C.SingleStateBuffers:
        weights = _split(slot, model, "param") if state_format == "split" else _whole(slot, model)
        state = slot.view(self.state_names[0]).data_ptr() if self.state_names else 0
        return _C.SingleStateBuffers(**weights, state=state, **common)


class LionRule(_SingleStateRule):
    """DeepSpeed's Lion."""

    kernels: ClassVar = {"fp32": _C.lion_step, "split": _C.lion_step}
    state_names = ("exp_avg",)
    unread_names = ("exp_avg_sq",)

    def options(self, group: Mapping[str, Any]) -> _C.LionOptions:
        beta1, beta2 = group["betas"]
        return _C.LionOptions(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
        )


class AdagradRule(_SingleStateRule):
    """DeepSpeed's Adagrad, which keeps the sum of squares as `exp_avg_sq`."""

    kernels: ClassVar = {"fp32": _C.adagrad_step, "split": _C.adagrad_step}
    state_names = ("exp_avg_sq",)

    def options(self, group: Mapping[str, Any]) -> _C.AdagradOptions:
        return _C.AdagradOptions(
            lr=float(group["lr"]), eps=float(group["eps"]), weight_decay=float(group["weight_decay"])
        )


class SgdRule(_SingleStateRule):
    """torch's SGD: no momentum, no state; the first step makes the gradient the momentum."""

    kernels: ClassVar = {"fp32": _C.sgd_step, "split": _C.sgd_step}

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        momentum = any(group["momentum"] != 0 for group in optimizer.param_groups)
        self.state_names = ("momentum_buffer",) if momentum else ()

    @classmethod
    def refusal(cls, optimizer: Any) -> str | None:
        for flag in ("maximize", "differentiable", "fused"):
            if any(group[flag] for group in optimizer.param_groups):
                return f"SGD with {flag} has no streamed kernel"
        return None

    def names_in(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.state_names if group["momentum"] != 0 else ()

    def count(self, state: dict[str, Any]) -> int:
        """SGD counts no steps: all that matters is whether there is a momentum yet."""
        return 1 if state.get("momentum_buffer") is None else 2

    def options(self, group: Mapping[str, Any]) -> _C.SgdOptions:
        if group["momentum"] != 0 and not self.state_names:
            raise OffloadError(
                f"SGD's momentum became {group['momentum']:g}, but no room was made for it, since it was 0 "
                "when the engine was built; build it with the momentum that it will have"
            )
        return _C.SgdOptions(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
        )


_RULES: Mapping[type, type[StepRule]] = {
    DeepSpeedCPUAdam: AdamRule,
    DeepSpeedCPULion: LionRule,
    DeepSpeedCPUAdagrad: AdagradRule,
    torch.optim.SGD: SgdRule,
}


def refusal(optimizer: Any, master_dtype: torch.dtype) -> str | None:
    """Why this optimizer cannot be streamed; None when it can."""
    name, rule = type(optimizer).__name__, _RULES.get(type(optimizer))
    if rule is None:
        amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
        return f"{name}{' with amsgrad' if amsgrad else ''} has no streamed kernel"
    if master_dtype != torch.float32:
        return "its state is not float32"
    if is_autocast_initialized() and get_autocast_dtype() == torch.float16:
        return "torch_autocast with float16 steps whole sub-groups through torch's GradScaler"
    return rule.refusal(optimizer)


def format_refusal(model_dtype: torch.dtype) -> str | None:
    """Why parameters of this dtype allow only the format `fp32`; None when they allow others."""
    if model_dtype == torch.bfloat16:
        return None
    return f"a {str(model_dtype).removeprefix('torch.')} parameter is not the upper half of its master weight"


def rule_for(optimizer: Any, master_dtype: torch.dtype) -> StepRule | None:
    """How this optimizer's state is streamed; None when it cannot be."""
    return None if refusal(optimizer, master_dtype) else _RULES[type(optimizer)](optimizer)


def _whole(slot: Slot, model: torch.Tensor) -> dict[str, Any]:
    return {
        "param": slot.view(MASTER).data_ptr(),
        "param_out": model.data_ptr(),
        "param_out_dtype": DTYPES[model.dtype],
    }


def _split(slot: Slot, model: torch.Tensor, upper: str) -> dict[str, Any]:
    """`upper`: what the buffers call the bfloat16 half."""
    return {upper: model.data_ptr(), "residual": slot.view(MASTER).data_ptr()}
