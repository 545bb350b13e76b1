"""Swapped tensors as tensors: mapped from their file, so that saving one needs no memory for it."""

import os

import torch

from offload.errors import OffloadIOError
from offload.swap.layout import Extent


def mapped_tensor(extent: Extent, dtype: torch.dtype) -> torch.Tensor:
    """A read-only use of the extent's values; the kernel brings pages in as they are read and may drop them.

    The mapping is private: writing to the tensor changes no file. It is valid as long as the file keeps its
    length, which the owner of the swap area guarantees until the tensor is gone.

    Raises:
        OffloadIOError: the file is shorter than the extent.
    """
    found = os.stat(extent.path).st_size
    end = extent.offset + extent.nbytes
    if found < end:
        raise OffloadIOError(
            5, f"{extent.key}: the file ends at {found} B but the values end at {end} B", extent.path
        )
    mapped = torch.from_file(extent.path, shared=False, size=end // dtype.itemsize, dtype=dtype)
    return mapped[extent.offset // dtype.itemsize :]
