"""What the two offload sections share: a device and, for NVMe, a path."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, model_validator
from typing_extensions import Self

from offload.config.base import ConfigSection


def _unset(value: object) -> object:
    """Accelerate writes "none" where no path was given; an empty text would be the working directory."""
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


class DeviceSection(ConfigSection):
    """A section that places one kind of state."""

    must_be_written: ClassVar[frozenset[str]] = frozenset({"device", "nvme_path"})

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where the state lives: `none` (with the model), `cpu` or `nvme`; `nvme` needs ZeRO stage 3."""

    nvme_path: Annotated[Path | None, BeforeValidator(_unset)] = None
    """Directory for the swap files, on the drive to swap to; made when missing. Needed with device `nvme`."""

    @model_validator(mode="after")
    def _require_path(self) -> Self:
        if self.on_nvme and self.nvme_path is None:
            raise ValueError(
                f"{self.key('nvme_path')} is missing, and {self.key('device')} is nvme; "
                "name a directory on the drive to swap to"
            )
        return self

    @property
    def on_nvme(self) -> bool:
        """Whether this state swaps to a drive."""
        return self.device == "nvme"
