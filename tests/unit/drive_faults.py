"""Faults for real files: a drive that takes no more or changes a bit, and a user who presses Ctrl-C."""

import resource
from contextlib import contextmanager

from offload.io import Ticket


@contextmanager
def file_size_limit(nbytes):
    """Files may not grow, nor be written, beyond it: as a full drive, for this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def interrupted_wait(monkeypatch, nth=1):
    """Ctrl-C arrives while the `nth` ticket is waited for."""
    wait, calls = Ticket.wait, []

    def interrupted(ticket, timeout=None):
        calls.append(ticket)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return wait(ticket, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "wait", interrupted)
        yield


def flip(path, position):
    """One bit of the file changes, behind everybody's back."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
