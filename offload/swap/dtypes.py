"""The dtypes that the kernels know."""

import torch

from offload import _C

DTYPES = {
    torch.float32: _C.Dtype.float32,
    torch.bfloat16: _C.Dtype.bfloat16,
    torch.float16: _C.Dtype.float16,
}
