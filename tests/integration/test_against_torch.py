"""Where our numbers are not stock DeepSpeed's, they are plain torch's."""

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR

from tests.integration.combinations import STOCK_DIFFERS
from tests.integration.training import Case, batch, config, train


@pytest.mark.parametrize("feature", STOCK_DIFFERS)
def test_a_parameter_without_gradient_steps_as_in_torch(feature, swap_dir):
    case = Case("nvme", "nvme", "fp32", accumulation=4 if "micro-batches" in feature else 1, feature=feature)
    run = train(case, swap_dir)
    for name, value in _train_in_torch(case).items():
        torch.testing.assert_close(run.at_end[f"{name}, fp32"], value, rtol=1e-4, atol=1e-5)


def _train_in_torch(case):
    torch.manual_seed(0)
    net = case.uses.build(case.width)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
    schedule = WarmupLR(optimizer, **config(case, Path())["scheduler"]["params"])
    for step in range(6):
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
        for number in range(step * case.accumulation, (step + 1) * case.accumulation):
            x, target = batch(number, case.width, torch.float32)
            (net(x, target, case.uses.skipped(number)) / case.accumulation).backward()
        optimizer.step()
        schedule.step()
    return dict(net.named_parameters())
