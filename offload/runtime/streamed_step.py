"""The streamed step: one fused pass per chunk, from gradient to model parameter."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from offload import _C
from offload.io import Ticket
from offload.runtime.model_parameters import ModelParameters
from offload.runtime.operands import DTYPES
from offload.runtime.step_rules import StepRule
from offload.swap.chunk import Chunk
from offload.swap.formats import FormatName
from offload.swap.stream import Slot

if TYPE_CHECKING:
    from offload.runtime.streamed_zero3 import StreamedZeroOptimizer


class StreamedStep:
    """Steps chunks of one ZeRO-3 optimizer."""

    def __init__(
        self,
        zero: "StreamedZeroOptimizer",
        rule: StepRule,
        model: ModelParameters,
        state_format: FormatName,
    ) -> None:
        self._zero = zero
        self.rule = rule
        self._model = model
        self._format = state_format
        self._place_model = model.room if state_format == "fp32" else model.values
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
        zero, rule = self._zero, self.rule
        parameter = zero.fp32_partitioned_groups_flat[index]
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]]
        options = rule.options(group)
        step = rule.count(zero.optimizer.state[parameter])
        kernel = rule.kernels[self._format]

        def compute(chunk: Chunk, slot: Slot) -> Sequence[tuple[str, Ticket]]:
            gradient = self._gradient(index, chunk)
            common = {
                "grad": gradient.data_ptr(),
                "grad_dtype": DTYPES[gradient.dtype],
                "grad_scale": grad_scale,
                "numel": chunk.numel,
            }
            model = self._place_model(chunk, slot)
            buffers = rule.buffers(self._format, slot, model, common)
            kernel(options, step, buffers, torch.get_num_threads(), self._isa)
            return self._model.store(chunk, model)

        zero.optimizer_swapper.step_group(parameter, rule.names_in(group), compute)

    def gradient_of(self, param: Any) -> torch.Tensor:
        """A float32 copy of this rank's part of a parameter's gradient."""
        set_by_user = self.set_gradients.get(param.ds_id)
        source = set_by_user if set_by_user is not None else self._zero.grad_partition(param)
        return source.to(torch.float32, copy=True)

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
