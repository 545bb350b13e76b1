"""Tickets, and the ledger of what one handle has in flight."""

import asyncio
import os
import sys
import threading
import time
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import torch

from offload import _C
from offload.errors import OffloadForkError, OffloadWarning
from offload.io.digests import Check, CoreExtent, Digests

_SLICE_SECONDS = 0.1  # a wait comes back this often, so that Ctrl-C is heard


class Ticket:
    """One transfer in flight. Its tensors stay alive until it is done; its result may be asked for later."""

    __slots__ = (
        "__weakref__",
        "_check",
        "_counted_in",
        "_ledger",
        "_path",
        "_private",
        "_storages",
        "_transfer",
    )

    def __init__(
        self,
        ledger: "Ledger",
        transfer: _C.Transfer,
        storages: Sequence[torch.UntypedStorage],
        path: str,
        private: bool,
        check: Check | None = None,
    ) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self._storages: Sequence[torch.UntypedStorage] = storages
        self._path = path
        self._private = private
        self._check = check
        self._counted_in = -1

    @property
    def nbytes(self) -> int:
        """Bytes that were asked for."""
        return self._transfer.nbytes

    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""
        if not self._transfer.done():
            return False
        self._ledger.settle(self)
        return True

    def wait(self, timeout: float | None = None) -> int:
        """Waits for this transfer alone and returns the bytes moved; raises its error, or TimeoutError."""
        self.wait_until_done(None if timeout is None else time.monotonic() + timeout)
        self._ledger.claim(self)
        self._ledger.announce()
        self.raise_failure()
        return self._transfer.nbytes_moved

    def wait_until_done(self, deadline: float | None) -> None:
        self._ledger.check_process()
        while not self._transfer.wait_for(_slice(deadline)):
            if deadline is not None and time.monotonic() >= deadline:
                moved, wanted = self._transfer.nbytes_moved, self._transfer.nbytes
                raise TimeoutError(
                    f"{self._path}: {moved} of {wanted} B have moved so far; wait again for the rest"
                )

    def failure(self) -> OSError | None:
        """Why it failed, once done; the first who asks has a read compared with the digests."""
        error = self._transfer.error()
        return self._check.failure() if error is None and self._check is not None else error

    def raise_failure(self) -> None:
        error = self.failure()
        if error is not None:
            raise error

    def __await__(self) -> Generator[Any, None, int]:
        return asyncio.get_running_loop().run_in_executor(None, self.wait).__await__()

    def __repr__(self) -> str:
        state = "done" if self._transfer.done() else "in flight"
        return f"<Ticket {self._path!r} {self._transfer.nbytes} B {state}>"


def _slice(deadline: float | None) -> float:
    if deadline is None:
        return _SLICE_SECONDS
    return min(_SLICE_SECONDS, max(0.0, deadline - time.monotonic()))


class Ledger:
    """What a handle has in flight and has not reported. It outlives the handle, so tickets do too.

    Native threads never touch Python: a finished transfer's tensors are let go by the next call that passes.
    """

    def __init__(self, core: _C.IoHandle, digests: Digests | None = None) -> None:
        self.core = core
        self._digests = digests
        self._owner = os.getpid()
        # Reentrant: dropping a tensor under it may run the finaliser of the handle.
        self._lock = threading.RLock()
        self._in_flight: dict[int, Ticket] = {}
        self._unchecked: dict[int, Ticket] = {}
        self._failed: list[Ticket] = []
        self._nfinished = 0
        self._round = 0

    @property
    def is_foreign(self) -> bool:
        return os.getpid() != self._owner

    def check_process(self) -> None:
        if self.is_foreign:
            raise OffloadForkError(
                f"this handle belongs to process {self._owner} and its threads do not follow a fork: "
                "make a new handle"
            )

    def submit(
        self,
        writing: bool,
        extents: Sequence[CoreExtent],
        storages: Sequence[torch.UntypedStorage],
        *,
        private: bool = False,
    ) -> Ticket:
        """Starts a transfer; a private one is its caller's alone, and `wait_all` passes it over.

        The storages are what is kept alive: a third of the memory of the tensors over them.
        """
        self.reap()
        path = sys.intern(extents[0][2].path) if extents else ""
        transfer, check = self._start(writing, extents, storages)
        ticket = Ticket(self, transfer, storages, path, private, check)
        self._in_flight[transfer.id] = ticket
        if transfer.done():  # it may have been reaped before it was entered
            self.settle(ticket)
        return ticket

    def _start(
        self, writing: bool, extents: Sequence[CoreExtent], storages: Sequence[torch.UntypedStorage]
    ) -> tuple[_C.Transfer, Check | None]:
        if self._digests is None:
            return self.core.submit(writing, extents), None
        if writing:
            return self._digests.write(self.core, extents), None
        return self._digests.read(self.core, extents, storages)

    def reap(self) -> None:
        """Settles everything that has finished since the last call."""
        for key in self.core.take_finished():
            ticket = self._in_flight.get(key)
            if ticket is not None:
                self.settle(ticket)

    def settle(self, ticket: Ticket) -> None:
        """Lets the tensors go and counts the result, once."""
        with self._lock:
            if self._in_flight.pop(ticket._transfer.id, None) is None:
                return
            ticket._storages = ()
            if ticket._private:
                return
            if ticket._check is not None and ticket._transfer.error() is None:
                self._unchecked[ticket._transfer.id] = ticket
                return
            self._count(ticket)

    def _count(self, ticket: Ticket) -> None:
        if ticket.failure() is not None:
            self._failed.append(ticket)
            return
        self._nfinished += 1
        ticket._counted_in = self._round

    def _compare(self, ticket: Ticket) -> None:
        """Compares what a read brought and counts the result, once."""
        ticket.failure()
        with self._lock:
            if self._unchecked.pop(ticket._transfer.id, None) is not None:
                self._count(ticket)

    def claim(self, ticket: Ticket) -> None:
        """The ticket's own wait reports it, so `wait_all` shall not."""
        with self._lock:
            self.settle(ticket)
            self._unchecked.pop(ticket._transfer.id, None)
            if ticket in self._failed:
                self._failed.remove(ticket)
            if ticket._counted_in == self._round:
                self._nfinished -= 1
            ticket._counted_in = -1

    def wait_all(self, deadline: float | None = None) -> int:
        """Waits for all, then raises the first failure nobody has met, or returns how many ended well."""
        self.check_process()
        for ticket in self.pending():
            ticket.wait_until_done(deadline)
            self.settle(ticket)
        for ticket in list(self._unchecked.values()):
            self._compare(ticket)
        with self._lock:
            failed, self._failed = self._failed, []
            nfinished, self._nfinished = self._nfinished, 0
            self._round += 1
        for ticket in failed:
            ticket.raise_failure()
        return nfinished

    def announce(self) -> None:
        """Passes on what the native side wants the user to hear once."""
        for notice in self.core.take_notices():
            warnings.warn(notice, OffloadWarning, stacklevel=4)

    def pending(self) -> list[Ticket]:
        return [ticket for ticket in list(self._in_flight.values()) if not ticket._private]

    def npending(self) -> int:
        self.reap()
        return len(self._in_flight)

    def close(self) -> None:
        """Drains, stops the threads, lets all tensors go: what a read brought is its ticket's matter now."""
        self.core.close()
        for ticket in list(self._in_flight.values()):
            self.settle(ticket)
        self._unchecked.clear()

    def take_failures(self) -> list[OSError]:
        with self._lock:
            failed, self._failed = self._failed, []
        errors = (ticket.failure() for ticket in failed)
        return [error for error in errors if error is not None]
