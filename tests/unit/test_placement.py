"""Known sections and keys in the wrong place are led to the right one."""

import pytest

from offload.config.placement import misplaced


@pytest.mark.parametrize(
    ("config", "found", "home"),
    [
        ({"zero_optimization": {"aio": {}}}, "zero_optimization.aio", "the top level"),
        ({"zero_optimization": {"offload": {}}}, "zero_optimization.offload", "the top level"),
        (
            {"zero_optimization": {"offload_optimizer": {"aio": {}}}},
            "zero_optimization.offload_optimizer.aio",
            "the top level",
        ),
        ({"offload": {"aio": {}}}, "offload.aio", "the top level"),
        ({"offload_param": {}}, "offload_param", "zero_optimization"),
        ({"aio": {"offload_optimizer": {}}}, "aio.offload_optimizer", "zero_optimization"),
        (
            {"zero_optimization": {"offload_optimizer": {"offload_param": {}}}},
            "zero_optimization.offload_optimizer.offload_param",
            "zero_optimization",
        ),
        (
            {"zero_optimization": {"zero_optimization": {}}},
            "zero_optimization.zero_optimization",
            "the top level",
        ),
    ],
)
def test_a_section_in_the_wrong_place_is_led_home(config, found, home):
    (line,) = misplaced(config)
    assert line.startswith(f"{found}: ")
    assert f"move it to {home}" in line


@pytest.mark.parametrize(
    ("key", "home"),
    [
        ("queue_depth", "into aio"),
        ("thread_count", "into aio"),
        ("max_in_cpu", "into zero_optimization.offload_param"),
        ("nvme_path", "into zero_optimization.offload_param or zero_optimization.offload_optimizer"),
    ],
)
def test_a_key_beside_its_section_is_led_into_it(key, home):
    (line,) = misplaced({"zero_optimization": {key: 1}})
    assert line == f"zero_optimization.{key}: no such key; move it {home}"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": True},
        {
            "zero_optimization": {"stage": 3, "offload_param": {}, "offload_optimizer": {}},
            "aio": {},
            "offload": {},
        },
        {"zero_optimization": {"zenflow": {"offload": True}}},
    ],
)
def test_what_stands_right_is_not_mentioned(config):
    assert misplaced(config) == []
