"""The `offload_optimizer` section: DeepSpeed's keys and defaults, and what NVMe cannot do."""

import pytest

from offload.config import OffloadOptimizerConfig
from offload.errors import OffloadConfigError

KEY = "zero_optimization.offload_optimizer"


def on_nvme(**keys):
    return OffloadOptimizerConfig(device="nvme", nvme_path="/swap", **keys)


def test_nvme_without_a_path_is_refused():
    with pytest.raises(OffloadConfigError, match=rf"^{KEY}.nvme_path is missing"):
        OffloadOptimizerConfig(device="nvme")


@pytest.mark.parametrize(
    ("keys", "pipelined"),
    [({}, False), ({"pipeline_read": True}, True), ({"pipeline_write": "true"}, True)],
)
def test_either_pipeline_makes_it_pipelined(keys, pipelined):
    assert on_nvme(**keys).pipelined is pipelined


def test_buffers_become_one_arena_of_the_largest_sub_group():
    assert on_nvme(buffer_count=3).arena_nbytes(sub_group_numel=1000, element_nbytes=4) == 12_000


@pytest.mark.parametrize("keys", [{"ratio": 0.5}, {"super_offload": True}, {"buffer_count": 0}])
def test_what_nvme_cannot_do_is_refused_on_nvme_only(keys):
    OffloadOptimizerConfig(device="cpu", **keys)
    with pytest.raises(OffloadConfigError, match=rf"^{KEY}.{next(iter(keys))} is "):
        on_nvme(**keys)


@pytest.mark.parametrize("key", ["ratio", "cpuadam_cores_perc"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "half"])
def test_shares_lie_between_0_and_1(key, value):
    with pytest.raises(OffloadConfigError, match=rf"^{KEY}.{key} is "):
        OffloadOptimizerConfig(**{key: value})


def test_a_key_of_the_other_section_is_refused():
    with pytest.raises(OffloadConfigError, match=rf"^{KEY}.buffer_size: no such key"):
        on_nvme(buffer_size=1)
