"""What changes in DeepSpeed's engine: checkpoints that are whole or absent, and a record of every step."""

import errno
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from offload.checkpoint.tag_folder import TagFolder, write_latest
from offload.errors import OffloadError, OffloadIOError
from offload.runtime.zero3 import OffloadZeroOptimizer, close_param_swappers
from offload.swap.stats import METER, StepRecord

FROZEN = "frozen_param_fragments"


def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Save under another name first, so that a tag never holds half of a checkpoint."""

    def save(
        engine: Any,
        save_dir: Any,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        state = {} if client_state is None else client_state
        if not save_dir or engine.checkpoint_engine.is_decoupled():
            return original(engine, save_dir, tag, state, save_latest, exclude_frozen_parameters)
        folder = TagFolder(save_dir, str(tag) if tag is not None else f"global_step{engine.global_steps}")
        commits = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
        if commits:
            os.makedirs(save_dir, exist_ok=True)
            folder.recover()
            folder.discard_staging()
        comm.barrier()
        _check_whole(engine)
        _check_room(engine, Path(save_dir))
        result = original(engine, save_dir, folder.staging_tag, state, False, exclude_frozen_parameters)
        if commits:
            folder.publish()
            if save_latest and engine.global_rank == 0:
                write_latest(save_dir, str(folder.path.relative_to(Path(save_dir))))
        comm.barrier()
        return result

    return save


def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bring back a tag that an interrupted save moved aside, load, and begin an accumulation window."""

    def load(engine: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        wanted = _latest(engine, load_dir) if tag is None else str(tag)
        if wanted and engine.global_rank == 0:
            TagFolder(load_dir, wanted).recover()
        comm.barrier()
        result = original(engine, load_dir, tag, *args, **kwargs)
        if isinstance(engine.optimizer, OffloadZeroOptimizer):
            engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        return result

    return load


def zero_nvme_offload_optimizer(original: Callable[..., bool]) -> Callable[..., bool]:
    """Our optimizer's state is in the ordinary ZeRO files; no swap folder is copied."""

    def answer(engine: Any) -> bool:
        return not isinstance(engine.optimizer, OffloadZeroOptimizer) and original(engine)

    return answer


def param_fragment(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A frozen parameter's values for the checkpoint, also while they are on storage."""

    def fragment(engine: Any, param: Any) -> torch.Tensor:
        swapper = getattr(param, "nvme_swapper", None)
        return swapper.read_partition(param) if swapper is not None else original(engine, param)

    return fragment


def load_module_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load frozen parameters to where they live, also when that is storage."""

    def load(engine: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        frozen = checkpoint.get(FROZEN)
        if not frozen or not isinstance(engine.optimizer, OffloadZeroOptimizer):
            return original(engine, checkpoint, *args, **kwargs)
        result = original(engine, {**checkpoint, FROZEN: None}, *args, **kwargs)
        for param in engine.module.parameters():
            name = engine.param_names.get(param)
            if param.requires_grad or name not in frozen:
                continue
            swapper = getattr(param, "nvme_swapper", None)
            if swapper is not None:
                swapper.write_partition(param, frozen[name])
            else:
                (param.ds_tensor if hasattr(param, "ds_id") else param).data.copy_(frozen[name])
        return result

    return load


def load_file(original: Callable[..., Any]) -> Callable[..., Any]:
    """Map optimizer shards instead of reading them whole: state then streams to where it lives."""

    def load(checkpoint_engine: Any, path: str, map_location: Any = None) -> Any:
        if path.endswith("optim_states.pt") and zipfile.is_zipfile(path):
            return torch.load(path, map_location=map_location, mmap=True, weights_only=False)
        return original(checkpoint_engine, path, map_location)

    return load


def take_model_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Close the step's record and hand it to DeepSpeed's monitor."""

    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        record = METER.finish_step()
        if engine.global_rank == 0 and engine.monitor.enabled:
            engine.monitor.write_events(
                [(name, value, engine.global_samples) for name, value in figures(record)]
            )
        return result

    return step


def destroy(original: Callable[..., None]) -> Callable[..., None]:
    """An engine without an optimizer swaps parameters all the same, and nobody else closes their swapper."""

    def destroy_all(engine: Any) -> None:
        original(engine)
        if isinstance(getattr(engine, "optimizer", None), DeepSpeedZeRoOffload):
            close_param_swappers(engine.module)

    return destroy_all


def figures(record: StepRecord) -> list[tuple[str, float]]:
    """A step's record as named numbers, as they appear in TensorBoard or CSV."""
    events: list[tuple[str, float]] = [("Offload/seconds", record.seconds)]
    for name in ("bytes_read", "bytes_written", "bytes_cached", "seconds_stalled"):
        events += [(f"Offload/{name}/{kind}", value) for kind, value in getattr(record, name).items()]
    events += [
        ("Offload/locked_bytes", record.locked_bytes),
        ("Offload/resident_bytes", record.resident_bytes),
    ]
    return events


def _latest(engine: Any, load_dir: Any) -> str | None:
    """The tag that a load without one takes; None where none was saved, which DeepSpeed has words for."""
    name = "latest_universal" if engine.load_universal_checkpoint() else "latest"
    try:
        return (Path(load_dir) / name).read_text().strip()
    except OSError:
        return None


def _check_whole(engine: Any) -> None:
    """Refuse on all ranks to save what is not, on one of them, the state of one step.

    Raises:
        OffloadError: naming what made it so, or the rank that says it.
    """
    if not isinstance(engine.optimizer, OffloadZeroOptimizer):
        return
    world, rank = comm.get_world_size(), comm.get_rank()
    device = get_accelerator().current_device_name()
    torn = torch.tensor([world if engine.optimizer.torn_by() is None else rank], device=device)
    comm.all_reduce(torn, op=comm.ReduceOp.MIN)
    if int(torn) == world:
        return
    engine.optimizer.check_whole()
    raise OffloadError(
        f"nothing is saved, because the optimizer state of rank {int(torn)} is partly of one step and partly "
        "of another; load the last checkpoint with its optimizer states. That rank's own error says why"
    )


def _check_room(engine: Any, save_dir: Path) -> None:
    """Refuse to start a save that cannot end; the old checkpoint stays until the new one is whole.

    Raises:
        OffloadIOError: ENOSPC, with needed and free bytes.
    """
    if not isinstance(engine.optimizer, OffloadZeroOptimizer):
        return
    status = os.statvfs(save_dir)
    free = status.f_bavail * status.f_frsize
    needed = engine.optimizer.checkpoint_nbytes() * comm.get_world_size()
    if needed > free:
        raise OffloadIOError(
            errno.ENOSPC,
            f"a checkpoint needs about {needed} B but {free} B are free; free space or save elsewhere",
            str(save_dir),
        )
