"""A DeepSpeed config, read and checked before any weight is allocated."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from offload.config.aio import AioConfig
from offload.config.base import ConfigSection, shown
from offload.config.offload_optimizer import OffloadOptimizerConfig
from offload.config.offload_param import OffloadParamConfig
from offload.config.placement import ZERO, misplaced, section_at, without_misplaced
from offload.config.section import OffloadConfig
from offload.config.source import load
from offload.config.storage import check_swap_path
from offload.errors import OffloadConfigError

if TYPE_CHECKING:
    from offload.io import AsyncIOHandle

_Section = TypeVar("_Section", bound=ConfigSection)
_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class SwapConfig:
    """Everything a run's config says about swapping; an absent section has its defaults."""

    aio: AioConfig
    offload: OffloadConfig
    offload_param: OffloadParamConfig
    offload_optimizer: OffloadOptimizerConfig
    zero_stage: int

    @property
    def uses_nvme(self) -> bool:
        """Whether anything swaps to a drive."""
        return self.offload_param.on_nvme or self.offload_optimizer.on_nvme

    @property
    def swap_paths(self) -> dict[str, Path]:
        """The swap directories in use, by the key that names them."""
        sections = (self.offload_param, self.offload_optimizer)
        return {
            section.key("nvme_path"): section.nvme_path
            for section in sections
            if section.on_nvme and section.nvme_path
        }

    def build_handle(self) -> "AsyncIOHandle":
        """A new I/O handle on the chosen backend; the caller owns and closes it."""
        return self.aio.build_handle(self.offload.backend, self.offload.checksums)


def read_config(
    config: Mapping[str, Any] | str | os.PathLike[str], *, probe_storage: bool = True
) -> SwapConfig:
    """The swap settings of a DeepSpeed config, given as a dict, a JSON file or base64 text.

    Raises OffloadConfigError with one line per problem. `probe_storage` tries a write on each swap path.
    """
    raw = load(config)
    problems = misplaced(raw)
    swap = SwapConfig(
        aio=_section(AioConfig, raw, problems),
        offload=_section(OffloadConfig, raw, problems),
        offload_param=_section(OffloadParamConfig, raw, problems),
        offload_optimizer=_section(OffloadOptimizerConfig, raw, problems),
        zero_stage=_zero_stage(raw, problems),
    )
    if not problems:
        problems += _rules_across_sections(swap, raw)
    if problems:
        raise OffloadConfigError("\n".join(problems))
    if probe_storage:
        for path, keys in _keys_by_path(swap).items():
            check_swap_path(path, " and ".join(keys))
    return swap


def _section(kind: type[_Section], raw: Mapping[str, Any], problems: list[str]) -> _Section:
    try:
        return kind.parse(without_misplaced(section_at(raw, kind.section)))
    except OffloadConfigError as error:
        problems.append(str(error))
        return kind()


def _zero_stage(raw: Mapping[str, Any], problems: list[str]) -> int:
    zero = raw.get(ZERO)
    if zero is None or isinstance(zero, bool):
        return int(zero or 0)  # DeepSpeed's oldest form: true is stage 1
    if not isinstance(zero, Mapping):
        problems.append(f"{ZERO} is {shown(zero)}; write an object: {{...}}")
        return 0
    stage = zero.get("stage", 0)
    if stage == "auto":
        return 0  # DeepSpeed drops the key and takes its default
    number = int(stage) if isinstance(stage, str) and stage.strip().isdecimal() else stage
    if isinstance(number, bool) or number not in _STAGES:
        problems.append(f"{ZERO}.stage is {shown(stage)}; write 0, 1, 2 or 3")
        return 0
    return int(number)


def _rules_across_sections(swap: SwapConfig, raw: Mapping[str, Any]) -> list[str]:
    sections = [section for section in (swap.offload_param, swap.offload_optimizer) if section.on_nvme]
    problems = []
    if swap.zero_stage != 3:
        written = shown(section_at(raw, f"{ZERO}.stage"))
        found = f"{written}, which DeepSpeed reads as 0" if written in ('"auto"', "null") else swap.zero_stage
        problems += [
            f"{section.key('device')} is nvme, but {ZERO}.stage is {found}; NVMe needs stage 3: set it to 3, "
            "or the device to cpu"
            for section in sections
        ]
    if swap.offload.gradients == "nvme" and not swap.offload_optimizer.on_nvme:
        device = swap.offload_optimizer.key("device")
        problems.append(
            f'offload.gradients is "nvme", but {device} is not: they go where the optimizer state goes; set '
            f'{device} to "nvme", or offload.gradients to "host"'
        )
    if swap.offload_optimizer.on_nvme and section_at(raw, f"{ZERO}.zenflow") not in (None, "auto"):
        problems.append(
            f"{ZERO}.zenflow is set, but its optimizer steps state outside the swap area; remove it, or "
            f"set {swap.offload_optimizer.key('device')} to cpu"
        )
    return problems


def _keys_by_path(swap: SwapConfig) -> dict[Path, list[str]]:
    keys: dict[Path, list[str]] = {}
    for key, path in swap.swap_paths.items():
        keys.setdefault(path, []).append(key)
    return keys
