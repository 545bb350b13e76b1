"""Which gradients count in a step: those of its own accumulation window, the last that was set or came."""

import pytest
import torch
from deepspeed import utils

from tests.integration.comparison import differences
from tests.integration.faults import BY_WHOLE_SUB_GROUPS
from tests.integration.training import DTYPES, Case, advance, batch, engine_for, snapshot

PLACES = {
    "cpu": ("cpu", {}),
    "nvme": ("nvme", {"offload": {"gradients": "host"}}),
    "nvme, gradients too": ("nvme", {"offload": {"gradients": "nvme"}}),
    "nvme, whole sub-groups": ("nvme", BY_WHOLE_SUB_GROUPS),
}
STREAMED = [name for name in PLACES if name.startswith("nvme") and "whole" not in name]


def backward(engine, case, number, skipped=()):
    x, target = batch(number, case.width, DTYPES[case.dtype])
    engine.backward(engine(x, target, skipped=skipped))


@pytest.mark.parametrize("place", PLACES)
def test_the_norms_of_gradients_that_were_dropped_do_not_count(place, swap_dir):
    optimizer, changes = PLACES[place]
    case = Case(optimizer=optimizer, clipping=True, dtype="fp32")
    ends = []
    for dropped in (False, True):
        with engine_for(case, swap_dir, **changes) as engine:
            if dropped:
                backward(engine, case, 9)
                engine.optimizer.zero_grad()
            backward(engine, case, 1, skipped=(1, 2))
            engine.step()
            ends.append({"norm": float(engine.get_global_grad_norm()), **snapshot(engine)})
    assert differences(*ends) == []


@pytest.mark.parametrize("place", PLACES)
def test_an_overflow_counts_in_its_own_step_alone(place, swap_dir):
    optimizer, changes = PLACES[place]
    case = Case(optimizer=optimizer, dtype="fp16", feature="no gradient in some steps")
    with engine_for(case, swap_dir, **changes) as engine:
        skipped = []
        for step in range(3):  # the second gives layers 1 and 2 no gradient; the first one's was infinite
            advance(engine, case, [step])
            skipped.append(engine.skipped_steps)
    assert skipped == [1, 1, 1]


@pytest.mark.parametrize("place", STREAMED)
def test_a_gradient_set_between_micro_batches_gives_way_to_the_next_one(place, swap_dir):
    ends, norms = [], []
    for optimizer, changes in (PLACES["cpu"], PLACES[place]):
        case = Case(optimizer=optimizer, dtype="fp32", accumulation=2, clipping=True)
        with engine_for(case, swap_dir, **changes) as engine:
            weight, unused = engine.module.layers[0].weight, engine.module.layers[1].weight
            backward(engine, case, 0)
            for param in (weight, unused):
                utils.safe_set_full_grad(param, torch.zeros(param.ds_shape))
            engine.step()
            backward(engine, case, 1, skipped=(1,))
            found = {f"gradient {i}": utils.safe_get_full_grad(p) for i, p in enumerate((weight, unused))}
            engine.step()
            norms.append(float(engine.get_global_grad_norm()))
            ends.append({**found, **snapshot(engine)})
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert differences(*ends) == []
    assert all(bool(gradient.any()) for gradient in found.values())
