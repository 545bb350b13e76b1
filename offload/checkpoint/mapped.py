"""Swapped tensors as tensors: mapped from their file, so that saving one needs no memory for it."""

import errno
import os

import torch

from offload.errors import io_error
from offload.io.digests import DIGESTS
from offload.swap.layout import Extent
from offload.swap.transfers import naming


def mapped_tensor(extent: Extent, dtype: torch.dtype) -> torch.Tensor:
    """A read-only use of the extent's values; the kernel brings pages in as they are read and may drop them.

    The mapping is private: writing to the tensor changes no file. It is valid as long as the file keeps its
    length, which the owner of the swap area guarantees until the tensor is gone. Where digests of it are kept
    it is read once, to be compared with them.

    Raises:
        OffloadIOError: the file is missing, shorter than the extent, or not what was written there.
    """
    end = extent.offset + extent.nbytes
    try:
        found = os.stat(extent.path).st_size
    except OSError as error:
        raise io_error(error.errno or 0, f"mapping {extent.key}", extent.path) from error
    if found < end:
        what = f"mapping {extent.key}, whose values end at {end} B in a file of {found} B"
        raise io_error(errno.ENODATA, what, extent.path, offset=extent.offset)
    mapped = torch.from_file(extent.path, shared=False, size=end // dtype.itemsize, dtype=dtype)
    values = mapped[extent.offset // dtype.itemsize :]
    with naming(f"mapping {extent.key}"):
        DIGESTS.check(values, extent.path, extent.offset)
    return values
