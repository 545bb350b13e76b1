"""A tag holds one whole checkpoint at any moment, and what does not fit is refused by a typed error."""

import os
import signal

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from offload.checkpoint.tag_folder import TagFolder
from offload.errors import OffloadError
from tests.integration.comparison import differences
from tests.integration.ranks import run_ranks
from tests.integration.training import Case, advance, engine_for, snapshot

CASE = Case("nvme", "nvme")


def test_saving_a_tag_again_replaces_it(swap_dir, checkpoint_dir):
    with engine_for(CASE, swap_dir) as engine:
        for step in range(2):
            advance(engine, CASE, [step])
            engine.save_checkpoint(str(checkpoint_dir), tag="best")
        second = snapshot(engine)
    [loaded] = run_ranks(1, _load, swap_dir, checkpoint_dir)
    assert differences(loaded, second) == []
    assert {path.name for path in checkpoint_dir.iterdir() if path.suffix != ".py"} == {"best", "latest"}


@pytest.mark.parametrize("moment", ["model_states.pt", "optim_states.pt", "staged", "published"])
def test_a_kill_during_the_second_save_leaves_a_whole_checkpoint(moment, swap_dir, checkpoint_dir):
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        run_ranks(1, _save_twice_and_die, moment, swap_dir, checkpoint_dir)
    saved = torch.load(checkpoint_dir.parent / "snapshots.pt", weights_only=False)
    expected = saved[1] if moment == "published" else saved[0]
    assert differences(_load(swap_dir, checkpoint_dir), expected) == []
    with engine_for(CASE, swap_dir) as engine:
        advance(engine, CASE, [0])
        engine.save_checkpoint(str(checkpoint_dir), tag="best")
        third = snapshot(engine)
    assert differences(_load(swap_dir, checkpoint_dir), third) == []
    assert not [path for path in checkpoint_dir.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("tag", [None, "best"])
def test_a_tag_that_was_moved_aside_when_the_save_died_is_found(tag, swap_dir, checkpoint_dir):
    _save(swap_dir, checkpoint_dir)
    (checkpoint_dir / "best").rename(checkpoint_dir / ".best.previous")  # where names cannot be exchanged
    with engine_for(CASE, swap_dir, seed=5) as engine:
        path, _ = engine.load_checkpoint(str(checkpoint_dir), tag=tag)
        assert path is not None and engine.global_steps == 1


def test_a_folder_without_a_checkpoint_gives_none(swap_dir, checkpoint_dir):
    with engine_for(CASE, swap_dir) as engine:
        assert engine.load_checkpoint(str(checkpoint_dir)) == (None, None)


def test_another_sub_group_size_is_refused_by_name(swap_dir, checkpoint_dir):
    _save(swap_dir, checkpoint_dir)
    other = {"sub_group_size": 500_000, "offload_optimizer": {"device": "nvme", "nvme_path": str(swap_dir)}}
    with (
        engine_for(CASE, swap_dir, zero_optimization={"stage": 3, **other}) as engine,
        pytest.raises(OffloadError, match="sub_group_size"),
    ):
        engine.load_checkpoint(str(checkpoint_dir), tag="best")


def test_another_width_is_refused_by_name(swap_dir, checkpoint_dir, monkeypatch):
    _save(swap_dir, checkpoint_dir)
    monkeypatch.setattr(Case, "width", 1024)
    with engine_for(CASE, swap_dir) as engine, pytest.raises(OffloadError, match="load with the model"):
        engine.load_checkpoint(str(checkpoint_dir), tag="best")


def test_a_checkpoint_cut_short_is_refused(swap_dir, checkpoint_dir):
    _save(swap_dir, checkpoint_dir)
    [path] = (checkpoint_dir / "best").glob("*optim_states.pt")
    os.truncate(path, path.stat().st_size // 2)
    with engine_for(CASE, swap_dir) as engine, pytest.raises((OffloadError, RuntimeError)):
        engine.load_checkpoint(str(checkpoint_dir), tag="best")


def _save(swap_dir, checkpoint_dir):
    with engine_for(CASE, swap_dir) as engine:
        advance(engine, CASE, [0])
        engine.save_checkpoint(str(checkpoint_dir), tag="best")


def _load(swap_dir, checkpoint_dir):
    with engine_for(CASE, swap_dir, seed=5) as engine:
        engine.load_checkpoint(str(checkpoint_dir), tag="best")
        return snapshot(engine)


def _save_twice_and_die(moment, swap_dir, checkpoint_dir):
    with engine_for(CASE, swap_dir) as engine:
        advance(engine, CASE, [0])
        engine.save_checkpoint(str(checkpoint_dir), tag="best")
        first = snapshot(engine)
        advance(engine, CASE, [1])
        torch.save([first, snapshot(engine)], checkpoint_dir.parent / "snapshots.pt")
        _die_at(moment)
        engine.save_checkpoint(str(checkpoint_dir), tag="best")


def _die_at(moment):
    """Kill this process the next time it has written that file, or comes to that point of the save."""
    write, publish = TorchCheckpointEngine.save, TagFolder.publish

    def write_until(checkpoint_engine, state_dict, path):
        write(checkpoint_engine, state_dict, path)
        if path.endswith(moment):
            os.kill(os.getpid(), signal.SIGKILL)

    def publish_until(folder):
        if moment == "published":
            publish(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    TorchCheckpointEngine.save = write_until
    TagFolder.publish = publish_until
