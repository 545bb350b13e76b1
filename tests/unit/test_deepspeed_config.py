"""A whole DeepSpeed config: what it says is read, what it cannot mean is refused before any weight exists."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from offload.config import AioConfig, OffloadConfig, OffloadOptimizerConfig, OffloadParamConfig, read_config
from offload.errors import OffloadConfigError, OffloadWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*(is memory|direct I/O).*")

SECTIONS = ["offload_param", "offload_optimizer"]


def zero(path, stage=3, section="offload_optimizer", **keys):
    return {
        "zero_optimization": {"stage": stage, section: {"device": "nvme", "nvme_path": str(path), **keys}}
    }


def refused(config):
    with pytest.raises(OffloadConfigError) as caught:
        read_config(config)
    return str(caught.value)


def test_a_complete_config_is_read(tmp_path):
    config = zero(tmp_path, pin_memory=False, buffer_count=5) | {
        "aio": {"queue_depth": 8},
        "bf16": {"enabled": True},
    }
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    config["offload"] = {"backend": "posix"}
    swap = read_config(config)
    assert swap.aio == AioConfig(queue_depth=8)
    assert swap.offload == OffloadConfig(backend="posix")
    assert swap.offload_param == OffloadParamConfig(device="cpu")
    assert swap.offload_optimizer.buffer_count == 5
    assert (swap.zero_stage, swap.uses_nvme) == (3, True)
    assert swap.swap_paths == {"zero_optimization.offload_optimizer.nvme_path": tmp_path}


@pytest.mark.parametrize(
    "config", [{}, {"zero_optimization": True}, {"zero_optimization": {"stage": 2}}, {"aio": None}]
)
def test_a_config_without_nvme_is_left_alone(config):
    swap = read_config(config)
    assert not swap.uses_nvme
    assert (swap.aio, swap.offload_optimizer) == (AioConfig(), OffloadOptimizerConfig())


def test_a_file_means_what_its_dict_means(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zero(tmp_path)))
    assert read_config(path) == read_config(str(path)) == read_config(zero(tmp_path))


def test_the_users_dict_is_not_touched(tmp_path):
    config = zero(tmp_path) | {"aio": {"thread_count": 2}}
    before = json.dumps(config)
    with pytest.warns(OffloadWarning):
        read_config(config)
    assert json.dumps(config) == before


def test_one_handle_per_call_on_the_chosen_backend(monkeypatch):
    stand_in = types.ModuleType("offload.io")
    stand_in.AsyncIOHandle = lambda **settings: settings
    monkeypatch.setitem(sys.modules, "offload.io", stand_in)
    swap = read_config({"offload": {"backend": "libaio"}, "aio": {"queue_depth": 3}})
    handle = swap.build_handle()
    assert (handle["backend"], handle["queue_depth"]) == ("libaio", 3)


@pytest.mark.parametrize("section", ["aio", "offload"])
def test_a_top_level_section_inside_zero_names_the_right_place(tmp_path, section):
    config = zero(tmp_path)
    config["zero_optimization"][section] = {}
    assert refused(config).startswith(
        f"zero_optimization.{section}: `{section}` does not belong there; move it to"
    )
    assert f'the top level: {{"{section}": {{...}}}}' in refused(config)


def test_old_name_works_and_unknown_key_is_refused(tmp_path):
    with pytest.warns(OffloadWarning, match=r"aio.thread_count is an old name"):
        assert read_config({"aio": {"thread_count": 4}}).aio.intra_op_parallelism == 4
    with pytest.warns(OffloadWarning):
        message = refused({"aio": {"thread_count": 4, "blocksize": 262144}})
    assert message == "aio.blocksize: no such key; did you mean block_size?"


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, "2"])
def test_nvme_below_stage_3_is_refused(tmp_path, section, stage):
    message = refused(zero(tmp_path, stage=stage, section=section))
    assert (
        f"zero_optimization.{section}.device is nvme, but zero_optimization.stage is {int(stage)}" in message
    )
    assert "set it to 3, or the device to cpu" in message


def test_nvme_without_a_stage_is_refused(tmp_path):
    config = zero(tmp_path)
    del config["zero_optimization"]["stage"]
    assert "zero_optimization.stage is null, which DeepSpeed reads as 0" in refused(config)


@pytest.mark.parametrize("section", SECTIONS)
def test_nvme_without_a_path_is_refused(section):
    config = {"zero_optimization": {"stage": 3, section: {"device": "nvme"}}}
    assert refused(config).startswith(f"zero_optimization.{section}.nvme_path is missing")


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("path", "told"), [("file", "is a regular file"), ("/dev/null", "is a character device")]
)
def test_a_path_that_is_no_directory_is_refused(tmp_path, section, path, told):
    (tmp_path / "file").touch()
    message = refused(zero(tmp_path / path, section=section))
    assert message.startswith(f"zero_optimization.{section}.nvme_path: ")
    assert told in message


@pytest.mark.skipif(not Path("/dev/loop0").is_block_device(), reason="no block device here")
def test_a_block_device_is_refused():
    assert "nvme_path: /dev/loop0 is a block device" in refused(zero("/dev/loop0"))


def test_stage_auto_is_refused_with_nvme_and_zero_without(tmp_path):
    assert 'zero_optimization.stage is "auto", which DeepSpeed reads as 0' in refused(
        zero(tmp_path, stage="auto")
    )
    assert read_config({"zero_optimization": {"stage": "auto"}}).zero_stage == 0


def test_auto_values_of_the_trainer_are_resolved(tmp_path):
    config = zero(tmp_path, buffer_count="auto", pin_memory="auto")
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    config |= {"aio": {"queue_depth": "auto"}, "offload": "auto", "train_batch_size": "auto"}
    swap = read_config(config)
    assert swap.offload_optimizer == OffloadOptimizerConfig(device="nvme", nvme_path=tmp_path)
    assert (swap.aio, swap.offload) == (AioConfig(), OffloadConfig())


@pytest.mark.parametrize("key", ["device", "nvme_path"])
def test_auto_is_refused_by_name_where_nothing_can_choose(tmp_path, key):
    assert f'offload_optimizer.{key} is "auto"' in refused(zero(tmp_path, **{key: "auto"}))


def test_zenflow_with_the_optimizer_on_nvme_is_refused(tmp_path):
    config = zero(tmp_path)
    config["zero_optimization"]["zenflow"] = {"topk_ratio": 0.1}
    assert refused(config).startswith("zero_optimization.zenflow is set")


@pytest.mark.parametrize("stage", [4, -1, True, 2.5, "three", []])
def test_a_stage_that_does_not_exist_is_refused(stage):
    assert refused({"zero_optimization": {"stage": stage}}).startswith("zero_optimization.stage is ")


@pytest.mark.parametrize("name", ["aio", "zero_optimization", "offload"])
@pytest.mark.parametrize("value", [3, "text", [1]])
def test_a_section_that_is_no_object_is_refused(name, value):
    assert f"{name} is {json.dumps(value)}; write an object" in refused({name: value})


def test_all_problems_are_told_at_once(tmp_path):
    config = zero(tmp_path, bufer_count=1) | {"aio": {"queue_depth": 0}, "offload_param": {}}
    lines = refused(config).splitlines()
    assert [line.split()[0].rstrip(":") for line in lines] == [
        "offload_param",
        "aio.queue_depth",
        "zero_optimization.offload_optimizer.bufer_count",
    ]


def test_storage_can_be_left_untouched(tmp_path):
    path = tmp_path / "file"
    path.touch()
    assert read_config(zero(path), probe_storage=False).swap_paths


def test_reading_a_config_brings_neither_torch_nor_deepspeed():
    body = "import sys, offload.config; sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed')))"
    assert subprocess.run([sys.executable, "-c", body]).returncode == 0
