"""Room on the swap drives for a model, counted before the first byte is written."""

import os
from collections.abc import Iterable
from typing import Any

import torch

from offload.config import SwapConfig
from offload.config.space import SpaceNeed, check_free_space, needed_nbytes, optimizer_nbytes
from offload.swap.arena import align_up
from offload.swap.formats import FORMATS, FormatName

_STATES = {
    "Adam": 2,
    "AdamW": 2,
    "DeepSpeedCPUAdam": 2,
    "FusedAdam": 2,
    "Lamb": 2,
    "Lion": 1,
    "DeepSpeedCPULion": 1,
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
        shares = _shares(trainable(optimizer), world)
        nbytes = optimizer_nbytes(
            shares,
            states=1 + _state_count(optimizer),
            state_nbytes=master_nbytes,
            gradient_nbytes=gradient_nbytes,
            ranks=ranks,
        )
        if config.offload.state_format != "fp32":
            nbytes = ranks * _encoded_nbytes(config.offload.state_format, shares)
            nbytes += needed_nbytes(shares, gradient_nbytes, ranks=ranks)
        needs.append(SpaceNeed(section.key("nvme_path"), section.nvme_path, "optimizer state", nbytes))
    check_free_space(needs)


def trainable(optimizer: Any) -> list[Any]:
    """The parameters that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _encoded_nbytes(state_format: FormatName, numels: Iterable[int]) -> int:
    """Bytes of Adam's state, master weights included, in a format other than float32."""
    columns = FORMATS[state_format](("exp_avg", "exp_avg_sq")).columns
    return sum(align_up(column.nbytes(numel)) for numel in numels for column in columns)


def _shares(params: Iterable[Any], world: int) -> list[int]:
    """Elements of each parameter that one rank holds."""
    return [-(-getattr(p, "ds_numel", p.numel()) // world) for p in params]


def _state_count(optimizer: Any) -> int:
    """Tensors an optimizer keeps per weight; for one we do not know, as many as Adam."""
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    return _STATES.get(type(optimizer).__name__, 2) + bool(amsgrad)
