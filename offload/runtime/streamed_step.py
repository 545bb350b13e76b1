"""The streamed step: one fused pass per chunk, from gradient to model parameter."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from offload import _C
from offload.io import Ticket
from offload.runtime.gradients import HostGradients
from offload.runtime.model_parameters import ModelParameters
from offload.runtime.step_rules import StepRule
from offload.swap.chunk import Chunk
from offload.swap.dtypes import DTYPES
from offload.swap.formats import FormatName
from offload.swap.slot import Slot

if TYPE_CHECKING:
    from offload.runtime.streamed_zero3 import StreamedZeroOptimizer


class StreamedStep:
    """Steps chunks of one ZeRO-3 optimizer."""

    def __init__(
        self,
        zero: "StreamedZeroOptimizer",
        rule: StepRule,
        model: ModelParameters,
        gradients: HostGradients,
        state_format: FormatName,
    ) -> None:
        self._zero = zero
        self.rule = rule
        self._model = model
        self._gradients = gradients
        self._format = state_format
        self._place_model = model.room if state_format == "fp32" else model.values
        self._isa = _C.supported_isas()[-1]

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
            gradient = self._gradients.of_chunk(chunk, slot)
            common = {
                "grad": gradient.data_ptr(),
                "grad_dtype": DTYPES[gradient.dtype],
                "grad_scale": grad_scale,
                "numel": chunk.numel,
            }
            model = self._place_model(chunk, slot)
            buffers = rule.buffers(self._format, slot, model, common)
            zero.stepping = True
            kernel(options, step, buffers, torch.get_num_threads(), self._isa)
            return self._model.store(chunk, model)

        zero.optimizer_swapper.step_group(parameter, rule.names_in(group), compute)
