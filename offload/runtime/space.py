"""Room on the swap drives for a model, counted before the first byte is written."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from offload.config import SwapConfig
from offload.config.space import SpaceNeed, check_free_space, needed_nbytes, optimizer_nbytes
from offload.runtime.step_rules import rule_for
from offload.swap.arena import align_up
from offload.swap.formats import FORMATS, Column

_STATES = {
    "Adam": 2,
    "AdamW": 2,
    "DeepSpeedCPUAdam": 2,
    "FusedAdam": 2,
    "Lamb": 2,
    "Lion": 1,
    "DeepSpeedCPULion": 2,
}
_STATES |= {"Adagrad": 1, "DeepSpeedCPUAdagrad": 1, "SGD": 1}


def check_room(
    config: SwapConfig,
    module: torch.nn.Module,
    optimizer: Any,
    master_nbytes: int,
    gradient_nbytes: int,
) -> None:
    """Refuse a model that will not fit the drives.

    Args:
        config: the run's swap settings.
        module: the model, partitioned already (`zero.Init`: its parameters are on the drive) or not yet.
        optimizer: the torch optimizer that will step it.
        master_nbytes: bytes of one master weight.
        gradient_nbytes: bytes per weight of gradients that go to the drive, beside the state; 0 for none.

    Raises:
        OffloadConfigError: with needed and free bytes, and the key of the path.
    """
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    ranks = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    needs = []
    param = config.offload_param
    if param.on_nvme and param.nvme_path:
        fresh = [p for p in module.parameters() if not hasattr(p, "ds_id")]
        nbytes = sum(needed_nbytes(_shares([p], world), p.element_size(), ranks=ranks) for p in fresh)
        needs.append(SpaceNeed(param.key("nvme_path"), param.nvme_path, "parameters", nbytes))
    section = config.offload_optimizer
    if section.on_nvme and section.nvme_path:
        rule = rule_for(optimizer, torch.float32 if master_nbytes == 4 else torch.bfloat16)
        shares = _shares(trainable(optimizer), world)
        nbytes = optimizer_nbytes(
            shares,
            states=1 + (_state_count(optimizer) if rule is None else len(rule.state_names)),
            state_nbytes=master_nbytes,
            gradient_nbytes=gradient_nbytes,
            ranks=ranks,
        )
        state_format = config.offload.state_format
        if state_format != "fp32" and rule is not None and state_format in rule.kernels:
            columns = FORMATS[state_format](rule.state_names).columns
            nbytes = ranks * _columns_nbytes(columns, shares)
            nbytes += needed_nbytes(shares, gradient_nbytes, ranks=ranks)
        needs.append(SpaceNeed(section.key("nvme_path"), section.nvme_path, "optimizer state", nbytes))
    check_free_space(needs)


def trainable(optimizer: Any) -> list[Any]:
    """The parameters that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _columns_nbytes(columns: Sequence[Column], numels: Iterable[int]) -> int:
    return sum(align_up(column.nbytes(numel)) for numel in numels for column in columns)


def _shares(params: Iterable[Any], world: int) -> list[int]:
    """Elements of each parameter that one rank holds."""
    return [-(-getattr(p, "ds_numel", p.numel()) // world) for p in params]


def _state_count(optimizer: Any) -> int:
    """Tensors an optimizer keeps per weight; for one we do not know, as many as Adam."""
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    return _STATES.get(type(optimizer).__name__, 2) + bool(amsgrad)
