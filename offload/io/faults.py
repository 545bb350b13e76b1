"""Faults on purpose, for tests: what a drive, a kernel or a signal may do to a handle."""

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from offload import _C

Fault = Literal["eio", "enospc", "eagain", "eintr", "short", "delay", "reorder", "busy", "broken"]

_KINDS: dict[Fault, _C.FaultKind] = {name: _C.FaultKind.__members__[name.upper()] for name in get_args(Fault)}
_ERRNO = {_C.FaultKind.EIO: errno.EIO, _C.FaultKind.ENOSPC: errno.ENOSPC}


@dataclass(frozen=True)
class HardFault:
    """A request that was answered with an error no retry can mend."""

    errno: int
    writing: bool
    offset: int
    nbytes: int


class FaultPlan:
    """Which requests of a handle go wrong: `AsyncIOHandle(faults=FaultPlan(seed=1, rates={"short": 0.2}))`.

    `rates` are probabilities per request, the same with the same `seed` and order of requests; `scheduled`
    names requests by number, from 1. `eio` and `enospc` (writes only) are errors of the transfer; `broken`
    ends the backend, and with it every transfer in flight. All others must go unnoticed: `eagain`, `eintr`,
    `short` transfers, `delay` by `delay_seconds`, `reorder` (others complete first), `busy` (the kernel
    takes nothing now).
    """

    def __init__(
        self,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        scheduled: Iterable[tuple[int, Fault]] = (),
        delay_seconds: float = 0.001,
    ) -> None:
        for name, rate in (rates or {}).items():
            _check_name(name)
            if not 0 <= rate <= 1:
                raise ValueError(f"rate of {name!r} must lie between 0 and 1, not {rate}")
        planned = list(scheduled)
        for number, name in planned:
            _check_name(name)
            if number < 1:
                raise ValueError(f"requests are numbered from 1, not {number}")
        self.core = _C.FaultPlan(
            seed,
            {_KINDS[name]: rate for name, rate in (rates or {}).items()},
            [(number, _KINDS[name]) for number, name in planned],
            delay_seconds,
        )

    def counts(self) -> dict[Fault, int]:
        """How many of each have been injected so far."""
        return dict(zip(_KINDS, self.core.counts(), strict=True))

    def hard(self) -> list[HardFault]:
        """Every `eio` and `enospc` so far."""
        found = self.core.hard()
        return [HardFault(_ERRNO[kind], writing, offset, nbytes) for kind, writing, offset, nbytes in found]


def _check_name(name: str) -> None:
    if name not in _KINDS:
        raise ValueError(f"fault {name!r}: choose from {', '.join(_KINDS)}")
