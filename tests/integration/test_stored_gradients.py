"""Gradients that wait on storage for the step: the same training, without their buffer in host memory."""

from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from deepspeed import comm

import offload
from offload import stats
from offload.errors import OffloadConfigError, OffloadIOError
from offload.runtime import streamed_zero3
from tests.integration.comparison import differences
from tests.integration.faults import BY_WHOLE_SUB_GROUPS, file_size_limit
from tests.integration.ranks import run_ranks
from tests.integration.training import Case, advance, batch, engine_for, snapshot

MIB = 1 << 20
HOST, NVME = {"gradients": "host"}, {"gradients": "nvme"}
CASES = [
    Case(params="nvme"),
    Case(params="memory", dtype="fp32", accumulation=4, clipping=True),
    Case(params="nvme", dtype="fp16", accumulation=2, clipping=True),
    Case(params="nvme", accumulation=4, feature="used in some micro-batches"),
    Case(params="memory", feature="no gradient in some steps"),
    Case(params="nvme", clipping=True, feature="gradient set by user (full)"),
    Case(params="memory", accumulation=2, feature="gradients updated by user (vectorized)"),
    Case(params="nvme", feature="tied weights", accumulation=2),
    Case(params="nvme", feature="frozen parameters"),
    Case(params="nvme", feature="activation checkpointing", accumulation=2),
]


def run(case, swap_dir, **section):
    """Losses, gradient norms and all state of a run, and how many bytes of gradients it wrote."""
    before = stats()["bytes_written"]["gradients"]
    shown = []
    with engine_for(case, swap_dir, offload=section) as engine:
        for step in range(4):
            shown += advance(engine, case, [step])
            shown.append(float(engine.get_global_grad_norm() or 0))
        state = snapshot(engine)
        held = engine.optimizer.grad_partitions_flat_buffer.untyped_storage().nbytes()
    return shown, state, held, stats()["bytes_written"]["gradients"] - before


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_the_same_to_the_last_bit(swap_dir, case):
    expected, expected_state, held, written = run(case, swap_dir, **HOST)
    assert written == 0
    assert held > 3 * MIB
    shown, state, held, written = run(case, swap_dir, **NVME)
    assert written > 0
    assert held < MIB
    assert shown == expected
    assert differences(state, expected_state) == []


@pytest.mark.parametrize("state_format", ["split", "8bit"])
def test_every_format_of_state_goes_with_them(swap_dir, state_format):
    case = Case(params="nvme", accumulation=2)
    small = {"state_format": state_format, "buffer_bytes": 8 * MIB, "host_cache": 8 * MIB}
    expected = run(case, swap_dir, **HOST, **small)
    found = run(case, swap_dir, **NVME, **small)
    assert found[0] == expected[0]
    assert differences(found[1], expected[1]) == []


def test_two_ranks_store_their_own_parts(swap_dir):
    assert run_ranks(2, _compare_on_two_ranks, swap_dir) == [[], []]


def _compare_on_two_ranks(swap_dir):
    case = Case(params="nvme", clipping=True, accumulation=2, ranks=2)
    expected, found = run(case, swap_dir, **HOST), run(case, swap_dir, **NVME)
    assert found[0] == expected[0]
    assert comm.get_world_size() == 2
    assert found[3] > 0
    return differences(found[1], expected[1])


def test_bytes_are_those_of_the_gradients_once_each_way(swap_dir):
    case = Case(params="memory")
    with engine_for(case, swap_dir, offload=NVME) as engine:
        advance(engine, case, range(2))
        record = stats()["last_step"]
        swapped = sum(group.numel for group in engine.optimizer.optimizer_swapper.swap_params_info.values())
    assert record.bytes_written["gradients"] == record.bytes_read["gradients"] == 2 * swapped


@pytest.mark.parametrize("free, kept", [(1 << 40, True), (MIB, False)])
def test_auto_asks_how_much_memory_is_free(swap_dir, monkeypatch, free, kept):
    monkeypatch.setattr(streamed_zero3, "available_nbytes", lambda: free)
    _, _, held, written = run(Case(params="memory"), swap_dir)
    assert (held > MIB) == kept
    assert (written == 0) == kept


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_cannot_be_written_stops_the_step_and_a_load_makes_it_good(
    swap_dir, checkpoint_dir, accumulation
):
    case = Case(params="memory", accumulation=accumulation)
    with engine_for(case, swap_dir, offload=NVME) as engine:
        advance(engine, case, range(2))
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        expected = advance(engine, case, range(2, 4)), snapshot(engine)  # waits for the step's own writes
        with file_size_limit(MIB), pytest.raises(OffloadIOError, match=r"writing gradient at 0 of sub-group"):
            advance(engine, case, range(4, 5))
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        assert advance(engine, case, range(2, 4)) == expected[0]
        assert differences(snapshot(engine), expected[1]) == []


@pytest.mark.parametrize("section", [HOST, NVME], ids=["host", "nvme"])
@pytest.mark.parametrize("nth", [1, 3, 6])
def test_a_backward_that_was_cut_off_leaves_nothing_behind(swap_dir, checkpoint_dir, section, nth):
    """At the `nth` gradient; what autograd had added up by then must not reach a step after the load."""
    case = Case(params="memory", accumulation=2)
    with engine_for(case, swap_dir, offload=section) as engine:
        advance(engine, case, range(2))
        engine.save_checkpoint(str(checkpoint_dir), tag="saved")
        expected = advance(engine, case, range(2, 4)), snapshot(engine)
        with breaking_gradient(engine.optimizer, nth), pytest.raises(LookupError):
            advance(engine, case, range(4, 5))
        engine.load_checkpoint(str(checkpoint_dir), tag="saved")
        assert advance(engine, case, range(2, 4)) == expected[0]
        assert differences(snapshot(engine), expected[1]) == []


@contextmanager
def breaking_gradient(zero, nth):
    norm, seen = zero._norm, []

    def breaking(sum_of_squares):
        seen.append(sum_of_squares)
        if len(seen) == nth:
            raise LookupError
        return norm(sum_of_squares)

    zero._norm = breaking
    try:
        yield
    finally:
        del zero._norm


def test_a_gradient_that_was_lost_is_never_stepped_on(swap_dir):
    """The error came during backward; whoever goes on all the same is told again, once for each step."""
    case = Case(params="memory")
    with engine_for(case, swap_dir, offload=NVME) as engine:
        advance(engine, case, range(2))
        before = snapshot(engine)
        loss = engine(*batch(2, case.width, torch.bfloat16))
        with file_size_limit(MIB), suppress(OffloadIOError):
            engine.backward(loss)
            engine.optimizer.optimizer_swapper.stored_gradients.flush()
        with pytest.raises(OffloadIOError, match="writing gradient"):
            engine.step()
        assert differences(snapshot(engine), before) == []
        advance(engine, case, range(2, 3))
        assert differences(snapshot(engine), before) != []


def test_optimizers_that_are_not_streamed_refuse(swap_dir):
    with (
        pytest.raises(OffloadConfigError, match=r'offload\.gradients is "nvme", but .* set it to "host"'),
        engine_for(Case(), swap_dir, offload=NVME, **BY_WHOLE_SUB_GROUPS),
    ):
        pass


def test_they_go_where_the_optimizer_state_goes(swap_dir):
    with (
        pytest.raises(OffloadConfigError, match=r"zero_optimization\.offload_optimizer\.device"),
        engine_for(replace(Case(), optimizer="cpu"), swap_dir, offload=NVME),
    ):
        pass
    assert offload.stats()["locked_bytes"] == 0
