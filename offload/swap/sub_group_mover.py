"""Brings sub-groups into memory and back to storage; what can fail halfway leaves them whole."""

from collections.abc import Iterable
from typing import Any

import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle
from offload.swap.buffers import SwapBufferManager
from offload.swap.gradients import GradientStore
from offload.swap.stats import METER
from offload.swap.sub_group import GRADIENT, MASTER, SubGroup, state_tensors
from offload.swap.transfers import first_failure, naming, placeholder

KIND = "optimizer"


class SubGroupMover:
    """The four moves of a sub-group: start_fetch, finish_fetch, start_store, finish_store.

    A sub-group that could not be written stays in memory, `unsaved`; the next step works on it there and its
    `start_store` tries again.
    """

    def __init__(
        self, optimizer: Any, handle: AsyncIOHandle, manager: SwapBufferManager, gradients: GradientStore
    ) -> None:
        self._optimizer = optimizer
        self._handle = handle
        self._manager = manager
        self._gradients = gradients

    def start_fetch(self, group: SubGroup, *, grow: bool) -> bool:
        """Lend memory and start reading; False, with nothing lent, when it does not fit and may not grow."""
        self.finish_store(group)
        if group.resident or group.reading:
            return True
        self._gradients.flush()  # the memory that stages them is needed now
        try:
            if not self._lend(group, grow):
                group.release_buffers()
                return False
            for name, swapped in group.swapped.items():
                view = group.buffers[name].view(group.numel, swapped.dtype)
                what = f"reading {group.describe(name)}"
                with naming(what):
                    ticket = self._handle.read(view, swapped.extent.path, swapped.extent.offset)
                group.reading.append((what, ticket))
                METER.read(KIND, swapped.extent.nbytes)
        except BaseException:
            self.cancel_fetch(group)
            raise
        return True

    def finish_fetch(self, group: SubGroup) -> None:
        """Wait for the reads and let the optimizer see the sub-group, its gradient included."""
        if not group.resident:
            failure = first_failure(group.reading, KIND)
            group.reading.clear()
            if failure is not None:
                group.release_buffers()
                raise failure
            self._attach(group)
            group.resident = True
        self._fetch_gradient(group)

    def cancel_fetch(self, group: SubGroup) -> None:
        """Wait for reads that nobody will use, and give their memory back."""
        first_failure(group.reading, KIND)  # whoever does need the values will read, and fail, again
        group.reading.clear()
        group.release_buffers()

    def release(self, group: SubGroup) -> None:
        """Let go of a sub-group that was only looked at; values that are nowhere else stay."""
        self.drop_gradient(group)
        if not group.unsaved:
            self.cancel_fetch(group)
            self._detach(group)

    def discard(self, group: SubGroup) -> None:
        """Give up what is in memory or on its way, also what could not be written: it will be replaced."""
        first_failure(group.writing, KIND)
        self._end_store(group)
        self.cancel_fetch(group)
        self.drop_gradient(group)
        self._detach(group)
        group.unsaved = False

    def drop_gradient(self, group: SubGroup) -> None:
        """Let go of a resident sub-group's gradient; the next fetch brings the current one."""
        group.parameter.grad = None
        gradient = group.buffers.pop(GRADIENT, None)
        if gradient is not None:
            gradient.release()

    def start_store(self, group: SubGroup) -> None:
        """Start writing a resident sub-group, new state included; its tensors become placeholders.

        Raises:
            OffloadIOError: naming the tensor; the sub-group is still in memory.
        """
        if not group.resident:
            raise ValueError(f"sub-group {group.index} is not in memory, so there is nothing to write")
        tensors = {MASTER: group.parameter, **dict(state_tensors(self._optimizer, group))}
        group.unsaved = True
        try:
            for name, tensor in tensors.items():
                self._write(group, name, tensor)
        except BaseException:
            first_failure(group.writing, KIND)
            group.writing.clear()
            raise
        self.drop_gradient(group)
        group.written_from = {name: tensor.data for name, tensor in tensors.items()}
        group.written_buffers, group.buffers = group.buffers, {}
        group.resident = False
        self._detach(group)

    def finish_store(self, group: SubGroup) -> None:
        """Wait for the writes and take the memory back.

        Raises:
            OffloadIOError: naming the tensor; the sub-group is in memory again.
        """
        if not group.writing:
            return
        failure = first_failure(group.writing, KIND)
        if failure is None:
            self._end_store(group)
            return
        group.writing.clear()
        group.buffers, group.written_buffers = group.written_buffers, {}
        for name, values in group.written_from.items():
            self._tensor(group, name).data = values
        group.written_from = {}
        group.resident = True
        raise failure

    def finish_stores(self, groups: Iterable[SubGroup]) -> None:
        """Finish the writes of all, also after one failed; then raise the first error."""
        first: OffloadIOError | None = None
        for group in groups:
            try:
                self.finish_store(group)
            except OffloadIOError as error:
                first = first or error
        if first is not None:
            raise first

    def _lend(self, group: SubGroup, grow: bool) -> bool:
        for name, swapped in group.swapped.items():
            buffer = self._manager.lend(swapped.extent.nbytes, grow=grow)
            if buffer is None:
                return False
            group.buffers[name] = buffer
        return True

    def _fetch_gradient(self, group: SubGroup) -> None:
        if GRADIENT in group.buffers:
            return
        dtype = group.parameter.dtype
        try:
            buffer = self._manager.lend(group.numel * dtype.itemsize, grow=True)
            if buffer is None:
                raise MemoryError(f"no memory for {group.describe('gradient')}")
            group.buffers[GRADIENT] = buffer
            gradient = buffer.view(group.numel, dtype)
            self._gradients.swap_in(group, gradient)
            group.parameter.grad = gradient
        except BaseException:
            self.release(group)
            raise

    def _write(self, group: SubGroup, name: str, tensor: torch.Tensor) -> None:
        swapped = group.swapped_tensor(name, tensor.dtype)
        what = f"writing {group.describe(name)}"
        with naming(what):
            ticket = self._handle.write(tensor.data.reshape(-1), swapped.extent.path, swapped.extent.offset)
        group.writing.append((what, ticket))
        METER.written(KIND, swapped.extent.nbytes)

    def _end_store(self, group: SubGroup) -> None:
        group.writing.clear()
        group.written_from = {}
        group.unsaved = False
        while group.written_buffers:
            group.written_buffers.popitem()[1].release()

    def _tensor(self, group: SubGroup, name: str) -> torch.Tensor:
        tensor: torch.Tensor = (
            group.parameter if name == MASTER else self._optimizer.state[group.parameter][name]
        )
        return tensor

    def _attach(self, group: SubGroup) -> None:
        for name, swapped in group.swapped.items():
            self._tensor(group, name).data = group.buffers[name].view(group.numel, swapped.dtype)

    def _detach(self, group: SubGroup) -> None:
        """Leave the optimizer placeholders, so that no tensor points into memory that is lent on."""
        group.parameter.grad = None
        if MASTER in group.swapped:
            group.parameter.data = placeholder(group.parameter.dtype)
        for name, tensor in state_tensors(self._optimizer, group):
            if name in group.swapped:
                tensor.data = placeholder(tensor.dtype)
