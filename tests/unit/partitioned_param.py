"""Stand-ins for what ZeRO-3 gives the parameter swapper: a partitioned parameter and its config."""

from enum import Enum
from types import SimpleNamespace

import torch


class PartitionStatus(Enum):
    """As DeepSpeed's `PartitionedParamStatus`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class GatherStatus(Enum):
    """As DeepSpeed's `ZeroParamStatus`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def config(path, **values):
    """What `zero.Init` hands over: its own config object, of which the swapper reads two sections."""
    defaults = {"nvme_path": path, "buffer_count": 5, "buffer_size": 1 << 20, "pin_memory": False}
    zero = SimpleNamespace(offload_param=SimpleNamespace(**{**defaults, **values}))
    return SimpleNamespace(zero_config=zero, aio_config={"block_size": 1 << 20})


def new_param(ds_id, values):
    """A parameter before its first partitioning."""
    param = torch.nn.Parameter(values.clone())
    param.ds_id, param.ds_tensor, param.ds_status = ds_id, None, GatherStatus.AVAILABLE
    return param


def partition(param, swapper):
    """What DeepSpeed does with a new parameter of one rank: its values go to storage, the memory is freed."""
    buffer = swapper.get_buffer(param, param.numel())
    param.ds_tensor = torch.empty(0, dtype=param.dtype)
    param.ds_tensor.data = buffer
    param.ds_tensor.ds_numel = param.numel()
    param.ds_tensor.status = PartitionStatus.AVAILABLE
    param.ds_tensor.final_location = "nvme"
    param.ds_tensor.copy_(param.data.reshape(-1))
    release(param)
    swapper.swap_out_and_release([param])


def gather(param):
    """One rank on CPU: the gathered parameter is a view of its partition."""
    assert param.ds_tensor.status is PartitionStatus.AVAILABLE
    param.data = param.ds_tensor.data
    param.ds_status = GatherStatus.AVAILABLE


def release(param):
    param.data = torch.empty(0, dtype=param.dtype)
    param.ds_status = GatherStatus.NOT_AVAILABLE
