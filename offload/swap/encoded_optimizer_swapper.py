"""The streamed swapper for state that lies on storage in another form than float32."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from offload.errors import io_error
from offload.io import Ticket
from offload.swap.chunk import Chunk
from offload.swap.layout import Extent, SwapFile
from offload.swap.slot import Slot
from offload.swap.streamed_optimizer_swapper import ModelParameters, StreamedOptimizerSwapper
from offload.swap.sub_group import MASTER, SubGroup


class EncodedOptimizerSwapper(StreamedOptimizerSwapper):
    """Outside the step, state is read, written, saved and loaded as the float32 values that it stands for.

    Args:
        model: the model parameters; the master weights are what they lack.
        others: as `StreamedOptimizerSwapper`.
    """

    writes_model = True

    def __init__(self, *, model: ModelParameters, **others: Any) -> None:
        self._model = model
        self._exports: list[Path] = []
        super().__init__(model=model, **others)

    def initialize_parameters(self, parameters: Sequence[Any], src_tensors: Sequence[torch.Tensor]) -> None:
        """Master weights that equal the model parameters lack nothing: a new file says so without a write."""
        for parameter, source in zip(parameters, src_tensors, strict=True):
            self._register(parameter, source.numel())

    def initialize_from_swapped_fp16_params(
        self,
        fp16_partitions_info: Sequence[Sequence[tuple[Any, int, Extent | None]]],
        fp16_num_elems: Sequence[int],
        fp16_pinned_buffers: Sequence[torch.Tensor],
        fp32_parameters: Sequence[Any],
    ) -> None:
        for numel, parameter in zip(fp16_num_elems, fp32_parameters, strict=True):
            self._register(parameter, numel)

    def read_state(self, parameter: Any, name: str, offset: int, numel: int) -> torch.Tensor:
        group = self._known(parameter, name)
        values = torch.empty(numel)

        def compute(chunk: Chunk, slot: Slot) -> Sequence[tuple[str, Ticket]]:
            here = self._decode(name, chunk, slot)
            first, last = max(offset, chunk.start), min(offset + numel, chunk.start + chunk.numel)
            values[first - offset : last - offset] = here[first - chunk.start : last - chunk.start]
            return ()

        self.stream.transform(group, offset, offset + numel, compute)
        return values

    def write_state(self, parameter: Any, name: str, offset: int, values: torch.Tensor) -> None:
        group = self._known(parameter, name)
        source = values.detach().to("cpu", torch.float32).reshape(-1)
        end = offset + source.numel()

        def compute(chunk: Chunk, slot: Slot) -> Sequence[tuple[str, Ticket]]:
            here = self._decode(name, chunk, slot)
            first, last = max(offset, chunk.start), min(end, chunk.start + chunk.numel)
            here[first - chunk.start : last - chunk.start] = source[first - offset : last - offset]
            return self._encode(name, chunk, slot, here)

        self.stream.transform(group, offset, end, compute, self.format.columns_of(name))

    def swapped_state(self, parameter: Any) -> Mapping[str, tuple[Extent, torch.dtype]]:
        """As the base class, all float32: what lies there in another form is written out once more.

        `drop_exports` removes those files; whoever maps them may do so first.
        """
        group = self.swap_params_info[self.parameter_id(parameter)]
        self._settle(group)
        present = self._present(group)
        extents = {
            name: group.swapped[name].extent if self.format.is_plain(name) else self._new_export(group, name)
            for name in present
        }
        exports = {
            name: torch.from_file(extents[name].path, shared=True, size=group.numel, dtype=torch.float32)
            for name in present
            if not self.format.is_plain(name)
        }

        def compute(chunk: Chunk, slot: Slot) -> Sequence[tuple[str, Ticket]]:
            for name, values in exports.items():
                values.narrow(0, chunk.start, chunk.numel).copy_(self._decode(name, chunk, slot))
            return ()

        self.stream.transform(group, 0, group.numel, compute)
        for name in exports:
            _sync(extents[name])
        return {name: (extent, torch.float32) for name, extent in extents.items()}

    def drop_exports(self) -> None:
        while self._exports:
            self._exports.pop().unlink(missing_ok=True)

    def close(self) -> None:
        with suppress(OSError):  # the folder goes too
            self.drop_exports()
        super().close()

    def _decode(self, name: str, chunk: Chunk, slot: Slot) -> torch.Tensor:
        values = torch.empty(chunk.numel)
        model = self._model.values(chunk, slot) if name == MASTER else None
        self.format.decode(name, slot.view, model, values)
        return values

    def _encode(
        self, name: str, chunk: Chunk, slot: Slot, values: torch.Tensor
    ) -> Sequence[tuple[str, Ticket]]:
        if name != MASTER:
            return super()._encode(name, chunk, slot, values)
        model = self._model.values(chunk, slot)
        self.format.encode(name, slot.view, model, values)
        return self._model.store(chunk, model)

    def _new_export(self, group: SubGroup, name: str) -> Extent:
        path = Path(self.swap_folder) / f"{group.index:05d}.{name}.export.swp"
        path.unlink(missing_ok=True)
        self._exports.append(path)
        return SwapFile(path).allocate(group.numel * 4, f"a float32 copy of {group.describe(name)}")


def _sync(extent: Extent) -> None:
    """The drive may refuse pages that were written through a mapping; only this tells."""
    descriptor = os.open(extent.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise io_error(error.errno or 0, f"writing {extent.key}", extent.path) from error
    finally:
        os.close(descriptor)
