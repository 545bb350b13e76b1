"""Two ranks swap to one path, train as in memory, and go on exactly where they saved."""

import torch

import offload
from tests.integration.combinations import TWO_RANKS
from tests.integration.comparison import assert_swapped, differences, is_close
from tests.integration.parity import Answers
from tests.integration.ranks import run_ranks
from tests.integration.training import Case, resume, stock_deepspeed, train

OTHERS = (
    Case("nvme", "nvme", "fp32", clipping=True, pipeline="both", algorithm="torch Adam", ranks=2),
    Case("nvme", "nvme", "fp16", ranks=2),
    Case("nvme", "nvme", feature="state set by user (full)", ranks=2),
    Case("nvme", "nvme", feature="state set by user (local)", ranks=2),
    Case("nvme", "nvme", clipping=True, feature="gradient set by user (local)", ranks=2),
    Case("nvme", "nvme", accumulation=4, feature="used in some micro-batches", ranks=2),
    Case("nvme", "nvme", feature="frozen parameters", ranks=2),
    Case("nvme", "nvme", accumulation=2, clipping=True, algorithm="torch SGD", ranks=2),
)


def test_two_ranks_train_and_resume_as_in_memory(found, swap_dir, checkpoint_dir):
    trained = run_ranks(2, _train_and_compare, swap_dir, checkpoint_dir)
    assert trained == [[], []]
    resumed = run_ranks(2, _resume_and_compare, swap_dir, checkpoint_dir)
    assert resumed == [[], []]
    found[TWO_RANKS] = Answers()


def test_two_ranks_train_as_in_memory_however_they_are_used(swap_dir):
    assert run_ranks(2, _compare_others, swap_dir) == [{str(case): [] for case in OTHERS}] * 2


def test_two_ranks_resume_exactly_in_every_format(swap_dir, checkpoint_dir):
    expected = {"split": [], "8bit": []}
    assert run_ranks(2, _resume_in_formats, swap_dir, checkpoint_dir) == [expected] * 2


def _resume_in_formats(swap_dir, checkpoint_dir):
    return {name: _resume_in(name, swap_dir, checkpoint_dir / name) for name in ("split", "8bit")}


def _resume_in(name, swap_dir, checkpoint_dir):
    section = {"offload": {"state_format": name}}
    run = train(TWO_RANKS, swap_dir, checkpoint_dir, **section)
    again = resume(TWO_RANKS, swap_dir, checkpoint_dir, **section)
    assert run.losses[-len(again.losses) :] == again.losses
    return differences(run.at_save, again.at_save) + differences(run.at_end, again.at_end)


def _train_and_compare(swap_dir, checkpoint_dir):
    with stock_deepspeed():
        stock = train(TWO_RANKS.in_memory(), swap_dir)
    in_memory = train(TWO_RANKS.in_memory(), swap_dir)
    written = offload.stats()["bytes_written"]
    run = train(TWO_RANKS, swap_dir, checkpoint_dir)
    assert_swapped(TWO_RANKS, written)
    assert run.losses == in_memory.losses
    assert is_close(run, stock, TWO_RANKS.dtype)
    torch.save(run, checkpoint_dir.parent / f"run{torch.distributed.get_rank()}.pt")
    return differences(run.at_end, in_memory.at_end)


def _resume_and_compare(swap_dir, checkpoint_dir):
    path = checkpoint_dir.parent / f"run{torch.distributed.get_rank()}.pt"
    run = torch.load(path, weights_only=False)
    again = resume(TWO_RANKS, swap_dir, checkpoint_dir)
    assert run.losses[-len(again.losses) :] == again.losses
    return differences(run.at_save, again.at_save) + differences(run.at_end, again.at_end)


def _compare_others(swap_dir):
    return {str(case): _compare(case, swap_dir) for case in OTHERS}


def _compare(case, swap_dir):
    run, in_memory = train(case, swap_dir), train(case.in_memory(), swap_dir)
    assert run.losses == in_memory.losses
    return differences(run.at_end, in_memory.at_end)
