"""The `offload` section: our own keys, which stock DeepSpeed ignores."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from offload.config.base import AUTO, ConfigSection, Integer


class OffloadConfig(ConfigSection):
    """Settings that only this package knows, at the top level of the config."""

    section: ClassVar[str] = "offload"
    auto_is_a_value: ClassVar[frozenset[str]] = frozenset({"host_cache", "gradients"})

    backend: Literal["auto", "uring", "libaio", "posix"] = "auto"
    """What moves the bytes; `auto` takes the first of `uring`, `libaio`, `posix` that works here."""

    buffer_bytes: Integer = Field(256 << 20, ge=8 << 20, le=1 << 40)
    """All memory of the streamed optimizer step, whatever the size of the model; at least 8 MiB."""

    state_format: Literal["fp32", "split", "8bit"] = "fp32"
    """State on storage: `fp32`; `split`: 2 B less, exact, for bf16; `8bit`: Adam in bf16, 4.1 B, lossy."""

    gradients: Literal["host", "nvme", "auto"] = "auto"
    """Where gradients wait for the step; `auto`: on `nvme` where they would fill half of the free memory."""

    host_cache: int | Literal["auto"] = 0
    """Bytes of host memory for state that then stays there; `auto`: half of what is free, among the ranks."""

    checksums: bool = False
    """Compare what is read with digests of what was written, kept in memory; a mismatch is an error."""

    @field_validator("host_cache", mode="before")
    @classmethod
    def _bytes_or_auto(cls, value: object) -> object:
        text = value.strip() if isinstance(value, str) else value
        if text == AUTO or (isinstance(text, int) and not isinstance(text, bool) and text >= 0):
            return text
        if isinstance(text, str) and text.isdecimal():
            return int(text)
        raise ValueError('it should be a number of bytes, 0 or more, or "auto"')
