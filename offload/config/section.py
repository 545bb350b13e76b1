"""The `offload` section: our own keys, which stock DeepSpeed ignores."""

from typing import ClassVar, Literal

from offload.config.base import ConfigSection


class OffloadConfig(ConfigSection):
    """Settings that only this package knows, at the top level of the config."""

    section: ClassVar[str] = "offload"

    backend: Literal["auto", "uring", "libaio", "posix"] = "auto"
    """What moves the bytes; `auto` takes the first of `uring`, `libaio`, `posix` that works here."""
