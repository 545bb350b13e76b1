"""What the swappers share: who they are, when a tensor is worth swapping, and errors that name the tensor."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from offload.config import AioConfig
from offload.errors import OffloadIOError
from offload.io import Ticket
from offload.swap.stats import METER

MIN_SWAPPABLE_NBYTES = 1 << 20
"""Smaller tensors stay in memory, as in DeepSpeed: one request for them costs more than it saves."""


def rank() -> int:
    """This process's rank; 0 outside a distributed run."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def as_aio_config(config: AioConfig | Mapping[str, object]) -> AioConfig:
    """Our own config, also from the plain mapping that DeepSpeed keeps."""
    return config if isinstance(config, AioConfig) else AioConfig.model_validate(dict(config))


def placeholder(dtype: torch.dtype) -> torch.Tensor:
    """What a tensor's data is while its values are on storage: it has no elements."""
    return torch.empty(0, dtype=dtype)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Let an I/O error of the body say which tensor it was about."""
    try:
        yield
    except OffloadIOError as error:
        raise error.during(what) from error


def first_failure(transfers: Iterable[tuple[str, Ticket]], kind: str) -> OffloadIOError | None:
    """Wait for every transfer; the first error, naming its tensor, or None.

    Once it returns no transfer uses its memory any more. Ctrl-C passes through it: then some still may, so
    tickets are forgotten and memory is given back only after it has returned. Waiting again is allowed.
    """
    first: OffloadIOError | None = None
    with METER.stall(kind):
        for what, ticket in transfers:
            try:
                with naming(what):
                    ticket.wait()
            except OffloadIOError as error:
                first = first or error
    return first


def wait_all(transfers: Iterable[tuple[str, Ticket]], kind: str) -> None:
    """Wait for every transfer, also after one failed; then raise the first error, naming its tensor."""
    failure = first_failure(transfers, kind)
    if failure is not None:
        raise failure
