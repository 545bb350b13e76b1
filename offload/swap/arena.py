"""Hands out byte ranges of one block of memory."""

from bisect import insort

ALIGNMENT = 4096
"""Every range starts and ends on this boundary, so O_DIRECT takes it without a bounce copy."""


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


class Arena:
    """First-fit allocator over `nbytes` bytes; knows offsets only, owns no memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = align_up(nbytes)
        self._free: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []
        self._used: dict[int, int] = {}

    @property
    def free_nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._free)

    @property
    def idle(self) -> bool:
        """True while nothing is allocated."""
        return not self._used

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free range of at least `nbytes` bytes, or None when there is none."""
        wanted = align_up(max(nbytes, 1))
        for index, (offset, length) in enumerate(self._free):
            if length < wanted:
                continue
            self._free[index : index + 1] = [(offset + wanted, length - wanted)] if length > wanted else []
            self._used[offset] = wanted
            return offset
        return None

    def free(self, offset: int) -> None:
        """Give back the range that starts at `offset`; ValueError when none does."""
        nbytes = self._used.pop(offset, None)
        if nbytes is None:
            raise ValueError(f"nothing is allocated at offset {offset} of this {self.nbytes} B arena")
        insort(self._free, (offset, nbytes))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged
