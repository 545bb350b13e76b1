"""Training is the same wherever state lives, and goes on exactly where it was saved."""

from functools import lru_cache

import pytest

import offload
from tests.integration.combinations import STOCK_DIFFERS, combinations
from tests.integration.comparison import assert_swapped, differences, is_close
from tests.integration.parity import YES, Answers
from tests.integration.training import Case, resume, stock_deepspeed, train


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Runs with nothing on NVMe, ours and stock; cases that share one follow each other."""

    @lru_cache(maxsize=1)
    def run(case: Case):
        assert case == case.in_memory()
        folder = tmp_path_factory.mktemp("reference")
        with stock_deepspeed():
            stock = train(case, folder)
        return train(case, folder), stock

    return lambda case: run(case.in_memory())


@pytest.mark.parametrize("case", list(combinations()), ids=str)
def test_training_is_the_same_wherever_state_lives(case, reference, found, swap_dir, checkpoint_dir):
    ours_in_memory, stock = reference(case)
    written = offload.stats()["bytes_written"]
    run = train(case, swap_dir, checkpoint_dir)
    assert_swapped(case, written)
    again = resume(case, swap_dir, checkpoint_dir)
    resumed_wrongly = differences(run.at_save, again.at_save) + differences(run.at_end, again.at_end)
    expected = Answers(as_stock=STOCK_DIFFERS.get(case.feature, YES))
    assert run.losses == ours_in_memory.losses
    assert differences(run.at_end, ours_in_memory.at_end) == []
    assert run.losses[-len(again.losses) :] == again.losses
    assert resumed_wrongly == []
    assert is_close(run, stock, case.dtype) == (expected.as_stock == YES)
    if case.dtype == "fp16":
        _, skipped = run.at_end["steps"]
        assert 0 < skipped < 6
    found[case] = expected
