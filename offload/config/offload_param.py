"""The `zero_optimization.offload_param` section: where parameters live."""

from typing import ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from offload.config.base import Integer
from offload.config.device import DeviceSection

_LARGEST = (1 << 63) - 1


class OffloadParamConfig(DeviceSection):
    """Placement of the 16-bit (or fp32) parameters, with DeepSpeed's keys and defaults."""

    section: ClassVar[str] = "zero_optimization.offload_param"

    buffer_count: Integer = Field(5, ge=0, le=_LARGEST)
    """Times buffer_size: the elements that fit the memory parameters swap through; it is cut as needed."""

    buffer_size: Integer = Field(100_000_000, ge=0, le=_LARGEST)
    """Elements per buffer; raise it when one parameter does not fit the memory they make together."""

    max_in_cpu: Integer = Field(1_000_000_000, ge=0, le=_LARGEST)
    """Parameter elements that stay in host memory when the device is `nvme`, by whole sub-groups."""

    pin_memory: bool = True
    """Lock the buffers in memory: faster copies to the device; `false` locks no byte."""

    @model_validator(mode="after")
    def _require_buffers(self) -> Self:
        if self.on_nvme and self.arena_nbytes(element_nbytes=1) == 0:
            raise ValueError(
                f"{self.key('buffer_count')} is {self.buffer_count} and {self.key('buffer_size')} is "
                f"{self.buffer_size}, which leaves no memory to swap through; raise both above 0"
            )
        return self

    def arena_nbytes(self, element_nbytes: int) -> int:
        """Bytes of host memory that parameters of this element size swap through."""
        return self.buffer_count * self.buffer_size * element_nbytes
