"""Text that every machine has: the sources of Python's own standard library, byte by byte."""

import sysconfig
from pathlib import Path

import torch

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Corpus:
    """All modules, one after the other; byte 0, which no source contains, ends each."""

    vocabulary = 256

    def __init__(self, sequence_length: int) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        modules = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.parts))
        text = bytearray().join(path.read_bytes() + b"\0" for path in sorted(modules))
        if len(text) <= sequence_length:
            raise SystemExit(f"{root}: {len(text)} B of Python sources are too few; install the full library")
        self.sequence_length = sequence_length
        self.tokens = torch.frombuffer(text, dtype=torch.uint8)

    def batch(self, number: int, size: int) -> torch.Tensor:
        """Random windows, a function of the number alone: to resume, no generator's state is needed."""
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.tokens) - self.sequence_length, (size,), generator=generator)
        return torch.stack([self.tokens[start : start + self.sequence_length] for start in starts]).long()
