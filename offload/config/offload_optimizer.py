"""The `zero_optimization.offload_optimizer` section: where optimizer state lives."""

from typing import ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from offload.config.base import Integer, Share
from offload.config.device import DeviceSection


class OffloadOptimizerConfig(DeviceSection):
    """Placement of master weights and optimizer state, with DeepSpeed's keys and defaults."""

    section: ClassVar[str] = "zero_optimization.offload_optimizer"

    buffer_count: Integer = Field(4, ge=0, le=(1 << 31) - 1)
    """The memory optimizer state swaps through, in units of the largest sub-group."""

    pin_memory: bool = True
    """Lock the buffers in memory: faster copies to the device; `false` locks no byte."""

    pipeline_read: bool = False
    """Read the next sub-group while the optimizer works on this one."""

    pipeline_write: bool = False
    """Write the previous sub-group while the optimizer works on this one."""

    fast_init: bool = False
    """Fill the master weights straight from parameters on NVMe, not through the model's device."""

    ratio: Share = Field(1.0, ge=0.0, le=1.0)
    """Share of the optimizer state that moves off the model's device; `nvme` needs 1.0."""

    super_offload: bool = False
    """DeepSpeed's CPU offload for Superchips; not with device `nvme`."""

    cpuadam_cores_perc: Share = Field(0.8, ge=0.0, le=1.0)
    """Share of the CPU cores that super_offload gives to Adam."""

    @model_validator(mode="after")
    def _refuse_what_nvme_cannot_do(self) -> Self:
        if not self.on_nvme:
            return self
        if self.ratio < 1.0:
            raise ValueError(
                f"{self.key('ratio')} is {self.ratio} with device nvme, but the rest of the state would be "
                "neither swapped nor saved; set ratio to 1.0, or device to cpu"
            )
        if self.super_offload:
            raise ValueError(
                f"{self.key('super_offload')} is true with device nvme, but its Adam works on state in CPU "
                "memory only; set super_offload to false, or device to cpu"
            )
        if self.buffer_count == 0:
            raise ValueError(
                f"{self.key('buffer_count')} is 0, which leaves no memory to swap through; "
                "remove the key or raise it"
            )
        return self

    @property
    def pipelined(self) -> bool:
        """Whether transfers of one sub-group overlap the work on another."""
        return self.pipeline_read or self.pipeline_write

    def arena_nbytes(self, sub_group_numel: int, element_nbytes: int) -> int:
        """Bytes of host memory that optimizer state swaps through, given the largest sub-group."""
        return self.buffer_count * sub_group_numel * element_nbytes
