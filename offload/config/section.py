"""The `offload` section: our own keys, which stock DeepSpeed ignores."""

from typing import ClassVar, Literal

from pydantic import Field

from offload.config.base import ConfigSection, Integer


class OffloadConfig(ConfigSection):
    """Settings that only this package knows, at the top level of the config."""

    section: ClassVar[str] = "offload"

    backend: Literal["auto", "uring", "libaio", "posix"] = "auto"
    """What moves the bytes; `auto` takes the first of `uring`, `libaio`, `posix` that works here."""

    buffer_bytes: Integer = Field(256 << 20, ge=8 << 20, le=1 << 40)
    """All memory of the streamed optimizer step, whatever the size of the model; at least 8 MiB."""

    state_format: Literal["fp32", "split", "8bit"] = "fp32"
    """Adam's state on storage: `fp32` 12 B per weight; `split` 10 B, exact, for bf16; `8bit` 4.1 B, lossy."""
