"""ZeRO-3's optimizer state in and out of checkpoints, wherever it lives, and whether it may be saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError
from offload.runtime.state_access import StateAccess
from offload.runtime.sub_groups import (
    load_sub_group,
    restore_master_weights,
    store_parameters,
    with_swapped_state,
)
from offload.swap.sub_group import MASTER


class StateInCheckpoints(StateAccess):
    """ZeRO-3's optimizer that saves and loads sub-group by sub-group, and never half of a step."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.stepping = False
        """Whether the step under way, or the last one, has changed any state."""
        self._torn: str | None = None
        super().__init__(*arguments, **settings)

    def torn_by(self) -> str | None:
        """The failure that left state of two steps side by side, if any did; waits for writes under way.

        It stays so until a checkpoint with all its optimizer state is loaded.
        """
        lost = self.optimizer_swapper.lost_write() if self.swap_optimizer else None
        return self._torn or (_words(lost) if lost is not None else None)

    def tear(self, failure: BaseException) -> None:
        """Note that a failure came between the change of one part of the state and that of another."""
        self._torn = self._torn or _words(failure)  # not itself: it holds on to all that the step had

    def check_whole(self) -> None:
        """Refuse to save what is not the state of one step.

        Raises:
            OffloadError: naming the failure that made it so.
        """
        failure = self.torn_by()
        if failure is not None:
            raise OffloadError(
                "nothing is saved, because the optimizer state is partly of one step and partly of another; "
                f"load the last checkpoint with its optimizer states. It is so since {failure}"
            )

    @contextmanager
    def _replacing_state(self, *, everything: bool) -> Iterator[None]:
        """The body loads state: a whole one, if it ends and replaces everything."""
        try:
            yield
        except BaseException as failure:
            self.tear(failure)
            raise
        if everything:
            self._torn = None
            if self.swap_optimizer:
                self.optimizer_swapper.forget_lost_writes()

    def checkpoint_nbytes(self) -> int:
        """Bytes of this rank's optimizer shard: master weights and the state that exists by now."""
        nbytes = sum(int(numel) for numel in self.fp16_partitioned_groups_flat_numel) * 4
        for index, fp32 in enumerate(self.fp32_partitioned_groups_flat):
            numel = int(self.fp16_partitioned_groups_flat_numel[index])
            state = self.optimizer.state.get(fp32, {}).values()
            nbytes += sum(
                numel * value.element_size() for value in state if torch.is_tensor(value) and value.ndim
            )
        return nbytes

    def unread_state(self, index: int) -> dict[str, torch.Tensor]:
        """State of a swapped sub-group that only checkpoints hold: DeepSpeed's tools look for it."""
        return {}

    def _rigid_state_dict(self) -> dict[str, Any]:
        self.check_whole()
        state_dict: dict[str, Any] = super()._rigid_state_dict()
        return with_swapped_state(self, state_dict) if self.swap_optimizer else state_dict

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        saved_groups = state_dict["fp32_flat_groups"]
        if len(saved_groups) != len(self.fp16_groups):
            raise OffloadError(
                f"the checkpoint has {len(saved_groups)} sub-groups, this run {len(self.fp16_groups)}; "
                "load with the model, parameter groups and sub_group_size it was saved with"
            )
        with self._replacing_state(everything=load_optimizer_states):
            self.loss_scaler = state_dict["loss_scaler"]
            self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
            self.overflow = state_dict["overflow"]
            if load_optimizer_states:
                self._set_fp32_optimizer_param_groups()
                self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
                self._clear_fp32_optimizer_param_groups()
            self._partition_all_parameters()
            for index, saved in enumerate(saved_groups):
                load_sub_group(self, index, saved.detach())
        self._pre_step()  # a window that had begun is not gone on with
        self._abandon_backward()

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint, from whatever number of ranks, one sub-group after the other."""
        folder = Path(checkpoint_dir) / "zero"
        saved = torch.load(folder / "optimizer_state.pt", weights_only=False)
        self._load_global_state_stage3(saved)
        packed = saved["optimizer_state_dict"]
        settings = {name: value for name, value in packed["param_groups"][0].items() if name != "params"}
        with self._replacing_state(everything=True):
            for group in self.optimizer.param_groups:
                group.update(settings)  # as DeepSpeed does: the file has those of one rank's first group
            self._partition_all_parameters()
            for index in range(len(self.fp16_groups)):
                keys = ("fp32", "exp_avg", "exp_avg_sq")
                master, *flat = (self._universal_sub_group(folder, index, key) for key in keys)
                state = self.optimizer.state[self.fp32_partitioned_groups_flat[index]]
                state.update(zip(keys[1:], flat, strict=True), step=packed["state"][0]["step"])
                load_sub_group(self, index, master)
        self._pre_step()
        self._abandon_backward()

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(
        self, checkpoint_dir: str, load_from_fp32_weights: bool
    ) -> None:
        """Load the weights of a universal checkpoint, and leave the optimizer's own state as it is."""
        folder = Path(checkpoint_dir) / "zero"
        with self._replacing_state(everything=False):
            self._partition_all_parameters()
            for index in range(len(self.fp16_groups)):
                master = self._universal_sub_group(folder, index, "fp32")
                if not load_from_fp32_weights:
                    master = master.to(self.dtype).to(torch.float32)
                load_sub_group(self, index, master)
        self._pre_step()
        self._abandon_backward()

    def _universal_sub_group(self, folder: Path, index: int, key: str) -> torch.Tensor:
        return torch.cat([self._universal_partition(folder, param, key) for param in self.fp16_groups[index]])

    def _universal_partition(self, folder: Path, param: Any, key: str) -> torch.Tensor:
        name = self.param_names[param]
        try:
            values: torch.Tensor = self.load_hp_checkpoint_state(str(folder / name), key, param=param)
        except FileNotFoundError as error:
            raise OffloadError(
                f"the universal checkpoint has no {key} of {name}: no {error.filename}"
            ) from error
        return values.to(torch.float32)

    def _restore_from_bit16_weights(self) -> None:
        with self._replacing_state(everything=False):
            for index in range(len(self.fp16_groups)):
                restore_master_weights(self, index)

    def reset_swap_buffers(self) -> None:
        """Make all model parameters from the master weights again."""
        for index, fp32 in enumerate(self.fp32_partitioned_groups_flat):
            master = fp32.detach()
            if self._swappable_optimizer_subgroup(index):
                numel = int(self.fp16_partitioned_groups_flat_numel[index])
                master = self.optimizer_swapper.read_state(fp32, MASTER, 0, numel)
            store_parameters(self, index, master)


def _words(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
