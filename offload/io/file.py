"""Files that stay open from one transfer to the next."""

import os
from types import TracebackType
from typing import Literal

from typing_extensions import Self

from offload import _C

_MODES = {"r": _C.FileMode.READ, "rw": _C.FileMode.READ_WRITE}


class File:
    """An open file, direct where its file system allows; `nbytes` reserves the space at once.

    Closing it while transfers are in flight is allowed: they keep it open until they are done.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["r", "rw"] = "r",
        nbytes: int | None = None,
        *,
        direct: bool = True,
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode {mode!r}: choose 'r' or 'rw'")
        if nbytes is not None and (mode == "r" or nbytes < 0):
            raise ValueError(
                f"nbytes={nbytes} with mode {mode!r}: only 'rw' reserves space, and no negative size"
            )
        self._core: _C.File | None = _C.File(os.fsencode(path), _MODES[mode], direct)
        self.path = os.fsdecode(path)
        if nbytes is not None:
            self._core.preallocate(nbytes)

    @property
    def core(self) -> _C.File:
        if self._core is None:
            raise ValueError(f"{self.path}: the file is closed")
        return self._core

    @property
    def closed(self) -> bool:
        return self._core is None

    @property
    def nbytes(self) -> int:
        """The file's length now."""
        return self.core.nbytes()

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.core.is_direct

    @property
    def alignment(self) -> int:
        """Offsets that are multiples of it move without the page cache."""
        return self.core.offset_alignment

    def sync(self) -> None:
        """Waits until what was written is on the device."""
        self.core.sync()

    def close(self) -> None:
        self._core = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "direct" if self.is_direct else "buffered"
        return f"<File {self.path!r} {state}>"
