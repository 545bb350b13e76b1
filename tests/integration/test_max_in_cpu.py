"""`max_in_cpu`: so many parameter elements stay in host memory, the rest swaps; nothing else changes."""

import pytest

from offload import stats
from tests.integration.comparison import differences
from tests.integration.faults import changed
from tests.integration.training import Case, advance, engine_for, snapshot

CASE = Case(params="nvme")
LARGEST = CASE.width**2
"""Elements of a square layer, of which there are four; what else there is, is too small to be swapped."""


def run(swap_dir, max_in_cpu):
    with engine_for(
        CASE, swap_dir, **changed(CASE, swap_dir, offload_param={"max_in_cpu": max_in_cpu})
    ) as engine:
        losses = advance(engine, CASE, range(3))
        read = stats()["last_step"].bytes_read["parameters"]
        params = [param for param in engine.module.parameters() if param.ds_numel == LARGEST]
        resident = sum(param.ds_tensor.status.name == "AVAILABLE" for param in params)
        return (losses, snapshot(engine)), resident, read


@pytest.fixture(scope="module")
def nothing_in_memory(tmp_path_factory):
    return run(tmp_path_factory.mktemp("swap"), 0)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_as_many_elements_as_it_says_stay_in_memory(swap_dir, nothing_in_memory, layers):
    expected, resident, read_without = nothing_in_memory
    assert resident == 0
    beside = 10 * CASE.width  # biases and norm lie in the sub-groups of the layers
    found, resident, read = run(swap_dir, layers * LARGEST + beside)
    assert resident == layers // 2 * 2  # a sub-group of two layers stays whole or not at all
    assert read == read_without * (4 - resident) // 4
    assert found[0] == expected[0]
    assert differences(found[1], expected[1]) == []
