"""What the optimizer swapper knows of one sub-group."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from offload.io import Ticket
from offload.swap.buffers import SwapBuffer
from offload.swap.layout import Extent, SwapFile

MASTER = "fp32"
"""Name of the master weights among a sub-group's tensors; the others carry their optimizer-state name."""

GRADIENT = "gradient"
"""Name of the buffer that holds a resident sub-group's gradient."""


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient inside its sub-group, on storage (`extent`) or still in memory (`tensor`)."""

    offset: int
    numel: int
    dtype: torch.dtype
    extent: Extent | None = None
    tensor: torch.Tensor | None = None


@dataclass
class Swapped:
    """One tensor of a sub-group that lives on storage."""

    extent: Extent
    dtype: torch.dtype


@dataclass
class SubGroup:
    """One rank's partition of consecutive parameters: master weights, optimizer state and gradients.

    `parameter` is DeepSpeed's flat fp32 tensor, without elements while the sub-group is on storage. While it
    is `resident` its values stand in `buffers`; while they are written, `written_from` keeps them in
    `written_buffers`, in case the drive refuses them. `unsaved`: memory holds values that storage does not.
    """

    index: int
    parameter: torch.Tensor
    numel: int
    folder: Path
    swapped: dict[str, Swapped] = field(default_factory=dict)
    gradients: dict[int, Gradient] = field(default_factory=dict)
    gradient_extents: dict[tuple[int, int, torch.dtype], Extent] = field(default_factory=dict)
    gradient_file: SwapFile | None = None
    buffers: dict[str, SwapBuffer] = field(default_factory=dict)
    reading: list[tuple[str, Ticket]] = field(default_factory=list)
    writing: list[tuple[str, Ticket]] = field(default_factory=list)
    written_from: dict[str, torch.Tensor] = field(default_factory=dict)
    written_buffers: dict[str, SwapBuffer] = field(default_factory=dict)
    resident: bool = False
    unsaved: bool = False

    def describe(self, name: str) -> str:
        return f"{name} of sub-group {self.index} ({self.numel} elements)"

    def swapped_tensor(self, name: str, dtype: torch.dtype, nbytes: int | None = None) -> Swapped:
        """Where the tensor `name` lies; its file is made, and its space reserved, on first use.

        `nbytes`, where it is given, replaces one element per weight. A new file reads as zeros.
        """
        known = self.swapped.get(name)
        if known is not None and known.dtype == dtype:
            return known
        path = (
            self.folder / f"{self.index:05d}.{quote(name, safe='')}.{str(dtype).removeprefix('torch.')}.swp"
        )
        path.unlink(missing_ok=True)
        extent = SwapFile(path).allocate(
            self.numel * dtype.itemsize if nbytes is None else nbytes, self.describe(name)
        )
        self.swapped[name] = Swapped(extent, dtype)
        if known is not None:
            Path(known.extent.path).unlink(missing_ok=True)
        return self.swapped[name]

    def gradient_extent(self, offset: int, numel: int, dtype: torch.dtype) -> Extent:
        """Where the gradient at `offset` goes; the same place in every step."""
        known = self.gradient_extents.get((offset, numel, dtype))
        if known is not None:
            return known
        if self.gradient_file is None:
            self.gradient_file = SwapFile(self.folder / f"{self.index:05d}.gradient.swp")
        key = self.describe(f"gradient at {offset}")
        extent = self.gradient_file.allocate(numel * dtype.itemsize, key)
        self.gradient_extents[(offset, numel, dtype)] = extent
        return extent

    def forget_state(self, keep: Container[str]) -> None:
        """Drop the state tensors not named in `keep`, and the gradients; never the master weights."""
        for name in [name for name in self.swapped if name != MASTER and name not in keep]:
            Path(self.swapped.pop(name).extent.path).unlink(missing_ok=True)
        self.gradients.clear()

    def release_buffers(self) -> None:
        for buffer in self.buffers.values():
            buffer.release()
        self.buffers.clear()
        self.resident = False


def state_tensors(optimizer: Any, group: SubGroup) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of the optimizer states that swap with the sub-group: one value per master weight."""
    for name, value in optimizer.state.get(group.parameter, {}).items():
        if not torch.is_tensor(value) or not getattr(value, "swappable", True):
            continue
        if name in group.swapped or value.numel() == group.numel:
            yield name, value
