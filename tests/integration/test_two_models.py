"""Two models of one process share a swap path and do not disturb each other."""

from tests.integration.combinations import TWO_MODELS
from tests.integration.comparison import differences, is_close
from tests.integration.parity import Answers
from tests.integration.training import (
    AFTER_SAVE,
    BEFORE_SAVE,
    Run,
    advance,
    engine_for,
    resume,
    snapshot,
    stock_deepspeed,
    train,
)


def test_two_models_train_side_by_side_as_each_alone(found, swap_dir, checkpoint_dir):
    with stock_deepspeed():
        stock = train(TWO_MODELS.in_memory(), swap_dir)
    alone = train(TWO_MODELS.in_memory(), swap_dir)
    first, second = _side_by_side(swap_dir, checkpoint_dir)
    again = resume(TWO_MODELS, swap_dir, checkpoint_dir)
    assert first.losses == alone.losses
    assert differences(first.at_end, alone.at_end) == []
    assert differences(first.at_end, second.at_end) != []
    assert is_close(first, stock, TWO_MODELS.dtype)
    assert differences(first.at_save, again.at_save) + differences(first.at_end, again.at_end) == []
    found[TWO_MODELS] = Answers()


def _side_by_side(swap_dir, checkpoint_dir):
    with engine_for(TWO_MODELS, swap_dir) as first, engine_for(TWO_MODELS, swap_dir, seed=7) as second:
        losses = []
        for step in BEFORE_SAVE:
            losses += advance(first, TWO_MODELS, [step])
            advance(second, TWO_MODELS, [step])
        first.save_checkpoint(str(checkpoint_dir), tag="saved")
        at_save = snapshot(first)
        for step in AFTER_SAVE:
            advance(second, TWO_MODELS, [step])
            losses += advance(first, TWO_MODELS, [step])
        other = snapshot(second)
        return Run(losses, at_save, snapshot(first)), Run([], {}, other)


def test_a_model_outlives_the_other_on_the_same_path(swap_dir):
    alone = train(TWO_MODELS.in_memory(), swap_dir)
    with engine_for(TWO_MODELS, swap_dir) as survivor:
        losses = advance(survivor, TWO_MODELS, BEFORE_SAVE)
        with engine_for(TWO_MODELS, swap_dir, seed=7) as other:
            advance(other, TWO_MODELS, BEFORE_SAVE)
        losses += advance(survivor, TWO_MODELS, AFTER_SAVE)
        assert losses == alone.losses
        assert differences(snapshot(survivor), alone.at_end) == []
