"""Moves parameters, gradients and optimizer state between storage and a small, fixed amount of memory."""

from offload.swap.buffers import SwapBuffer, SwapBufferManager, SwapBufferPool
from offload.swap.optimizer_swapper import OptimizerSwapper
from offload.swap.param_swapper import AsyncPartitionedParameterSwapper
from offload.swap.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from offload.swap.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from offload.swap.tensor_swapper import AsyncTensorSwapper

__all__ = [
    "AsyncPartitionedParameterSwapper",
    "AsyncTensorSwapper",
    "OptimizerSwapper",
    "PartitionedOptimizerSwapper",
    "PipelinedOptimizerSwapper",
    "SwapBuffer",
    "SwapBufferManager",
    "SwapBufferPool",
]
