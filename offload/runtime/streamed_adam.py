"""The arithmetic of a streamed step: one fused pass per chunk, from gradient to model parameter."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from offload import _C
from offload.io import Ticket
from offload.runtime.model_parameters import ModelParameters
from offload.runtime.operands import DTYPES
from offload.swap.chunk import Chunk
from offload.swap.formats import FormatName, scale_of
from offload.swap.stream import Slot
from offload.swap.sub_group import MASTER

if TYPE_CHECKING:
    from offload.runtime.streamed_zero3 import StreamedZeroOptimizer

STATE_NAMES = ("exp_avg", "exp_avg_sq")

_Kernel = tuple[Callable[..., None], Any, torch.Tensor]


def refusal(optimizer: Any, master_dtype: torch.dtype) -> str | None:
    """Why this optimizer cannot be streamed; None when it can."""
    if type(optimizer).__name__ != "DeepSpeedCPUAdam":
        return f"{type(optimizer).__name__} has no streamed kernel"
    if not optimizer.fp32_optimizer_states or master_dtype != torch.float32:
        return "its state is not float32"
    return None


def format_refusal(state_format: FormatName, model_dtype: torch.dtype) -> str | None:
    """Why state cannot be kept in this format; None when it can."""
    if state_format == "fp32" or model_dtype == torch.bfloat16:
        return None
    return f"a {str(model_dtype).removeprefix('torch.')} parameter is not the upper half of its master weight"


class StreamedAdam:
    """Steps chunks of one ZeRO-3 optimizer with Adam or AdamW."""

    def __init__(
        self, zero: "StreamedZeroOptimizer", model: ModelParameters, state_format: FormatName
    ) -> None:
        self._zero = zero
        self._model = model
        self._kernel = {"fp32": self._fp32, "split": self._split, "8bit": self._eight_bit}[state_format]
        self._isa = _C.supported_isas()[-1]
        starts = torch.tensor([0, *zero.fp16_partitioned_groups_flat_numel]).cumsum(0)
        self._gradient_starts = [int(start) for start in starts]
        self.set_gradients: dict[int, torch.Tensor] = {}
        """Gradients that the user has set, by `ds_id`: exact, whatever dtype the others arrive in."""

    def step_group(self, index: int, grad_scale: float) -> None:
        """Step sub-group `index`; `grad_scale` undoes the loss scale and clips.

        Raises:
            OffloadIOError: naming the tensor that could not be read or written.
        """
        zero = self._zero
        parameter = zero.fp32_partitioned_groups_flat[index]
        state = zero.optimizer.state[parameter]
        state["step"] = state.get("step", 0) + 1
        options = self._options(zero.optimizer.param_groups[zero.sub_group_to_group_id[index]])

        def compute(chunk: Chunk, slot: Slot) -> Sequence[tuple[str, Ticket]]:
            gradient = self._gradient(index, chunk)
            common = {
                "grad": gradient.data_ptr(),
                "grad_dtype": DTYPES[gradient.dtype],
                "grad_scale": grad_scale,
                "numel": chunk.numel,
            }
            kernel, buffers, model = self._kernel(chunk, slot, common)
            kernel(options, state["step"], buffers, torch.get_num_threads(), self._isa)
            return self._model.store(chunk, model)

        zero.optimizer_swapper.step_group(parameter, compute)

    def _fp32(self, chunk: Chunk, slot: Slot, common: dict[str, Any]) -> _Kernel:
        """The kernel for one chunk, its buffers, and where it leaves the model parameters."""
        model = self._model.room(chunk, slot)
        buffers = _C.AdamBuffers(
            param=slot.view(MASTER).data_ptr(),
            exp_avg=slot.view("exp_avg").data_ptr(),
            exp_avg_sq=slot.view("exp_avg_sq").data_ptr(),
            param_dtype=_C.Dtype.float32,
            state_dtype=_C.Dtype.float32,
            param_out=model.data_ptr(),
            param_out_dtype=DTYPES[model.dtype],
            **common,
        )
        return _C.adam_step, buffers, model

    def _split(self, chunk: Chunk, slot: Slot, common: dict[str, Any]) -> _Kernel:
        model = self._model.values(chunk, slot)
        buffers = _C.SplitBuffers(
            param16=model.data_ptr(),
            residual=slot.view(MASTER).data_ptr(),
            exp_avg=slot.view("exp_avg").data_ptr(),
            exp_avg_sq=slot.view("exp_avg_sq").data_ptr(),
            **common,
        )
        return _C.adam_step_split, buffers, model

    def _eight_bit(self, chunk: Chunk, slot: Slot, common: dict[str, Any]) -> _Kernel:
        model = self._model.values(chunk, slot)
        buffers = _C.EightBitBuffers(
            param16=model.data_ptr(),
            residual=slot.view(MASTER).data_ptr(),
            exp_avg8=slot.view("exp_avg").data_ptr(),
            exp_avg8_scale=slot.view(scale_of("exp_avg")).data_ptr(),
            exp_avg_sq8=slot.view("exp_avg_sq").data_ptr(),
            exp_avg_sq8_scale=slot.view(scale_of("exp_avg_sq")).data_ptr(),
            **common,
        )
        return _C.adam_step_8bit, buffers, model

    def gradient_of(self, param: Any) -> torch.Tensor:
        """A float32 copy of this rank's part of a parameter's gradient."""
        set_by_user = self.set_gradients.get(param.ds_id)
        source = set_by_user if set_by_user is not None else self._zero.grad_partition(param)
        return source.to(torch.float32, copy=True)

    def _options(self, group: dict[str, Any]) -> _C.AdamOptions:
        beta1, beta2 = group["betas"]
        return _C.AdamOptions(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled_weight_decay=bool(self._zero.optimizer.adam_w_mode),
            bias_correction=bool(group["bias_correction"]),
        )

    def _gradient(self, index: int, chunk: Chunk) -> torch.Tensor:
        """The chunk's gradient where it lies in host memory, in the dtype it arrived in."""
        flat = self._zero.grad_partitions_flat_buffer
        gradient: torch.Tensor = flat.narrow(0, self._gradient_starts[index] + chunk.start, chunk.numel)
        if not self.set_gradients:
            return gradient
        patched = gradient.to(torch.float32, copy=True)
        for param, first, last, skipped in self._model.pieces(chunk):
            values = self.set_gradients.get(param.ds_id)
            if values is not None:
                patched[first:last] = values[skipped : skipped + last - first]
        return patched
