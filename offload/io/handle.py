"""The handle: moves tensors to files and back, any size, any offset, from any thread."""

import os
import time
import warnings
import weakref
from collections.abc import Iterable
from types import TracebackType

import torch
from typing_extensions import Self

from offload import _C
from offload.errors import OffloadWarning
from offload.io.deepspeed_names import DeepSpeedNames
from offload.io.digests import DIGESTS
from offload.io.faults import FaultPlan
from offload.io.file import File
from offload.io.tensors import movable
from offload.io.tickets import Ledger, Ticket

Target = str | os.PathLike[str] | File | int
Extent = tuple[torch.Tensor, Target, int]

_LARGEST_OFFSET = (1 << 63) - 1


class AsyncIOHandle(DeepSpeedNames):
    """Keeps `queue_depth` blocks of `block_size` bytes in flight on one backend: uring, libaio or posix.

    Transfers that touch the same bytes of a file run in the order of submission, all others as they come.
    `auto` takes the first that works, and `backend_reason` says why. `intra_op_parallelism` is the least
    number of threads of the posix backend; the other two need one to keep a drive busy. `single_submit` and
    `overlap_events` are DeepSpeed's: here blocks always go in batches and completions always overlap.
    `checksums` keeps digests of what is written, in memory; the wait for a read then compares, and raises
    OffloadIntegrityError. `faults` lets the backend fail on purpose: for tests of what stands above.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 64,
        single_submit: bool = False,
        overlap_events: bool = True,
        intra_op_parallelism: int = 1,
        *,
        backend: str = "auto",
        checksums: bool = False,
        faults: FaultPlan | None = None,
    ) -> None:
        _check_positive(
            block_size=block_size, queue_depth=queue_depth, intra_op_parallelism=intra_op_parallelism
        )
        plan = None if faults is None else faults.core
        core = _C.IoHandle(backend, block_size, queue_depth, intra_op_parallelism, plan)
        self._ledger = Ledger(core, DIGESTS if checksums else None)
        self._finalizer = weakref.finalize(self, _shut_down, self._ledger)
        self._block_size = core.block_size
        self._queue_depth = core.queue_depth
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self._intra_op_parallelism = intra_op_parallelism
        self.backend = core.backend
        self.backend_reason = core.backend_reason
        self._ledger.announce()

    def read(self, tensor: torch.Tensor, file: Target, offset: int = 0) -> Ticket:
        """Fills `tensor` from `file` at `offset`. A file that ends too early is an error of the ticket."""
        return self._start(False, tensor, file, offset)

    def write(self, tensor: torch.Tensor, file: Target, offset: int = 0) -> Ticket:
        """Writes `tensor` to `file` at `offset`; a missing file is created, a longer one is not cut."""
        return self._start(True, tensor, file, offset)

    def readv(self, extents: Iterable[Extent]) -> Ticket:
        """Many reads under one ticket."""
        return self._start_many(False, extents)

    def writev(self, extents: Iterable[Extent]) -> Ticket:
        """Many writes under one ticket."""
        return self._start_many(True, extents)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for all transfers in flight and returns how many ended well since the last call, 0 if none.

        Transfers whose ticket was waited for are not counted again. When some failed and no ticket's `wait`
        has raised it yet, the first of them is raised here, after all have ended.
        """
        self._check_open()
        try:
            return self._ledger.wait_all(None if timeout is None else time.monotonic() + timeout)
        finally:
            self._ledger.announce()

    def stats(self) -> dict[str, int]:
        """Counters since construction: bytes, requests, fallbacks from O_DIRECT, bounced bytes, failures."""
        return self._ledger.core.stats()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Drains what is in flight, stops the threads, raises the first failure that no wait has raised."""
        if self._finalizer.detach() is None or self._ledger.is_foreign:
            return
        self._ledger.announce()
        self._ledger.close()
        for error in self._ledger.take_failures():
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._ledger.npending()} in flight"
        name = type(self).__name__
        return (
            f"<{name} {self.backend} block_size={self._block_size} queue_depth={self._queue_depth} {state}>"
        )

    def _start(
        self, writing: bool, tensor: torch.Tensor, file: Target, offset: int, private: bool = False
    ) -> Ticket:
        self._check_open()
        alias = movable(tensor)
        extent = self._extent(writing, alias, file, offset)
        return self._ledger.submit(writing, (extent,), (alias.untyped_storage(),), private=private)

    def _start_many(self, writing: bool, extents: Iterable[Extent]) -> Ticket:
        self._check_open()
        parts = [(movable(tensor), file, offset) for tensor, file, offset in extents]
        spans = [self._extent(writing, alias, file, offset) for alias, file, offset in parts]
        return self._ledger.submit(writing, spans, [alias.untyped_storage() for alias, _, _ in parts])

    def _extent(
        self, writing: bool, alias: torch.Tensor, file: Target, offset: int
    ) -> tuple[int, int, _C.File, int]:
        nbytes = alias.nbytes
        if offset < 0:
            raise ValueError(f"offset must not be negative: {offset}")
        if offset + nbytes > _LARGEST_OFFSET:
            raise ValueError(f"offset {offset} + {nbytes} B is beyond the largest file")
        return (alias.data_ptr(), nbytes, self._open(file, writing), offset)

    def _open(self, file: Target, writing: bool) -> _C.File:
        if isinstance(file, File):
            return file.core
        if isinstance(file, int):
            return _C.File.of_descriptor(file, _C.FileMode.WRITE if writing else _C.FileMode.READ)
        return self._ledger.core.open(os.fsencode(file), writing)

    def _check_open(self) -> None:
        self._ledger.check_process()
        if self.closed:
            raise ValueError("the handle is closed")


def _check_positive(**settings: int) -> None:
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {value!r}")
        if value <= 0:
            raise ValueError(f"{name} must be at least 1, not {value}")


def _shut_down(ledger: Ledger) -> None:
    """For a handle that nobody closed: the same, but what close() would raise can only be a warning."""
    if ledger.is_foreign:
        return
    nleft = ledger.npending()
    ledger.close()
    if nleft:
        warnings.warn(
            f"a handle was dropped with {nleft} transfers in flight, which it waited for: close() it",
            OffloadWarning,
            stacklevel=2,
        )
    for error in ledger.take_failures():
        warnings.warn(f"a transfer failed and nobody waited for it: {error}", OffloadWarning, stacklevel=2)
