"""The arithmetic of a streamed step: one fused pass per chunk, from gradient to model parameter."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from offload import _C
from offload.io import Ticket
from offload.runtime.cpu_adam import DTYPES
from offload.swap.stats import METER
from offload.swap.stream import Chunk, Slot
from offload.swap.sub_group import MASTER

if TYPE_CHECKING:
    from offload.runtime.streamed_zero3 import StreamedZeroOptimizer

STATE_NAMES = ("exp_avg", "exp_avg_sq")


def refusal(optimizer: Any, master_dtype: torch.dtype) -> str | None:
    """Why this optimizer cannot be streamed; None when it can."""
    if type(optimizer).__name__ != "DeepSpeedCPUAdam":
        return f"{type(optimizer).__name__} has no streamed kernel"
    if not optimizer.fp32_optimizer_states or master_dtype != torch.float32:
        return "its state is not float32"
    return None


class StreamedAdam:
    """Steps chunks of one ZeRO-3 optimizer with Adam or AdamW."""

    def __init__(self, zero: "StreamedZeroOptimizer") -> None:
        self._zero = zero
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
            out, pieces = self._destination(index, chunk, slot)
            gradient = self._gradient(index, chunk)
            buffers = _C.AdamBuffers(
                param=slot.view(MASTER, torch.float32).data_ptr(),
                grad=gradient.data_ptr(),
                exp_avg=slot.view("exp_avg", torch.float32).data_ptr(),
                exp_avg_sq=slot.view("exp_avg_sq", torch.float32).data_ptr(),
                numel=chunk.numel,
                param_dtype=_C.Dtype.float32,
                grad_dtype=DTYPES[gradient.dtype],
                state_dtype=_C.Dtype.float32,
                grad_scale=grad_scale,
                param_out=out.data_ptr(),
                param_out_dtype=DTYPES[out.dtype],
            )
            _C.adam_step(options, state["step"], buffers, torch.get_num_threads(), self._isa)
            return self._distribute(index, chunk, out) if pieces else ()

        zero.optimizer_swapper.step_group(parameter, compute)

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

    def _destination(self, index: int, chunk: Chunk, slot: Slot) -> tuple[torch.Tensor, bool]:
        """Where the kernel puts new model parameters, and whether they must be carried on from there."""
        flat = self._zero.fp16_partitioned_groups_flat[index]
        if flat is not None and flat.device.type == "cpu":
            return flat.narrow(0, chunk.start, chunk.numel), False
        return slot.out_view(self._zero.dtype), True

    def _gradient(self, index: int, chunk: Chunk) -> torch.Tensor:
        """The chunk's gradient where it lies in host memory, in the dtype it arrived in."""
        flat = self._zero.grad_partitions_flat_buffer
        gradient: torch.Tensor = flat.narrow(0, self._gradient_starts[index] + chunk.start, chunk.numel)
        if not self.set_gradients:
            return gradient
        patched = gradient.to(torch.float32, copy=True)
        for param, first, last, skipped in self._pieces(index, chunk):
            values = self.set_gradients.get(param.ds_id)
            if values is not None:
                patched[first:last] = values[skipped : skipped + last - first]
        return patched

    def _distribute(self, index: int, chunk: Chunk, out: torch.Tensor) -> list[tuple[str, Ticket]]:
        """Carry new model parameters to the accelerator, or to where each lies in memory or on storage."""
        flat = self._zero.fp16_partitioned_groups_flat[index]
        if flat is not None:
            flat.narrow(0, chunk.start, chunk.numel).copy_(out)
            return []
        transfers = []
        for param, first, last, skipped in self._pieces(index, chunk):
            values = out[first:last]
            if param.ds_tensor.status.name == "AVAILABLE":
                param.ds_tensor.data.narrow(0, skipped, last - first).copy_(values)
                continue
            extent = param.nvme_swapper.get_path(param)
            offset = extent.offset + skipped * values.element_size()
            ticket = self._zero.optimizer_swapper.aio_handle.write(values, extent.path, offset)
            METER.written("parameters", values.nbytes)
            transfers.append((f"writing {extent.key}", ticket))
        return transfers

    def _pieces(self, index: int, chunk: Chunk) -> list[tuple[Any, int, int, int]]:
        """Parameters that overlap the chunk, each with first and last element there and those before it."""
        pieces = []
        end = chunk.start + chunk.numel
        for param, (offset, numel) in self._zero.partition_places(index):
            first, last = max(offset, chunk.start), min(offset + numel, end)
            if first < last:
                pieces.append((param, first - chunk.start, last - chunk.start, first - offset))
        return pieces
