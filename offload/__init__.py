"""Train models larger than memory: state lives on NVMe and streams through a small, fixed amount of RAM."""

from typing import TYPE_CHECKING, Any

from offload.errors import OffloadConfigError, OffloadError, OffloadIOError, OffloadWarning

if TYPE_CHECKING:
    from offload.io import AsyncIOHandle, File, Ticket
    from offload.runtime.enable import disable, enable, initialize

__version__ = "0.1.0"

__all__ = [
    "AsyncIOHandle",
    "File",
    "OffloadConfigError",
    "OffloadError",
    "OffloadIOError",
    "OffloadWarning",
    "Ticket",
    "disable",
    "enable",
    "initialize",
    "stats",
]

_LAZY = {
    "AsyncIOHandle": "offload.io",
    "File": "offload.io",
    "Ticket": "offload.io",
    "disable": "offload.runtime.enable",
    "enable": "offload.runtime.enable",
    "initialize": "offload.runtime.enable",
}
"""Loaded on first use: `offload doctor` and the configs need neither torch nor DeepSpeed."""


def stats() -> dict[str, object]:
    """Figures of this process: the last step's record, and totals of bytes and of seconds waited by kind."""
    from offload.swap.stats import METER

    return METER.snapshot()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
