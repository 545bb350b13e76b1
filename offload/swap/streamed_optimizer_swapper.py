"""The optimizer swapper for elementwise optimizers: the step runs on chunks, in constant memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from offload.errors import OffloadIOError
from offload.io import Ticket
from offload.swap.buffers import SwapBufferManager
from offload.swap.chunk import Chunk
from offload.swap.formats import Column, StateFormat
from offload.swap.host_cache import HostCache
from offload.swap.layout import Extent
from offload.swap.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from offload.swap.slot import Slot
from offload.swap.stored_gradients import StoredGradients
from offload.swap.stream import KIND, Compute, Stream
from offload.swap.sub_group import MASTER, SubGroup
from offload.swap.tensor_swapper import AsyncTensorSwapper
from offload.swap.transfers import placeholder


class ModelParameters(Protocol):
    """A sub-group's model parameters, chunk by chunk, wherever they lie."""

    def read(self, chunk: Chunk, slot: Slot) -> Sequence[tuple[str, Ticket]]:
        """Start reading those on storage into the slot."""
        ...

    def values(self, chunk: Chunk, slot: Slot) -> torch.Tensor:
        """The chunk's parameters, to be changed in place, once what `read` started has ended."""
        ...

    def store(self, chunk: Chunk, values: torch.Tensor) -> Sequence[tuple[str, Ticket]]:
        """Carry changed values to where the parameters live."""
        ...


