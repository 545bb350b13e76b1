"""The gradients of streamed sub-groups between backward and step, where each chunk finds its own."""

from typing import TYPE_CHECKING, Any

import torch

from offload.runtime.model_parameters import ModelParameters
from offload.swap.chunk import Chunk
from offload.swap.slot import Slot

if TYPE_CHECKING:
    from offload.runtime.streamed_zero3 import StreamedZeroOptimizer


class HostGradients:
    """In DeepSpeed's flat buffer in host memory, in the dtype that gradients accumulate in."""

    def __init__(self, zero: "StreamedZeroOptimizer", model: ModelParameters) -> None:
        self._zero = zero
        self._model = model
        starts = torch.tensor([0, *zero.fp16_partitioned_groups_flat_numel]).cumsum(0)
        self._starts = [int(start) for start in starts]
        self.set_by_user: dict[int, torch.Tensor] = {}
        """By `ds_id`: exact, whatever dtype the others arrive in."""

    def end_window(self) -> None:
        """The next gradients are those of another step."""
        self.set_by_user.clear()

    def of(self, param: Any) -> torch.Tensor:
        """A float32 copy of this rank's part of a parameter's gradient."""
        values = self.set_by_user.get(param.ds_id)
        return (self._read(param) if values is None else values).to(torch.float32, copy=True)

    def of_chunk(self, chunk: Chunk, slot: Slot) -> torch.Tensor:
        """The gradient of the chunk that the slot holds, once what was read for it is there."""
        gradient = self._in_place(chunk, slot)
        if not self.set_by_user:
            return gradient
        patched = gradient.to(torch.float32, copy=True)
        for param, first, last, skipped in self._model.pieces(chunk):
            values = self.set_by_user.get(param.ds_id)
            if values is not None:
                patched[first:last] = values[skipped : skipped + last - first]
        return patched

    def _read(self, param: Any) -> torch.Tensor:
        return self._zero.grad_partition(param)

    def _in_place(self, chunk: Chunk, slot: Slot) -> torch.Tensor:
        flat = self._zero.grad_partitions_flat_buffer
        start = self._starts[self._model.index(chunk)] + chunk.start
        gradient: torch.Tensor = flat.narrow(0, start, chunk.numel)
        return gradient


class StorageGradients(HostGradients):
    """On storage, one for each weight; those that got none in this window are zero, whatever lies there."""

    def __init__(self, zero: "StreamedZeroOptimizer", model: ModelParameters) -> None:
        super().__init__(zero, model)
        self._present: set[int] = set()

    def end_window(self) -> None:
        super().end_window()
        self._present.clear()

    def put(self, param: Any, partition: torch.Tensor, *, first: bool) -> float:
        """Store this rank's part of a gradient, or add it to what this window brought already.

        Returns:
            The sum of its squares; infinite or NaN exactly if one of its elements is.

        Raises:
            OffloadIOError: it cannot be read or written, or one before it could not.
        """
        index, offset, _ = self._zero.grad_position[self._zero.get_param_id(param)]
        total: float = self._zero.optimizer_swapper.put_gradient(
            self._zero.fp32_partitioned_groups_flat[index],
            offset,
            partition,
            add=not first and param.ds_id in self._present,
        )
        self._present.add(param.ds_id)
        return total

    def _read(self, param: Any) -> torch.Tensor:
        zero = self._zero
        index, offset, numel = zero.grad_position[zero.get_param_id(param)]
        if param.ds_id not in self._present:
            return torch.zeros(numel)
        values: torch.Tensor = zero.optimizer_swapper.read_gradient(
            zero.fp32_partitioned_groups_flat[index], offset, numel
        )
        return values

    def _in_place(self, chunk: Chunk, slot: Slot) -> torch.Tensor:
        gradient = slot.gradient_view(self._zero.gradient_accumulation_dtype)
        for param, first, last, _ in self._model.pieces(chunk):
            if param.ds_id not in self._present:
                gradient[first:last].zero_()
        return gradient
