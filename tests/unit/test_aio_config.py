"""The `aio` section: names, spellings, bounds and the handle it builds."""

import sys
import types

import pytest

from offload.config import AioConfig
from offload.errors import OffloadConfigError, OffloadWarning


def test_absent_keys_take_the_handles_own_defaults():
    aio = AioConfig()
    assert (aio.block_size, aio.queue_depth, aio.intra_op_parallelism) == (1 << 20, 64, 1)
    assert (aio.single_submit, aio.overlap_events, aio.use_gds) == (False, True, False)


def test_the_tuners_printout_is_understood():
    printed = {
        "single_submit": "false",
        "overlap_events": "true",
        "num_threads": 8,
        "queue_depth": 32,
        "block_size": 1048576,
    }
    with pytest.warns(OffloadWarning, match=r"aio.num_threads is an old name.*write intra_op_parallelism"):
        aio = AioConfig(**printed)
    assert (aio.single_submit, aio.overlap_events, aio.intra_op_parallelism) == (False, True, 8)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("True", True), ("False", False)]
)
def test_booleans_may_be_text(text, value):
    assert AioConfig(single_submit=text).single_submit is value


@pytest.mark.parametrize("value", ["8", 8, 8.0])
def test_numbers_may_be_text(value):
    assert AioConfig(queue_depth=value).queue_depth == 8


@pytest.mark.parametrize("old_name", ["thread_count", "num_threads"])
def test_old_thread_names_mean_intra_op_parallelism(old_name):
    with pytest.warns(OffloadWarning, match=old_name):
        assert AioConfig(**{old_name: 4}).intra_op_parallelism == 4


def test_two_names_of_one_setting_must_agree():
    with pytest.raises(OffloadConfigError, match=r"aio.thread_count is 4 and aio.intra_op_parallelism is 2"):
        AioConfig(thread_count=4, intra_op_parallelism=2)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("blocksize", "block_size"),
        ("block_sise", "block_size"),
        ("Queue-Depth", "queue_depth"),
        ("threadcount", "intra_op_parallelism"),
        ("overlap_event", "overlap_events"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key, meant):
    with pytest.raises(OffloadConfigError, match=rf"aio.{key}: no such key; did you mean {meant}\?"):
        AioConfig(**{key: 1})


def test_a_key_near_none_is_refused_with_all_of_them():
    with pytest.raises(OffloadConfigError, match=r"aio.zzz: no such key; aio knows block_size, queue_depth"):
        AioConfig(zzz=1)


@pytest.mark.parametrize("key", ["block_size", "queue_depth", "intra_op_parallelism"])
@pytest.mark.parametrize("value", [0, -1, True, None, "many", 1.5, [], 1 << 70])
def test_values_that_mean_nothing_are_refused_by_name(key, value):
    with pytest.raises(OffloadConfigError, match=rf"^aio.{key} is .*default: "):
        AioConfig(**{key: value})


@pytest.mark.parametrize(("key", "value"), [("block_size", 1000), ("queue_depth", 100_000)])
def test_values_that_the_handle_adjusts_are_accepted(key, value):
    assert getattr(AioConfig(**{key: value}), key) == value


def test_every_problem_is_reported_at_once():
    with pytest.raises(OffloadConfigError) as caught:
        AioConfig(queue_depth=0, blocksize=1, single_submit="perhaps")
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "aio.queue_depth",
        "aio.single_submit",
        "aio.blocksize:",
    ]


def test_gds_is_refused_with_the_way_out():
    with pytest.raises(OffloadConfigError, match=r"aio.use_gds is true.*set it to false"):
        AioConfig(use_gds="true")


@pytest.mark.parametrize("key", sorted(AioConfig.model_fields))
def test_auto_takes_the_default(key):
    assert AioConfig(**{key: "auto"}) == AioConfig()


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        AioConfig().queue_depth = 1


def test_a_section_that_is_no_object_is_refused():
    with pytest.raises(OffloadConfigError, match=r"aio is \[1\]; write an object"):
        AioConfig.parse([1])


def test_build_handle_passes_every_setting(monkeypatch):
    recorded = {}
    stand_in = types.ModuleType("offload.io")
    stand_in.AsyncIOHandle = lambda **settings: recorded.update(settings)
    monkeypatch.setitem(sys.modules, "offload.io", stand_in)
    AioConfig(queue_depth=4, overlap_events=False).build_handle("posix")
    assert recorded == {
        "block_size": 1 << 20,
        "queue_depth": 4,
        "single_submit": False,
        "overlap_events": False,
        "intra_op_parallelism": 1,
        "backend": "posix",
        "checksums": False,
    }
