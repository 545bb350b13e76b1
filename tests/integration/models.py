"""What is trained: one small network, and everything users do with one around it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import utils


class Net(torch.nn.Module):
    """`depth` residual layers of `width` and a norm; its output is the loss."""

    def __init__(self, width: int, depth: int = 4, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(width)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor, target: torch.Tensor, skipped: tuple[int, ...] = ()) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index in skipped:
                continue
            if self.checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(_residual, layer, x, use_reentrant=True)
            else:
                x = _residual(layer, x)
        return ((self.norm(x) - target) ** 2).mean()


def _residual(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x + torch.relu(layer(x))


def _frozen(width: int) -> Net:
    net = Net(width)
    net.layers[1].weight.requires_grad_(False)
    net.norm.bias.requires_grad_(False)
    return net


def _tied(width: int) -> Net:
    net = Net(width)
    net.layers[3].weight = net.layers[0].weight
    return net


def _checkpointed(width: int) -> Net:
    return Net(width, checkpointing=True)


def _two_groups(net: Net) -> list[dict[str, Any]]:
    matrices = [param for name, param in net.named_parameters() if "layers" in name and "weight" in name]
    others = [param for name, param in net.named_parameters() if "norm" in name or "bias" in name]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.002}]


def _nothing(engine: Any, step: int) -> None:
    return


def _evaluate(engine: Any, step: int) -> None:
    engine.eval()
    with torch.no_grad():
        x = torch.ones(2, *engine.module.norm.normalized_shape, dtype=next(engine.module.parameters()).dtype)
        engine(x, x)
    engine.train()


def _set_full_state(engine: Any, step: int) -> None:
    """Read, change and write back weights and moments, as model surgery does.

    Not in the last step before a save: the model takes fp32 weights over in the next step, or at a load.
    """
    if step % 3 == 2:
        return
    for param in (engine.module.layers[2].weight, engine.module.norm.weight):
        utils.safe_set_full_fp32_param(param, utils.safe_get_full_fp32_param(param) * 0.5)
        for key in ("exp_avg", "exp_avg_sq"):
            state = utils.safe_get_full_optimizer_state(param, key)
            utils.safe_set_full_optimizer_state(param, state * 0.25, key)


def _set_local_state(engine: Any, step: int) -> None:
    if step % 3 == 2:
        return
    for param in (engine.module.layers[2].weight, engine.module.norm.weight):
        utils.safe_set_local_fp32_param(param, utils.safe_get_local_fp32_param(param) * 0.5)
        for key in ("exp_avg", "exp_avg_sq"):
            state = utils.safe_get_local_optimizer_state(param, key)
            utils.safe_set_local_optimizer_state(param, state * 0.25, key)


def _set_full_gradient(engine: Any, step: int) -> None:
    for param in (engine.module.layers[0].weight, engine.module.norm.bias):
        utils.safe_set_full_grad(param, utils.safe_get_full_grad(param) * 2)


def _set_local_gradient(engine: Any, step: int) -> None:
    for param in (engine.module.layers[0].weight, engine.module.norm.bias):
        utils.safe_set_local_grad(param, utils.safe_get_local_grad(param) * 2)


def _update_gradients(engine: Any, step: int) -> None:
    params = [engine.module.layers[0].weight, engine.module.norm.bias]
    utils.safe_update_full_grad_vectorized(params, lambda gradient, param: gradient * 2)


@dataclass(frozen=True)
class Feature:
    """One way of using the network."""

    build: Callable[[int], Net] = Net
    groups: Callable[[Net], Iterable[Any]] = Net.parameters
    skipped: Callable[[int], tuple[int, ...]] = lambda micro_batch: ()
    """Layers that are left out of a micro-batch."""
    before_step: Callable[[Any, int], None] = _nothing
    after_step: Callable[[Any, int], None] = _nothing
    under_zero_init: bool = True


FEATURES = {
    "plain": Feature(),
    "built before the engine": Feature(under_zero_init=False),
    "two parameter groups": Feature(groups=_two_groups),
    "frozen parameters": Feature(build=_frozen),
    "tied weights": Feature(build=_tied),
    "no gradient in some steps": Feature(skipped=lambda micro_batch: (1, 2) if micro_batch % 2 else ()),
    "used in some micro-batches": Feature(skipped=lambda micro_batch: (1, 2) if micro_batch % 4 > 1 else ()),
    "activation checkpointing": Feature(build=_checkpointed),
    "evaluation between steps": Feature(after_step=_evaluate),
    "state set by user (full)": Feature(after_step=_set_full_state),
    "state set by user (local)": Feature(after_step=_set_local_state),
    "gradient set by user (full)": Feature(before_step=_set_full_gradient),
    "gradient set by user (local)": Feature(before_step=_set_local_gradient),
    "gradients updated by user (vectorized)": Feature(before_step=_update_gradients),
    "two models in one process": Feature(),
    "transformers.Trainer": Feature(),
}
