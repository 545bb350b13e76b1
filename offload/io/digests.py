"""Digests of what was written to files; what is read from there is compared with them."""

import ctypes
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
import xxhash

from offload import _C
from offload.errors import OffloadIntegrityError, integrity_error

SEGMENT_NBYTES = 1 << 20
"""One digest covers no more: a read of a part of what was written is checked too, and a fault has a place."""

CoreExtent = tuple[int, int, _C.File, int]
"""Address, bytes, file, offset."""

_PYBUF_READ = 0x100
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of.restype = ctypes.py_object


class Segment:
    """Bytes of a file and their digest; until a read has found them, `written_by` tells if they got there."""

    __slots__ = ("digest", "nbytes", "offset", "written_by")

    def __init__(self, offset: int, nbytes: int, digest: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.digest = digest
        self.written_by: _C.Transfer | None = None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def is_known(self) -> bool:
        """False when the write failed: then the file may hold anything there."""
        transfer = self.written_by
        return transfer is None or not transfer.done() or transfer.error() is None


Expected = tuple[str, Segment, int]
"""Path, segment, and the address of the memory that must have its digest."""


class Check:
    """The comparison that one read has to pass; the first who asks for its result makes it.

    It keeps the memory until then.
    """

    def __init__(
        self, digests: "Digests", expected: Sequence[Expected], nbytes: int, memory: Sequence[object]
    ) -> None:
        self._digests = digests
        self._expected: Sequence[Expected] = expected
        self._nbytes = nbytes
        self._memory: Sequence[object] | None = memory
        self._mismatch: tuple[str, Segment, int] | None = None
        self._lock = threading.Lock()

    def failure(self) -> OffloadIntegrityError | None:
        """The first mismatch, or None; to be called when the transfer has ended well."""
        with self._lock:
            if self._memory is not None:
                self._compare()
                self._expected, self._memory = (), None
        if self._mismatch is None:
            return None
        path, segment, found = self._mismatch
        return integrity_error(path, segment.offset, segment.nbytes, segment.digest, found)

    def _compare(self) -> None:
        checked = 0
        for path, segment, address in self._expected:
            found = _digest(address, segment.nbytes)
            if found == segment.digest:
                segment.written_by = None
            elif not segment.is_known:
                continue
            else:
                self._mismatch = self._mismatch or (path, segment, found)
            checked += segment.nbytes
        self._digests.count(checked, self._nbytes - checked)


class Digests:
    """What the files written through some handles hold, by path; any thread may use it.

    A write replaces the digests of all segments that it touches. A read is compared with those, of the last
    writes submitted before it, that it covers whole; the rest of its bytes are counted as unchecked.
    """

    def __init__(self) -> None:
        # Reentrant: dropping a swap area under it forgets that area's files.
        self._lock = threading.RLock()
        self._files: dict[str, list[Segment]] = {}
        self.bytes_checked = 0
        self.bytes_unchecked = 0

    def write(self, core: _C.IoHandle, extents: Sequence[CoreExtent]) -> _C.Transfer:
        """Start a write, its digests taken first."""
        written = [(file.path, list(_segments(address, n, offset))) for address, n, file, offset in extents]
        with self._lock:
            transfer = core.submit(True, extents)
            for path, segments in written:
                self._replace(self._files.setdefault(path, []), segments)
                for segment in segments:
                    segment.written_by = transfer
        return transfer

    def read(
        self, core: _C.IoHandle, extents: Sequence[CoreExtent], memory: Sequence[object]
    ) -> tuple[_C.Transfer, Check]:
        """Start a read; `memory` is what it lands in."""
        with self._lock:
            expected = [
                part
                for address, nbytes, file, offset in extents
                for part in self._expected(file.path, address, nbytes, offset)
            ]
            transfer = core.submit(False, extents)
        return transfer, Check(self, expected, sum(extent[1] for extent in extents), memory)

    def check(self, tensor: torch.Tensor, path: str, offset: int) -> None:
        """Compare memory that was filled from a file in another way than through a handle.

        Raises:
            OffloadIntegrityError: it is not what was written there.
        """
        with self._lock:
            expected = list(self._expected(path, tensor.data_ptr(), tensor.nbytes, offset))
        if not expected:
            return
        failure = Check(self, expected, tensor.nbytes, (tensor,)).failure()
        if failure is not None:
            raise failure

    def forget(self, path: str) -> None:
        """The file is gone; what has its name from now on is another one."""
        with self._lock:
            self._files.pop(path, None)

    def forget_folder(self, path: str) -> None:
        """All files in the folder are gone."""
        with self._lock:
            for inside in [name for name in self._files if name.startswith(path + os.sep)]:
                del self._files[inside]

    def count(self, checked: int, unchecked: int) -> None:
        with self._lock:
            self.bytes_checked += checked
            self.bytes_unchecked += unchecked

    def _expected(self, path: str, address: int, nbytes: int, offset: int) -> Iterator[Expected]:
        segments = self._files.get(path, [])
        for position in range(*_touched(segments, offset, offset + nbytes)):
            segment = segments[position]
            if segment.offset >= offset and segment.end <= offset + nbytes:
                yield path, segment, address + segment.offset - offset

    @staticmethod
    def _replace(segments: list[Segment], fresh: list[Segment]) -> None:
        if fresh:
            first, last = _touched(segments, fresh[0].offset, fresh[-1].end)
            segments[first:last] = fresh


def _segments(address: int, nbytes: int, offset: int) -> Iterator[Segment]:
    """Cut by the write's start and by the file: reads of its parts begin at multiples of either."""
    end, size = offset + nbytes, SEGMENT_NBYTES
    cuts = sorted({*range(offset, end, size), *range(offset // size * size + size, end, size)})
    for start, stop in zip(cuts, [*cuts[1:], end], strict=False):
        yield Segment(start, stop - start, _digest(address + start - offset, stop - start))


def _touched(segments: Sequence[Segment], start: int, end: int) -> tuple[int, int]:
    """The positions, first and behind the last, of the segments that overlap bytes `start` to `end`."""
    first = bisect_left(segments, start, key=attrgetter("offset"))
    if first and segments[first - 1].end > start:
        first -= 1
    return first, bisect_left(segments, end, lo=first, key=attrgetter("offset"))


def _digest(address: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(_view_of(address, nbytes, _PYBUF_READ))


DIGESTS = Digests()
"""Of the whole process: what one handle wrote, another may read."""
