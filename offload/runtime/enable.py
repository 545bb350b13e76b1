"""The three doors for training scripts: `enable`, `disable`, `initialize`."""

from collections.abc import Callable
from typing import Any

from offload.config import read_config
from offload.runtime.seams import Patch, Seam

_ZERO = "deepspeed.runtime.zero"
_ENGINE = "deepspeed.runtime.engine"


def enable() -> None:
    """Let DeepSpeed's NVMe offload run on this package; call it before `deepspeed.initialize`.

    Raises:
        OffloadError: DeepSpeed is missing, or is a version whose inside is not known.
    """
    _patch().apply()


def disable() -> None:
    """Undo `enable`; engines that exist keep what they were built with."""
    _patch().undo()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Check the config, `enable()`, and return what `deepspeed.initialize` returns for the same arguments.

    Raises:
        OffloadConfigError: the config cannot mean what it says; nothing was built.
    """
    config = kwargs.get("config") or kwargs.get("config_params")
    config = config or getattr(kwargs.get("args") or (args[0] if args else None), "deepspeed_config", None)
    if config is not None:
        read_config(config)
    enable()
    import deepspeed

    return deepspeed.initialize(*args, **kwargs)


_PATCH: list[Patch] = []


def _patch() -> Patch:
    if not _PATCH:
        _PATCH.append(Patch(_seams()))
    return _PATCH[0]


def _seams() -> list[Seam]:
    from offload.runtime import engine, operators
    from offload.runtime.streamed_zero3 import StreamedZeroOptimizer
    from offload.swap.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
    from offload.swap.pipelined_optimizer_swapper import PipelinedOptimizerSwapper

    return [
        Seam("deepspeed.runtime.config", None, "_reject_removed_config_keys", _checking_ours_too),
        Seam("deepspeed.runtime.config", None, "get_aio_config", lambda original: _aio_config),
        Seam(
            f"{_ZERO}.partition_parameters",
            None,
            "AsyncPartitionedParameterSwapper",
            lambda _: _param_swapper,
        ),
        Seam(
            f"{_ZERO}.partition_parameters",
            "InsertPostInitMethodToModuleSubClasses",
            "_set_dtype",
            _dtype_as_asked,
        ),
        Seam(f"{_ZERO}.stage3", None, "PartitionedOptimizerSwapper", lambda _: PartitionedOptimizerSwapper),
        Seam(f"{_ZERO}.stage3", None, "PipelinedOptimizerSwapper", lambda _: PipelinedOptimizerSwapper),
        Seam(f"{_ZERO}.stage3", None, "DeepSpeedZeroOptimizer_Stage3", lambda _: StreamedZeroOptimizer),
        Seam(_ENGINE, "DeepSpeedEngine", "save_checkpoint", engine.save_checkpoint),
        Seam(_ENGINE, "DeepSpeedEngine", "load_checkpoint", engine.load_checkpoint),
        Seam(_ENGINE, "DeepSpeedEngine", "zero_nvme_offload_optimizer", engine.zero_nvme_offload_optimizer),
        Seam(_ENGINE, "DeepSpeedEngine", "_get_param_fragment_func", engine.param_fragment),
        Seam(_ENGINE, "DeepSpeedEngine", "load_module_state_dict", engine.load_module_state_dict),
        Seam(_ENGINE, "DeepSpeedEngine", "_take_model_step", engine.take_model_step),
        Seam(_ENGINE, "DeepSpeedEngine", "destroy", engine.destroy),
        Seam(
            "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine",
            "TorchCheckpointEngine",
            "load",
            engine.load_file,
        ),
        *operators.seams(),
    ]


def _checking_ours_too(original: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def check(config: dict[str, Any]) -> None:
        original(config)
        read_config(config)

    return check


def _aio_config(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's view of the `aio` section: our defaults, old names understood."""
    return read_config(config, probe_storage=False).aio.model_dump()


def _dtype_as_asked(original: Callable[..., None]) -> Callable[..., None]:
    """DeepSpeed takes bfloat16 for any dtype that it is given on a CPU without fp16 instructions."""

    def set_dtype(init: Any, ds_config: Any, dtype: Any) -> None:
        original(init, ds_config, dtype)
        init.dtype = dtype or init.dtype

    return set_dtype


def _param_swapper(ds_config: Any, model_dtype: Any) -> Any:
    from offload.swap.param_swapper import AsyncPartitionedParameterSwapper

    ours = read_config(ds_config._param_dict, probe_storage=False).offload
    return AsyncPartitionedParameterSwapper(
        ds_config, model_dtype, backend=ours.backend, checksums=ours.checksums
    )
