"""A sub-group knows where each of its tensors lies, and which of the optimizer's they are."""

import os
from types import SimpleNamespace

import pytest
import torch

from offload.swap.sub_group import MASTER, SubGroup, state_tensors

NUMEL = 1000


@pytest.fixture
def group(tmp_path):
    return SubGroup(7, torch.empty(0), NUMEL, tmp_path)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_tensor_has_one_place_that_is_reserved_on_first_use(group, tmp_path):
    swapped = group.swapped_tensor("exp_avg", torch.float32)
    assert group.swapped_tensor("exp_avg", torch.float32) is swapped
    assert swapped.extent.nbytes == 4 * NUMEL
    assert swapped.extent.key == "exp_avg of sub-group 7 (1000 elements)"
    assert os.stat(swapped.extent.path).st_size == 4096
    assert names(tmp_path) == ["00007.exp_avg.float32.swp"]


def test_a_tensor_of_another_dtype_takes_the_place_of_the_old(group, tmp_path):
    group.swapped_tensor("exp_avg", torch.float32)
    assert group.swapped_tensor("exp_avg", torch.bfloat16).extent.nbytes == 2 * NUMEL
    assert names(tmp_path) == ["00007.exp_avg.bfloat16.swp"]


@pytest.mark.parametrize("name", ["a/b", "..", "naïve state", "x" * 60])
def test_a_state_of_any_name_gets_a_file_of_its_own(group, tmp_path, name):
    group.swapped_tensor(name, torch.float32)
    group.swapped_tensor("other", torch.float32)
    assert len(names(tmp_path)) == 2


def test_a_gradient_goes_to_the_same_place_in_every_step(group, tmp_path):
    first = group.gradient_extent(0, 10, torch.bfloat16)
    second = group.gradient_extent(10, 10, torch.bfloat16)
    assert group.gradient_extent(0, 10, torch.bfloat16) == first
    assert first.offset != second.offset
    assert names(tmp_path) == ["00007.gradient.swp"]


def test_gradients_of_other_lengths_or_dtypes_do_not_share_a_place(group):
    places = {
        group.gradient_extent(0, numel, dtype).offset
        for numel in (10, 20)
        for dtype in (torch.half, torch.float)
    }
    assert len(places) == 4
    assert {
        group.gradient_extent(0, 10, torch.half).offset,
        group.gradient_extent(0, 20, torch.half).offset,
    } < places


def test_forgotten_state_takes_its_file_along_but_never_the_master_weights(group, tmp_path):
    for name in (MASTER, "exp_avg", "exp_avg_sq"):
        group.swapped_tensor(name, torch.float32)
    group.forget_state(keep=("exp_avg",))
    assert group.swapped.keys() == {MASTER, "exp_avg"}
    assert names(tmp_path) == ["00007.exp_avg.float32.swp", "00007.fp32.float32.swp"]


def test_only_state_with_one_value_per_weight_swaps(group):
    staying = torch.zeros(NUMEL)
    staying.swappable = False
    state = {"exp_avg": torch.zeros(NUMEL), "step": torch.tensor(1.0), "row": torch.zeros(10), "kind": "adam"}
    optimizer = SimpleNamespace(state={group.parameter: {**state, "staying": staying}})
    assert [name for name, _ in state_tensors(optimizer, group)] == ["exp_avg"]


def test_swapped_out_state_still_counts_as_state_that_swaps(group):
    group.swapped_tensor("exp_avg", torch.float32)
    optimizer = SimpleNamespace(state={group.parameter: {"exp_avg": torch.empty(0)}})
    assert [name for name, _ in state_tensors(optimizer, group)] == ["exp_avg"]


def test_an_optimizer_without_state_has_nothing_to_swap(group):
    assert list(state_tensors(SimpleNamespace(state={}), group)) == []
