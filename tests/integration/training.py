"""Real ZeRO-3 training, small enough for a test: the config, the loop, and all that came out of it."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm, utils

import offload
from tests.integration.models import FEATURES, Feature

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BEFORE_SAVE = range(3)
AFTER_SAVE = range(3, 6)

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "CPU Adam": ("Adam", {}),
    "torch Adam": ("Adam", {"torch_adam": True}),
    "CPU Lion": ("Lion", {}),
    "CPU Adagrad": ("Adagrad", {}),
    "torch SGD": ("SGD", {"momentum": 0.9, "dampening": 0.1}),
}
STATE_NAMES = {
    "DeepSpeedCPULion": ("exp_avg",),
    "DeepSpeedCPUAdagrad": ("exp_avg_sq",),
    "SGD": ("momentum_buffer",),
}
"""What a step reads and writes of an optimizer's state, where that is not what Adam has."""

_PRECISION: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1, "loss_scale_window": 2}},
    "fp32": {},
}
"""The first fp16 loss scale makes gradients overflow; the window is short enough for it to grow again."""


@dataclass(frozen=True)
class Case:
    """One combination of where state lives and how the network is trained."""

    params: str = "memory"
    optimizer: str = "nvme"
    dtype: str = "bf16"
    accumulation: int = 1
    clipping: bool = False
    pipeline: str = "off"
    feature: str = "plain"
    algorithm: str = "CPU Adam"
    """`torch Adam` has no streamed step: its sub-groups move whole, and the pipeline flags count."""
    ranks: int = 1

    @property
    def uses(self) -> Feature:
        return FEATURES[self.feature]

    @property
    def width(self) -> int:
        """One rank's share of a square layer has more than 1 MiB in 16 bit, so that it is worth swapping."""
        return 768 if self.ranks == 1 else 1088

    def in_memory(self) -> "Case":
        """The same training with nothing on NVMe."""
        optimizer = "none" if self.optimizer == "none" else "cpu"
        return replace(self, params="memory", optimizer=optimizer, pipeline="off")

    def __str__(self) -> str:
        return "-".join(str(setting) for setting in astuple(self))


def config(case: Case, swap_dir: Path, **changes: Any) -> dict[str, Any]:
    """A DeepSpeed config as users write one."""
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": 1_100_000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 1_000_000,
        "stage3_prefetch_bucket_size": 1_000_000,
        "reduce_bucket_size": 1_000_000,
    }
    place = {"nvme_path": str(swap_dir), "pin_memory": False}
    if case.optimizer != "none":
        flags = {f"pipeline_{way}": case.pipeline in (way, "both") for way in ("read", "write")}
        zero["offload_optimizer"] = {"device": case.optimizer, **place, **flags}
    if case.params != "memory":
        zero["offload_param"] = {
            "device": case.params,
            **place,
            "buffer_size": 1_100_000,
            "buffer_count": 5,
            "max_in_cpu": 0,
        }
    name, extra = ALGORITHMS[case.algorithm]
    warmup = {"warmup_min_lr": 0.002, "warmup_max_lr": 0.01, "warmup_num_steps": 8}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.05 if case.clipping else 0.0,
        "optimizer": {"type": name, "params": {"lr": 0.01, "weight_decay": 0.01, **extra}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 8},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
        **_PRECISION[case.dtype],
        **changes,
    }


@contextmanager
def engine_for(case: Case, swap_dir: Path, seed: int = 0, **changes: Any) -> Iterator[Any]:
    """A DeepSpeed engine, destroyed with everything it held when the block is left."""
    settings = config(case, swap_dir, **changes)
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=case.uses.under_zero_init):
        net = case.uses.build(case.width)
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=list(case.uses.groups(net)), config=settings
    )
    try:
        yield engine
    finally:
        engine.destroy()
        _empty(engine)
        gc.collect()


def _empty(engine: Any) -> None:
    """Let go of all tensors: autograd's hooks keep a destroyed DeepSpeed engine alive."""
    zero, engine.optimizer = engine.optimizer, None
    zero.optimizer.state.clear()
    vars(zero).clear()
    for param in engine.module.parameters():
        param.data = torch.empty(0)
        vars(param).clear()


def batch(number: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of micro-batch `number`, the same in every run."""
    generator = torch.Generator().manual_seed(number)
    x, target = (torch.randn(4, width, generator=generator).to(dtype) for _ in range(2))
    return x.requires_grad_(), target


def advance(engine: Any, case: Case, steps: Iterable[int]) -> list[float]:
    """Train for `steps`; the loss of every micro-batch."""
    losses = []
    for step in steps:
        for micro_batch in range(step * case.accumulation, (step + 1) * case.accumulation):
            number = micro_batch * comm.get_world_size() + comm.get_rank()
            x, target = batch(number, case.width, DTYPES[case.dtype])
            loss = engine(x, target, skipped=case.uses.skipped(micro_batch))
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                case.uses.before_step(engine, step)
            engine.step()
            losses.append(loss.item())
        case.uses.after_step(engine, step)
    return losses


def snapshot(engine: Any) -> dict[str, Any]:
    """A copy of all that training goes on from: weights, moments, counters, learning rate, loss scale."""
    optimizer = engine.optimizer.optimizer
    states = [values for values in optimizer.state.values() if values]
    names = STATE_NAMES.get(type(optimizer).__name__, ("exp_avg", "exp_avg_sq"))
    state: dict[str, Any] = {
        "learning rate": engine.get_lr(),
        "scheduler": engine.lr_scheduler.state_dict(),
        "loss scale": engine.optimizer.loss_scale,
        "steps": (engine.global_steps, engine.skipped_steps),
        "optimizer steps": sorted({int(values.get("step", 0)) for values in states}),
    }
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            state[f"{name}, model"] = param.detach().clone()
        if not param.requires_grad:
            continue
        state[f"{name}, fp32"] = utils.safe_get_full_fp32_param(param).detach().clone()
        for key in names if states else ():
            state[f"{name}, {key}"] = utils.safe_get_full_optimizer_state(param, key).detach().clone()
    return state


@dataclass
class Run:
    """What one training run showed: losses, and all state at the save and at the end."""

    losses: list[float]
    at_save: dict[str, Any]
    at_end: dict[str, Any]


def train(case: Case, swap_dir: Path, checkpoint_dir: Path | None = None, **changes: Any) -> Run:
    """Six steps from seed 0, with a checkpoint after three of them where a folder is given."""
    with engine_for(case, swap_dir, **changes) as engine:
        losses = advance(engine, case, BEFORE_SAVE)
        if checkpoint_dir is not None:
            engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        at_save = snapshot(engine)
        losses += advance(engine, case, AFTER_SAVE)
        return Run(losses, at_save, snapshot(engine))


def resume(case: Case, swap_dir: Path, checkpoint_dir: Path, **changes: Any) -> Run:
    """Load the checkpoint into an engine with other first weights, and train the last three steps."""
    with engine_for(case, swap_dir, seed=5, **changes) as engine:
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        at_save = snapshot(engine)
        losses = advance(engine, case, AFTER_SAVE)
        return Run(losses, at_save, snapshot(engine))


@contextmanager
def stock_deepspeed() -> Iterator[None]:
    """DeepSpeed as it comes."""
    offload.disable()
    try:
        yield
    finally:
        offload.enable()
