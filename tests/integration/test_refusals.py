"""What cannot be right is refused by a typed error: a config that contradicts itself, a damaged swap file."""

import os
from pathlib import Path

import deepspeed
import pytest
import torch

from offload.errors import OffloadConfigError, OffloadIOError
from tests.integration.training import Case, advance, engine_for, snapshot


def test_a_swap_file_cut_short_stops_the_step_and_names_the_tensor(swap_dir):
    case = Case("memory", "nvme")
    with engine_for(case, swap_dir) as engine:
        advance(engine, case, [0])
        snapshot(engine)  # what is written behind is written now
        [path] = swap_dir.rglob("00000.exp_avg.*")
        os.truncate(path, 4096)
        with pytest.raises(OffloadIOError, match=r"of sub-group 0 .*exp_avg"):
            advance(engine, case, [1])


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "swap"}}, "NVMe needs stage 3"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "offload_optimizer.nvme_path is missing"),
        ({"stage": 3, "aio": {"queue_depth": 8}}, "move it to the top level"),
    ],
    ids=["stage 2", "no path", "misplaced section"],
)
def test_a_config_that_cannot_mean_what_it_says_is_refused(zero, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with pytest.raises(OffloadConfigError, match=message):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=settings)
    assert list(Path(tmp_path).iterdir()) == []
