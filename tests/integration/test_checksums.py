"""Checksums change no bit of a training, and a changed bit on the drive stops it before it does harm."""

from pathlib import Path

import pytest
import torch

import offload
from offload.errors import OffloadIntegrityError
from tests.integration.comparison import differences
from tests.integration.faults import WAYS, flip
from tests.integration.training import (
    AFTER_SAVE,
    BEFORE_SAVE,
    DTYPES,
    Case,
    advance,
    batch,
    engine_for,
    snapshot,
)

CASE = Case(params="nvme")
STORED_GRADIENTS = {"streamed gradients": {"offload": {"gradients": "nvme"}}}
ALL_WAYS = WAYS | STORED_GRADIENTS | {name: {"offload": {"state_format": name}} for name in ("split", "8bit")}


@pytest.fixture(params=ALL_WAYS, ids=lambda way: way.replace(" ", "-"))
def way(request):
    """Changes to the config that choose how optimizer state moves."""
    return ALL_WAYS[request.param]


def checked(way):
    return {**way, "offload": {**way.get("offload", {}), "checksums": True}}


def swap_file(swap_dir, pattern):
    """The first file of that name; its values reach over the middle."""
    return sorted(swap_dir.rglob(pattern))[0]


def spoil(path):
    flip(path, path.stat().st_size // 2)


def figures():
    return {name: offload.stats()[name] for name in ("bytes_checked", "bytes_unchecked")}


def test_training_and_resuming_are_the_same_to_the_last_bit(swap_dir, checkpoint_dir, way):
    runs = []
    for changes in (way, checked(way)):
        before = figures()
        with engine_for(CASE, swap_dir, **changes) as engine:
            losses = advance(engine, CASE, BEFORE_SAVE)
            engine.save_checkpoint(str(checkpoint_dir), tag="saved")
            runs.append({"losses": losses + advance(engine, CASE, AFTER_SAVE), **snapshot(engine)})
        grown = figures() != before
        assert grown == (changes is not way)
    with engine_for(CASE, swap_dir, seed=5, **checked(way)) as engine:
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        runs.append({"losses": losses + advance(engine, CASE, AFTER_SAVE), **snapshot(engine)})
    assert differences(runs[0], runs[1]) == differences(runs[0], runs[2]) == []


def test_all_that_a_step_reads_is_checked_but_for_padding(swap_dir, way):
    with engine_for(CASE, swap_dir, **checked(way)) as engine:
        advance(engine, CASE, range(2))
        before, read = figures(), sum(offload.stats()["bytes_read"].values())
        advance(engine, CASE, range(2, 4))
        after, read = figures(), sum(offload.stats()["bytes_read"].values()) - read
    grown = {name: after[name] - before[name] for name in after}
    assert sum(grown.values()) == read
    assert grown["bytes_unchecked"] < 0.01 * read


@pytest.mark.parametrize(
    "pattern", ["parameters.swp", "*.fp32.*.swp", "*.exp_avg.*.swp", "*.exp_avg_sq.*.swp"]
)
def test_a_changed_bit_stops_the_step_and_a_load_makes_it_good(swap_dir, checkpoint_dir, way, pattern):
    with engine_for(CASE, swap_dir, **checked(way)) as engine:
        advance(engine, CASE, BEFORE_SAVE)
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        expected = advance(engine, CASE, AFTER_SAVE), snapshot(engine)
        spoiled = swap_file(swap_dir, pattern)
        spoil(spoiled)
        with pytest.raises(OffloadIntegrityError, match=r"reading .* are not what was written") as caught:
            advance(engine, CASE, range(6, 7))
        assert Path(caught.value.filename) == spoiled
        assert caught.value.offset <= spoiled.stat().st_size // 2
        with pytest.raises(OffloadIntegrityError):
            advance(engine, CASE, range(6, 7))  # the bit is still wrong
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        assert advance(engine, CASE, AFTER_SAVE) == expected[0]
        assert differences(snapshot(engine), expected[1]) == []


@pytest.mark.parametrize("name", ["whole sub-groups", "streamed gradients"])
def test_a_changed_bit_of_a_gradient_stops_the_step(swap_dir, name):
    with engine_for(CASE, swap_dir, **checked(ALL_WAYS[name])) as engine:
        advance(engine, CASE, range(2))
        before = snapshot(engine)
        x, target = batch(2, CASE.width, DTYPES[CASE.dtype])
        engine.backward(engine(x, target))
        swapper = engine.optimizer.optimizer_swapper
        swapper.stored_gradients.flush() if name == "streamed gradients" else swapper.flush_gradients()
        spoiled = swap_file(swap_dir, "*.gradient*.swp")
        spoil(spoiled)
        with pytest.raises(OffloadIntegrityError, match=r"reading .*gradient.* of sub-group 0") as caught:
            engine.step()
        assert Path(caught.value.filename) == spoiled
        after = snapshot(engine)
        label, _ = next(iter(engine.module.named_parameters()))
        assert torch.equal(after[f"{label}, fp32"], before[f"{label}, fp32"])


def test_a_bit_that_changed_and_came_back_leaves_no_trace(swap_dir):
    with engine_for(CASE, swap_dir, **checked({})) as engine:
        advance(engine, CASE, range(2))
        before = snapshot(engine)
        spoiled = swap_file(swap_dir, "parameters.swp")
        spoil(spoiled)
        with pytest.raises(OffloadIntegrityError, match=r"reading parameter \d+"):
            advance(engine, CASE, range(2, 3))
        spoil(spoiled)
        assert differences(snapshot(engine), before) == []


@pytest.mark.parametrize("pattern", ["*.fp32.*.swp", "*.exp_avg.*.swp"])
def test_damaged_state_is_never_saved(swap_dir, checkpoint_dir, way, pattern):
    with engine_for(CASE, swap_dir, **checked(way)) as engine:
        advance(engine, CASE, BEFORE_SAVE)
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        expected = snapshot(engine)
        advance(engine, CASE, AFTER_SAVE)
        spoil(swap_file(swap_dir, pattern))
        with pytest.raises(OffloadIntegrityError, match=r"(mapping|reading) .* are not what was written"):
            engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        assert differences(snapshot(engine), expected) == []
