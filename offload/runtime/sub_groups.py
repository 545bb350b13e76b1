"""ZeRO-3's sub-groups in and out of a checkpoint, wherever their parts live."""

from typing import TYPE_CHECKING, Any

import torch

from offload.checkpoint.mapped import mapped_tensor
from offload.errors import OffloadError
from offload.swap.sub_group import MASTER

if TYPE_CHECKING:
    from offload.runtime.zero3 import OffloadZeroOptimizer


def with_swapped_state(optimizer: "OffloadZeroOptimizer", state_dict: dict[str, Any]) -> dict[str, Any]:
    """ZeRO-3's state dict as CPU offload would make it: swapped sub-groups are filled in from storage.

    The tensors are mapped from the swap files, so they cost no memory; they are valid until the next step.
    """
    flat_groups = list(state_dict["fp32_flat_groups"])
    packed = state_dict["optimizer_state_dict"]["state"]
    try:
        for position, index in enumerate(_packing_order(optimizer)):
            if not optimizer._swappable_optimizer_subgroup(index):
                continue
            fp32 = optimizer.fp32_partitioned_groups_flat[index]
            swapped = optimizer.optimizer_swapper.swapped_state(fp32)
            mapped = {name: mapped_tensor(extent, dtype) for name, (extent, dtype) in swapped.items()}
            flat_groups[index] = mapped.pop(MASTER)
            if position in packed:
                packed[position] = {**packed[position], **mapped, **optimizer.unread_state(index)}
    finally:
        optimizer.optimizer_swapper.drop_exports()  # what is mapped stays
    return {**state_dict, "fp32_flat_groups": flat_groups}


def load_sub_group(optimizer: "OffloadZeroOptimizer", index: int, saved: torch.Tensor) -> None:
    """Put saved master weights, and the optimizer state loaded before, where sub-group `index` keeps them.

    Raises:
        OffloadError: the checkpoint cuts the model into other sub-groups.
    """
    expected = int(optimizer.fp16_partitioned_groups_flat_numel[index])
    if saved.numel() != expected:
        stock = "" if saved.numel() else "; DeepSpeed's own NVMe offload saves none"
        raise OffloadError(
            f"sub-group {index} has {saved.numel()} master weights in the checkpoint, here {expected}; "
            f"load with the model, ranks, parameter groups and sub_group_size it was saved with{stock}"
        )
    fp32 = optimizer.fp32_partitioned_groups_flat[index]
    state = optimizer.optimizer.state.get(fp32, {})
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    writes_model = False
    if optimizer._swappable_optimizer_subgroup(index):
        swapper = optimizer.optimizer_swapper
        flat_state = {name: value for name, value in tensors.items() if value.numel() == expected}
        tensors = {name: value for name, value in tensors.items() if name not in flat_state}
        for name in [name for name in flat_state if not swapper.keeps(name)]:
            del state[name], flat_state[name]
        swapper.replace_state(fp32, {MASTER: saved, **flat_state})
        writes_model = swapper.writes_model
    else:
        fp32.data.copy_(saved)
    state.update({name: value.clone() for name, value in tensors.items()})
    if not writes_model:
        store_parameters(optimizer, index, saved)


def store_parameters(optimizer: "OffloadZeroOptimizer", index: int, master: torch.Tensor) -> None:
    """Make the sub-group's model parameters from its master weights, in memory or on storage."""
    flat = optimizer.fp16_partitioned_groups_flat[index]
    if flat is not None:
        flat.data.copy_(master)
        optimizer._unflatten_partitioned_parameters(index)
        return
    offset = 0
    for param, partition in zip(
        optimizer.fp16_groups[index], optimizer.fp16_partitioned_groups[index], strict=True
    ):
        param.nvme_swapper.write_partition(param, master.narrow(0, offset, partition.ds_numel))
        offset += partition.ds_numel


def restore_master_weights(optimizer: "OffloadZeroOptimizer", index: int) -> None:
    """Make the sub-group's master weights from its model parameters."""
    fp32 = optimizer.fp32_partitioned_groups_flat[index]
    source = optimizer.fp16_partitioned_groups_flat[index]
    if source is None:
        parts = [param.nvme_swapper.read_partition(param) for param in optimizer.fp16_groups[index]]
        source = torch.cat([part.reshape(-1) for part in parts])
    if optimizer._swappable_optimizer_subgroup(index):
        optimizer.optimizer_swapper.replace_state(fp32, {MASTER: source})
    else:
        fp32.data.copy_(source)


def _packing_order(optimizer: "OffloadZeroOptimizer") -> list[int]:
    """Sub-groups in the order in which the optimizer's state dict numbers them."""
    groups: list[list[int]] = [[] for _ in optimizer.optimizer.param_groups]
    for index in range(len(optimizer.fp16_groups)):
        groups[optimizer.sub_group_to_group_id[index]].append(index)
    return [index for group in groups for index in group]
