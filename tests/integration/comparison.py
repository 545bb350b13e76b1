"""How two training runs are compared: to the last bit, or within rounding."""

from collections.abc import Iterator
from typing import Any

import torch

import offload
from tests.integration.training import Case, Run

TOLERANCES = {"fp32": (1e-6, 1e-4), "bf16": (2**-7, 0.1), "fp16": (2**-10, 0.1)}
"""Of losses, and of the way a weight went: weights that round to 16 bit each step enlarge a last bit."""


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names of what is not equal to the last bit."""
    names = sorted(first.keys() | second.keys())
    return [name for name in names if not _equal(first.get(name), second.get(name))]


def _equal(first: Any, second: Any) -> bool:
    if torch.is_tensor(first) and torch.is_tensor(second):
        return first.dtype == second.dtype and torch.equal(first, second)
    return type(first) is type(second) and first == second


def assert_swapped(case: Case, written_before: dict[str, int]) -> None:
    """It was this package that moved the state, and all kinds that should move did."""
    written = offload.stats()["bytes_written"]
    moved = {kind for kind in written if written[kind] > written_before[kind]}
    expected = {"parameters"} if case.params == "nvme" else set()
    expected |= {"optimizer"} if case.optimizer == "nvme" else set()
    expected |= {"gradients"} if case.optimizer == "nvme" and case.algorithm == "torch Adam" else set()
    assert moved == expected


def is_close(run: Run, stock: Run, dtype: str) -> bool:
    """Whether the losses are equal within rounding, and every weight's way from save to end is."""
    loss_tolerance, way_tolerance = TOLERANCES[dtype]
    losses = torch.allclose(torch.tensor(run.losses), torch.tensor(stock.losses), rtol=loss_tolerance, atol=0)
    return losses and max(_distances(run, stock)) < way_tolerance


def _distances(run: Run, stock: Run) -> Iterator[float]:
    for name in (name for name in stock.at_end if name.endswith("fp32")):
        way = stock.at_end[name] - stock.at_save[name]
        yield ((run.at_end[name] - stock.at_end[name]).norm() / way.norm()).item()
