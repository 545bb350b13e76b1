"""The sections of a DeepSpeed config that say how to swap, typed and checked."""

from offload.config.aio import AioConfig
from offload.config.deepspeed import SwapConfig, read_config
from offload.config.offload_optimizer import OffloadOptimizerConfig
from offload.config.offload_param import OffloadParamConfig
from offload.config.section import OffloadConfig
from offload.config.space import SpaceNeed, check_free_space, needed_nbytes, optimizer_nbytes

__all__ = [
    "AioConfig",
    "OffloadConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "SpaceNeed",
    "SwapConfig",
    "check_free_space",
    "needed_nbytes",
    "optimizer_nbytes",
    "read_config",
]