class StreamedOptimizerSwapper(PartitionedOptimizerSwapper):
    """Streams the step through `buffer_bytes` of memory, whatever the size of model and sub-groups.

    Outside the step a sub-group's state is read and written in pieces, with `read_state` and `write_state`.

    Args:
        state_format: what lies on storage of master weights and of the optimizer's state tensors.
        buffer_bytes: all memory of the optimizer path.
        cache_bytes: memory beside that, for state that is then neither read nor written.
        model_itemsize: bytes of one model parameter.
        model: the model parameters, for a format that builds on them.
        gradient_dtype: of gradients that go to storage; None when they stay in host memory.
        others: as `PartitionedOptimizerSwapper`.
    """

    def __init__(
        self,
        *,
        state_format: StateFormat,
        buffer_bytes: int,
        cache_bytes: int = 0,
        model_itemsize: int,
        model: ModelParameters | None = None,
        gradient_dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        self._gradient_dtype = gradient_dtype
        self._buffer_bytes = buffer_bytes
        self.format = state_format
        super().__init__(**others)
        self.stream = Stream(
            self.aio_handle,
            self.swap_buffer_manager,
            state_format.columns,
            model_itemsize,
            model.read if model is not None else None,
            HostCache(cache_bytes, state_format.columns),
            gradient_dtype,
        )
        self.stored_gradients: StoredGradients | None = None
        if gradient_dtype is not None:
            self.stored_gradients = StoredGradients(
                self.aio_handle, self.stream.gradient_buffers, gradient_dtype
            )

    def _make_manager(self) -> SwapBufferManager:
        return SwapBufferManager(
            self._buffer_bytes,
            1,
            torch.uint8,
            self.aio_handle,
            lock=self.swap_config.pin_memory,
            key="offload.buffer_bytes",
        )

    def begin_gradient_window(self) -> None:
        super().begin_gradient_window()
        if self.stored_gradients is not None:
            self.stream.cancel()  # a pass that failed may still read gradients
            self.stored_gradients.begin_window()

    def put_gradient(self, parameter: Any, offset: int, gradient: torch.Tensor, *, add: bool) -> float:
        """As `StoredGradients.put`, for the sub-group of `parameter`."""
        return self._stored().put(
            self.swap_params_info[self.parameter_id(parameter)], offset, gradient, add=add
        )

    def read_gradient(self, parameter: Any, offset: int, numel: int) -> torch.Tensor:
        """As `StoredGradients.read`, for the sub-group of `parameter`."""
        return self._stored().read(self.swap_params_info[self.parameter_id(parameter)], offset, numel)

    def start_pass(self) -> None:
        """Start reading the first chunks; the gradients may still be on their way."""
        self.stream.start(list(self.swap_params_info.values()))

    def step_group(self, parameter: Any, names: Iterable[str], compute: Compute) -> None:
        """Step the next sub-group of the pass chunk by chunk; `names` are the state tensors it has then.

        Raises:
            OffloadIOError: naming the tensor.
        """
        group = self.swap_params_info[self.parameter_id(parameter)]
        self._create_state(group, names)
        if self.stored_gradients is not None:
            self.stored_gradients.flush()
        self.stream.run(group, compute)

    def keeps(self, name: str) -> bool:
        return name in self.format.names

    def swapped_state(self, parameter: Any) -> Mapping[str, tuple[Extent, torch.dtype]]:
        """As the base class, without the room that is reserved for state to come."""
        everything = super().swapped_state(parameter)
        present = self._present(self.swap_params_info[self.parameter_id(parameter)])
        return {name: everything[name] for name in present}

    def lost_write(self) -> OffloadIOError | None:
        with suppress(OffloadIOError):  # the stream remembers
            self.stream.finish()
        return super().lost_write() or self.stream.lost_write

    def forget_lost_writes(self) -> None:
        super().forget_lost_writes()
        self.stream.lost_write = None

    def purge_state(self) -> None:
        for group in self.swap_params_info.values():
            self._save_cached(group)
        super().purge_state()

    def replace_state(self, parameter: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """As the base class, chunk by chunk through the ring; tensors that are not replaced stay."""
        group = self.swap_params_info[self.parameter_id(parameter)]
        sources = {name: tensor.detach().reshape(-1) for name, tensor in tensors.items()}
        for name, tensor in sources.items():
            if name not in self.format.names or tensor.numel() != group.numel:
                raise ValueError(f"{group.describe(name)} cannot take {tensor.numel()} elements")
        self._save_cached(group)
        self._discard(group)
        self._reserve(group)
        kept = {*sources, *self._present(group)}
        gone = [name for name in self.format.names if name not in kept]

        def compute(chunk: Chunk, slot: Slot) -> Sequence[tuple[str, Ticket]]:
            transfers: list[tuple[str, Ticket]] = []
            for name, source in sources.items():
                values = source.narrow(0, chunk.start, chunk.numel).to("cpu", torch.float32).contiguous()
                transfers += self._encode(name, chunk, slot, values)
            for name in gone:
                transfers += self._encode(name, chunk, slot, torch.zeros(chunk.numel))
            return transfers

        written = self._columns_of([*sources, *gone])
        self.stream.transform(group, 0, group.numel, compute, written, replacing=True)
        self._mover.release(group)

    def close(self) -> None:
        try:
            if self.stored_gradients is not None:
                self.stored_gradients.begin_window()
            self.stream.close()
        finally:
            super().close()

    def _present(self, group: SubGroup) -> list[str]:
        """The tensors that exist by now, master weights first."""
        state = self.optimizer.state.get(group.parameter, {})
        return [name for name in self.format.names if name == MASTER or state.get(name) is not None]

    def _columns_of(self, names: Sequence[str]) -> list[Column]:
        return [column for name in names for column in self.format.columns_of(name)]

    def _encode(
        self, name: str, chunk: Chunk, slot: Slot, values: torch.Tensor
    ) -> Sequence[tuple[str, Ticket]]:
        """Put new values of a tensor into the slot; returns the transfers that this began."""
        self.format.encode(name, slot.view, None, values)
        return ()

    def _place(self, parameter: Any, name: str, offset: int, numel: int) -> tuple[SubGroup, Extent]:
        self._known(parameter, name)
        return super()._place(parameter, name, offset, numel)

    def _known(self, parameter: Any, name: str) -> SubGroup:
        """The sub-group of a tensor that exists; KeyError when the optimizer has none (yet)."""
        group = self.swap_params_info[self.parameter_id(parameter)]
        if name not in self._present(group):
            raise KeyError(name)
        return group

    def _save_cached(self, group: SubGroup) -> None:
        """Bring to storage what only the cache has: a part of the sub-group is replaced, the rest stays."""
        with suppress(OffloadIOError):  # of a step that failed; whoever loads does so to mend it
            self.stream.cancel()
        self.stream.flush(group)

    @contextmanager
    def _staging_writer(self) -> Iterator[AsyncTensorSwapper]:
        """Through the ring's own buffers: no pass has begun while the first master weights are written."""
        writer = AsyncTensorSwapper(self.aio_handle, 1, kind=KIND)
        writer.add_buffers([buffer.buffer for buffer in self.stream.idle_buffers()])
        try:
            yield writer
        finally:
            writer.release_buffers()

    def _settle(self, group: SubGroup) -> None:
        self.stream.flush(group)
        super()._settle(group)

    def _drop_reads(self, group: SubGroup) -> None:
        self.stream.cancel()
        self.stream.forget(group)
        super()._drop_reads(group)

    def _discard(self, group: SubGroup) -> None:
        with suppress(OffloadIOError):  # nobody will miss what could not be written
            self.stream.cancel()
        self.stream.forget(group)
        super()._discard(group)

    def _register(self, parameter: Any, numel: int) -> SubGroup:
        """Reserve room for the state at once: a drive that is too small must not be found out in a step."""
        group = super()._register(parameter, numel)
        self._reserve(group)
        return group

    def _reserve(self, group: SubGroup) -> None:
        for column in self.format.columns:
            group.swapped_tensor(column.name, column.dtype, column.nbytes(group.numel))
        if self._gradient_dtype is not None:
            group.gradient_extent(0, group.numel, self._gradient_dtype)

    def _stored(self) -> StoredGradients:
        if self.stored_gradients is None:
            raise ValueError("gradients stay in host memory")
        return self.stored_gradients

    def _create_state(self, group: SubGroup, names: Iterable[str]) -> None:
        """Make place for state that does not exist yet; its first values are written by the step itself."""
        self._reserve(group)
        state = self.optimizer.state[group.parameter]
        for name in names:
            if state.get(name) is None:
                state[name] = placeholder(self.dtype)
