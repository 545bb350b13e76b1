"""The places where offload enters DeepSpeed: one table, checked whole before any of it is touched."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from offload.errors import OffloadError

TESTED_DEEPSPEED = ("0.19.8",)
"""Versions of DeepSpeed whose seams are known; another one is refused, not tried."""


@dataclass(frozen=True)
class Seam:
    """`module.owner.name` (no owner: `module.name`) becomes `replace(original)`."""

    module: str
    owner: str | None
    name: str
    replace: Callable[[Any], Any]

    @property
    def label(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)

    def holder(self) -> Any:
        """The object whose attribute is replaced.

        Raises:
            OffloadError: DeepSpeed has moved it.
        """
        try:
            holder = importlib.import_module(self.module)
            holder = getattr(holder, self.owner) if self.owner else holder
            getattr(holder, self.name)
        except (ImportError, AttributeError) as error:
            raise OffloadError(
                f"{self.label} is not in this DeepSpeed ({error}); install deepspeed=={TESTED_DEEPSPEED[-1]}"
            ) from error
        return holder


def check_version() -> None:
    """Refuse a DeepSpeed that was not tested.

    Raises:
        OffloadError: it is missing or another version.
    """
    try:
        found = version("deepspeed")
    except PackageNotFoundError as error:
        raise OffloadError(
            f"DeepSpeed is not installed; pip install deepspeed=={TESTED_DEEPSPEED[-1]}"
        ) from error
    if found.split("+")[0] not in TESTED_DEEPSPEED:
        raise OffloadError(f"DeepSpeed {found} is not supported; tested are {', '.join(TESTED_DEEPSPEED)}")


class Patch:
    """All seams, applied together and undone together."""

    def __init__(self, seams: list[Seam]) -> None:
        self._seams = seams
        self._originals: list[tuple[Any, str, Any]] = []

    @property
    def applied(self) -> bool:
        return bool(self._originals)

    def apply(self) -> None:
        """Check every seam, then replace them all; a second call does nothing."""
        if self.applied:
            return
        check_version()
        holders = [(seam, seam.holder()) for seam in self._seams]
        for seam, holder in holders:
            original = vars(holder).get(seam.name, _ABSENT)
            current = getattr(holder, seam.name)
            self._originals.append((holder, seam.name, original))
            setattr(holder, seam.name, seam.replace(current))

    def undo(self) -> None:
        """Put every original back."""
        while self._originals:
            holder, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, original)


_ABSENT = object()
