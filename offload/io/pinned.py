"""Page-locked memory: one manager for the whole process, whatever handle asks."""

import resource
import threading
import warnings
from typing import NamedTuple

import torch

from offload import _C
from offload.errors import OffloadMemoryError, OffloadWarning


class Totals(NamedTuple):
    """Bytes are whole pages, as the kernel counts them."""

    allocations: int
    allocated_bytes: int
    locked_bytes: int


_warning_lock = threading.Lock()
_warned = False


def new(
    numel: int, dtype: torch.dtype = torch.uint8, *, lock: bool = True, strict: bool = True
) -> torch.Tensor:
    """A zeroed, page-aligned tensor whose memory is given back with its last view, or by `free`.

    With `lock` its pages stay in memory; where the system's limit refuses that, `strict` decides between
    OffloadMemoryError and one warning.
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative: {numel}")
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    nbytes = numel * dtype.itemsize
    buffer = _allocate(nbytes, lock, strict)
    if lock and not buffer.is_locked():
        _warn_unlocked(nbytes)
    return torch.frombuffer(buffer, dtype=dtype, count=numel)


def free(tensor: torch.Tensor) -> None:
    """Gives the memory back now. Views still around read zeros; to free twice, or a view, is a ValueError."""
    if tensor.numel() == 0:
        return
    _C.pinned_free(tensor.data_ptr(), tensor.nbytes)


def free_at(address: int) -> None:
    """`free` for who has kept only where the tensor's memory begins."""
    _C.pinned_free(address, None)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether torch pinned it, or it lies wholly inside one locked allocation of ours."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return _is_locked(tensor) or bool(tensor.is_pinned())


def is_managed(tensor: torch.Tensor) -> bool:
    """Whether it lies wholly inside one allocation of ours, locked or not."""
    return tensor.device.type == "cpu" and _C.pinned_is_managed(tensor.data_ptr(), tensor.nbytes)


def totals() -> Totals:
    """What the process holds now."""
    return Totals(**_C.pinned_totals())


def _is_locked(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and _C.pinned_is_locked(tensor.data_ptr(), tensor.nbytes)


def _allocate(nbytes: int, lock: bool, strict: bool) -> _C.PinnedBuffer:
    locking = _C.Locking.NONE if not lock else _C.Locking.REQUIRED if strict else _C.Locking.PREFERRED
    try:
        return _C.PinnedBuffer(nbytes, locking)
    except OSError as error:
        raise OffloadMemoryError(_explain(nbytes, lock, error)) from error


def _explain(nbytes: int, lock: bool, error: OSError) -> str:
    if not lock:
        return f"cannot allocate {nbytes} B: {error.strerror}"
    return (
        f"cannot lock {nbytes} B in memory ({error.strerror}): RLIMIT_MEMLOCK is {_memlock_limit()} and "
        f"{totals().locked_bytes} B are locked by offload; raise it with `ulimit -l` or LimitMEMLOCK, "
        "or do without (pin_memory: false)"
    )


def _memlock_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} B"


def _warn_unlocked(nbytes: int) -> None:
    global _warned
    with _warning_lock:
        if _warned:
            return
        _warned = True
    warnings.warn(
        f"{nbytes} B are used without a page lock: RLIMIT_MEMLOCK is {_memlock_limit()}; raise it with "
        "`ulimit -l`. Further ones go unlocked without a warning",
        OffloadWarning,
        stacklevel=4,
    )
