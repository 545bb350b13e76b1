"""Figures of the swap side: bytes moved and seconds waited, by kind of tensor."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from offload.io import pinned
from offload.io.digests import DIGESTS

KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step (everything since the step before it) moved and waited for on this rank."""

    step: int
    seconds: float
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    seconds_stalled: dict[str, float] = field(default_factory=dict)
    bytes_cached: dict[str, int] = field(default_factory=dict)
    locked_bytes: int = 0
    resident_bytes: int = 0


class Meter:
    """Counts for the whole process; every method may be called from any thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._totals: dict[str, Counter[str]] = {
            "read": Counter(),
            "written": Counter(),
            "stalled": Counter(),
            "hit": Counter(),
        }
        self._at_last_step = {name: Counter(counts) for name, counts in self._totals.items()}
        self._kept_in_memory: Counter[str] = Counter()
        self._started = time.monotonic()
        self._steps = 0
        self._last: StepRecord | None = None

    def read(self, kind: str, nbytes: int) -> None:
        with self._mutex:
            self._totals["read"][kind] += nbytes

    def written(self, kind: str, nbytes: int) -> None:
        with self._mutex:
            self._totals["written"][kind] += nbytes

    def hit(self, kind: str, nbytes: int) -> None:
        """Count bytes that the host cache had, so that they were not read."""
        with self._mutex:
            self._totals["hit"][kind] += nbytes

    def keep_in_memory(self, kind: str, nbytes: int) -> None:
        """Count a tensor that is too small to be worth swapping (negative when it goes away)."""
        with self._mutex:
            self._kept_in_memory[kind] += nbytes

    @contextmanager
    def stall(self, kind: str) -> Iterator[None]:
        """Time the body as waiting for storage."""
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            with self._mutex:
                self._totals["stalled"][kind] += seconds  # type: ignore[assignment]

    def finish_step(self) -> StepRecord:
        """Close the current step's record and start the next one."""
        with self._mutex:
            now = time.monotonic()
            delta = {
                name: {kind: counts[kind] - self._at_last_step[name][kind] for kind in KINDS}
                for name, counts in self._totals.items()
            }
            self._at_last_step = {name: Counter(counts) for name, counts in self._totals.items()}
            self._steps += 1
            self._last = StepRecord(
                step=self._steps,
                seconds=now - self._started,
                bytes_read=delta["read"],
                bytes_written=delta["written"],
                seconds_stalled=dict(delta["stalled"]),
                bytes_cached=delta["hit"],
                locked_bytes=pinned.totals().locked_bytes,
                resident_bytes=psutil.Process().memory_info().rss,
            )
            self._started = now
            return self._last

    def snapshot(self) -> dict[str, object]:
        """The last finished step and the totals since the process started."""
        with self._mutex:
            totals = {name: {kind: counts[kind] for kind in KINDS} for name, counts in self._totals.items()}
            return {
                "last_step": self._last,
                "steps": self._steps,
                "bytes_read": totals["read"],
                "bytes_written": totals["written"],
                "seconds_stalled": totals["stalled"],
                "bytes_cached": totals["hit"],
                "bytes_checked": DIGESTS.bytes_checked,
                "bytes_unchecked": DIGESTS.bytes_unchecked,
                "kept_in_memory_bytes": dict(self._kept_in_memory),
                "locked_bytes": pinned.totals().locked_bytes,
                "resident_bytes": psutil.Process().memory_info().rss,
            }


METER = Meter()
