"""A script as users write it, in a process that the test suite has not prepared: no compiler, no ninja."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import deepspeed, offload, torch
offload.enable()
deepspeed.init_distributed("gloo")
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 300000,
        "offload_optimizer": {"device": "nvme", "nvme_path": "swap"},
        "offload_param": {"device": "nvme", "nvme_path": "swap", "max_in_cpu": 0},
    },
}
model = torch.nn.Linear(1024, 512)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.backward(engine(torch.ones(1, 1024)).sum())
engine.step()
engine.destroy()
print("trained")
"""


def test_a_float32_model_trains_without_a_compiler(tmp_path):
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled"),
        "DS_ACCELERATOR": "cpu",
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    }
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300)
    assert done.stdout.endswith("trained\n"), done.stdout + done.stderr
    assert not list(tmp_path.glob("compiled/*"))
