"""The `offload_param` section: DeepSpeed's keys and defaults, and what cannot work."""

from pathlib import Path

import pytest

from offload.config import OffloadParamConfig
from offload.errors import OffloadConfigError

KEY = "zero_optimization.offload_param"


def test_absent_means_no_offload():
    param = OffloadParamConfig()
    assert (param.device, param.nvme_path, param.on_nvme) == ("none", None, False)


def test_every_key_is_taken_as_text_or_number():
    param = OffloadParamConfig(
        device="nvme",
        nvme_path="/swap",
        buffer_count="6",
        buffer_size=1e8,
        max_in_cpu="0",
        pin_memory="false",
    )
    assert param.nvme_path == Path("/swap")
    assert (param.buffer_count, param.buffer_size, param.max_in_cpu, param.pin_memory) == (6, 10**8, 0, False)


@pytest.mark.parametrize("path", [None, "", "none", "None"])
def test_nvme_without_a_path_is_refused(path):
    with pytest.raises(OffloadConfigError, match=rf"^{KEY}.nvme_path is missing"):
        OffloadParamConfig(device="nvme", nvme_path=path)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_without_nvme_no_path_is_needed(device):
    assert OffloadParamConfig(device=device, nvme_path=None).nvme_path is None


@pytest.mark.parametrize("device", ["NVMe", "gpu", None, 3, True])
def test_an_unknown_device_is_refused_with_the_known_ones(device):
    with pytest.raises(OffloadConfigError, match=rf"^{KEY}.device is .*'none', 'cpu' or 'nvme'"):
        OffloadParamConfig(device=device)


@pytest.mark.parametrize("key", ["device", "nvme_path"])
def test_auto_is_refused_where_nothing_can_choose(key):
    with pytest.raises(OffloadConfigError, match=rf'{KEY}.{key} is "auto"'):
        OffloadParamConfig(**{key: "auto"})


@pytest.mark.parametrize("key", ["buffer_count", "buffer_size", "max_in_cpu", "pin_memory"])
def test_auto_takes_the_default_elsewhere(key):
    assert OffloadParamConfig(**{key: "auto"}) == OffloadParamConfig()


def test_a_section_left_at_auto_is_refused():
    with pytest.raises(OffloadConfigError, match=rf'{KEY} is "auto"'):
        OffloadParamConfig.parse("auto")


def test_counts_and_sizes_become_one_arena():
    assert (
        OffloadParamConfig(buffer_count=5, buffer_size=1_100_000).arena_nbytes(element_nbytes=2) == 11_000_000
    )


@pytest.mark.parametrize("key", ["buffer_count", "buffer_size"])
def test_an_arena_of_nothing_is_refused_on_nvme_only(key):
    OffloadParamConfig(device="cpu", **{key: 0})
    with pytest.raises(OffloadConfigError, match="no memory to swap through"):
        OffloadParamConfig(device="nvme", nvme_path="/swap", **{key: 0})


@pytest.mark.parametrize("key", ["buffer_count", "buffer_size", "max_in_cpu"])
def test_negative_numbers_are_refused_by_name(key):
    with pytest.raises(OffloadConfigError, match=rf"^{KEY}.{key} is -1"):
        OffloadParamConfig(**{key: -1})
