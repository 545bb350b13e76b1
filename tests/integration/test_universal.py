"""DeepSpeed's universal checkpoints: saved by two ranks with all state on NVMe, loaded by one."""

import argparse

import pytest
from deepspeed.checkpoint.ds_to_universal import main as convert

from offload.errors import OffloadError
from tests.integration.comparison import differences
from tests.integration.ranks import run_ranks
from tests.integration.training import Case, advance, engine_for, snapshot

SAVED = Case("nvme", "nvme", ranks=2)
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def save(swap_dir, folder):
    with engine_for(SAVED, swap_dir) as engine:
        advance(engine, SAVED, range(3))
        engine.save_checkpoint(str(folder), tag="saved")
        return snapshot(engine)


@pytest.fixture(scope="module")
def universal(tmp_path_factory):
    """The folder of a universal checkpoint, and what was saved."""
    folder = tmp_path_factory.mktemp("universal")
    (folder / "swap").mkdir()
    saved, _ = run_ranks(2, save, folder / "swap", folder)
    convert(
        argparse.Namespace(
            input_folder=str(folder / "saved"),
            output_folder=str(folder / "converted"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )
    return folder, saved


def load(universal, swap_dir, case, **changes):
    """State after the load, losses and state after three more steps."""
    folder, _ = universal
    with engine_for(case, swap_dir, seed=5, **UNIVERSAL, **changes) as engine:
        engine.load_checkpoint(str(folder), tag="converted")
        loaded = snapshot(engine)
        return loaded, advance(engine, case, range(3, 6)), snapshot(engine)


def test_one_rank_goes_on_from_what_two_ranks_saved(universal, swap_dir):
    loaded, losses, at_end = load(universal, swap_dir, SAVED)
    assert differences(loaded, universal[1]) == []
    in_memory = load(universal, swap_dir, SAVED.in_memory())
    assert losses == in_memory[1]
    assert differences(at_end, in_memory[2]) == []


@pytest.mark.parametrize("case", [SAVED, SAVED.in_memory()], ids=["nvme", "memory"])
def test_its_weights_load_without_the_optimizer_state(universal, swap_dir, case):
    folder, saved = universal
    with engine_for(case, swap_dir, seed=5, **UNIVERSAL) as engine:
        engine.load_checkpoint(str(folder), tag="converted", load_optimizer_states=False)
        loaded = snapshot(engine)
        assert advance(engine, case, range(3, 4))[0] > 0
    weights = {name: value for name, value in saved.items() if name.endswith((", model", ", fp32"))}
    assert differences({name: loaded[name] for name in weights}, weights) == []


def test_it_loads_into_another_format_of_state(universal, swap_dir):
    loaded, *_ = load(universal, swap_dir, SAVED, offload={"state_format": "split"})
    different = differences(loaded, universal[1])
    assert all(name.endswith(", model") for name in different)  # but for ties
    assert len(different) <= 4


def test_a_file_that_is_missing_is_named(universal, swap_dir):
    missing = universal[0] / "converted/zero/layers.1.weight/exp_avg.pt"
    content = missing.read_bytes()
    missing.unlink()
    try:
        with pytest.raises(OffloadError, match=r"no exp_avg of layers\.1\.weight: no .*exp_avg\.pt"):
            load(universal, swap_dir, SAVED)
    finally:
        missing.write_bytes(content)
