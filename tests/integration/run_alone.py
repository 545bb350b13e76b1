"""A training run that tests start in a process of its own: to kill it, to limit it, to see how it ends."""

import json
import os
import sys
import warnings
from itertools import count
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed

import offload
from tests.integration.ranks import free_port, join
from tests.integration.training import Case, advance, config, engine_for

CASE = Case(params="nvme")


def train_pinned(swap_dir: Path) -> None:
    """Two steps with locked buffers; prints losses, locked bytes and warnings."""
    zero = config(CASE, swap_dir)["zero_optimization"]
    for section in ("offload_param", "offload_optimizer"):
        zero[section]["pin_memory"] = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with engine_for(CASE, swap_dir, zero_optimization=zero) as engine:
            losses = advance(engine, CASE, range(2))
            locked = offload.stats()["locked_bytes"]
    said = [str(warning.message) for warning in caught if warning.category is offload.OffloadWarning]
    print(json.dumps({"losses": losses, "locked": locked, "warnings": said}), flush=True)


def train_and_drop(swap_dir: Path, nsteps: int | None) -> None:
    """Some steps, or steps until somebody kills the process; the engine is never destroyed."""
    settings = config(CASE, swap_dir)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = CASE.uses.build(CASE.width)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
    for step in count() if nsteps is None else range(nsteps):
        advance(engine, CASE, range(step, step + 1))
        print("step", flush=True)
    x = net.norm.weight.new_ones(4, CASE.width)
    engine(x, x)  # and ends with parameters gathered and read ahead


if __name__ == "__main__":
    join(rank=0, world=1, port=free_port())
    offload.enable()
    way, folder = sys.argv[1], Path(sys.argv[2])
    if way == "pinned":
        train_pinned(folder)
    else:
        train_and_drop(folder, 2 if way == "dropped" else None)
