"""Lion, Adagrad and SGD step chunk by chunk, in every variant, or say why they do not."""

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

from offload import stats
from offload.errors import OffloadConfigError, OffloadError
from offload.runtime import streamed_zero3
from offload.swap.encoded_optimizer_swapper import EncodedOptimizerSwapper
from offload.swap.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from offload.swap.streamed_optimizer_swapper import StreamedOptimizerSwapper
from tests.integration.comparison import differences
from tests.integration.ranks import run_ranks
from tests.integration.training import (
    AFTER_SAVE,
    Case,
    advance,
    engine_for,
    resume,
    snapshot,
    stock_deepspeed,
    train,
)

SPLIT = {"offload": {"state_format": "split"}}
every_algorithm = pytest.mark.parametrize("algorithm", ["CPU Lion", "CPU Adagrad", "torch SGD"])


def sgd(**options):
    return {"optimizer": {"type": "SGD", "params": {"lr": 0.01, **options}}}


def moved_per_weight(engine):
    groups = engine.optimizer.optimizer_swapper.swap_params_info.values()
    record = stats()["last_step"]
    assert record.bytes_read["optimizer"] == record.bytes_written["optimizer"]
    assert record.bytes_read["gradients"] == record.bytes_written["gradients"] == 0
    return record.bytes_read["optimizer"] / sum(group.numel for group in groups)


@every_algorithm
def test_a_step_moves_the_state_that_it_uses_and_no_more(algorithm, swap_dir):
    case = Case(algorithm=algorithm)
    with engine_for(case, swap_dir) as engine:
        assert type(engine.optimizer.optimizer_swapper) is StreamedOptimizerSwapper
        advance(engine, case, range(2))
        assert moved_per_weight(engine) == pytest.approx(8, rel=0.02)


@pytest.mark.parametrize(
    "options, nbytes",
    [
        ({}, 4),
        ({"momentum": 0.9}, 8),
        ({"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, 8),
        ({"momentum": 0.7, "dampening": 0.3, "foreach": True}, 8),
    ],
    ids=str,
)
def test_every_sgd_has_the_bits_of_torch(options, nbytes, swap_dir, tmp_path):
    case = Case(algorithm="torch SGD")
    with engine_for(case.in_memory(), swap_dir, **sgd(**options)) as engine:
        losses = advance(engine, case, range(4))
        expected = snapshot(engine)
    with engine_for(case, swap_dir, **sgd(**options)) as engine:
        found = advance(engine, case, range(2))
        assert moved_per_weight(engine) == pytest.approx(nbytes, rel=0.02)
        engine.save_checkpoint(str(tmp_path), tag="saved")
    with engine_for(case, swap_dir, seed=5, **sgd(**options)) as engine:
        engine.load_checkpoint(str(tmp_path), tag="saved")
        assert found + advance(engine, case, range(2, 4)) == losses
        assert differences(snapshot(engine), expected) == []


def test_groups_with_and_without_momentum_keep_what_torch_keeps(swap_dir, tmp_path):
    case = Case(params="memory", algorithm="torch SGD", feature="two parameter groups")
    runs = []
    for place in (case.in_memory(), case):
        with engine_for(place, swap_dir, **sgd(momentum=0.9, dampening=0.5)) as engine:
            groups = engine.optimizer.optimizer.param_groups
            groups[0]["momentum"] = 0.0
            advance(engine, place, range(2))
            engine.save_checkpoint(str(tmp_path), tag="saved")
        with engine_for(place, swap_dir, seed=5, **sgd(momentum=0.9, dampening=0.5)) as engine:
            engine.load_checkpoint(str(tmp_path), tag="saved")
            groups = engine.optimizer.optimizer.param_groups
            assert [group["momentum"] for group in groups] == [0.0, 0.9]
            groups[0]["momentum"] = 0.8  # its first momentum is the gradient, undamped
            runs.append((advance(engine, place, range(2, 4)), snapshot(engine)))
    assert runs[0][0] == runs[1][0]
    assert differences(runs[0][1], runs[1][1]) == []


def test_a_momentum_that_nothing_was_built_for_is_refused(swap_dir):
    case = Case(algorithm="torch SGD")
    with engine_for(case, swap_dir, **sgd()) as engine:
        engine.optimizer.optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(OffloadError, match=r"momentum became 0\.9"):
            advance(engine, case, range(1))


@every_algorithm
def test_split_state_is_exact_and_resumes(algorithm, swap_dir, tmp_path):
    case = Case(params="nvme", algorithm=algorithm)
    with engine_for(case, swap_dir) as engine:
        advance(engine, case, range(1))
        whole = snapshot(engine)
    with engine_for(case, swap_dir, **SPLIT) as engine:
        assert type(engine.optimizer.optimizer_swapper) is EncodedOptimizerSwapper
        losses = advance(engine, case, range(1))
        split = snapshot(engine)
        losses += advance(engine, case, range(1, 3))
        assert moved_per_weight(engine) == pytest.approx(6, rel=0.02)
        engine.save_checkpoint(str(tmp_path), tag="saved")
        at_save = snapshot(engine)
        losses = advance(engine, case, AFTER_SAVE)
        at_end = snapshot(engine)
    assert all(name.endswith(", model") for name in differences(whole, split))  # ties round another way
    with engine_for(case, swap_dir, seed=5, **SPLIT) as engine:
        engine.load_checkpoint(str(tmp_path), tag="saved")
        assert differences(snapshot(engine), at_save) == []
        assert advance(engine, case, AFTER_SAVE) == losses
        assert differences(snapshot(engine), at_end) == []


def shapes_in(folder):
    """Names and shapes of all state tensors, as in the file."""
    (path,) = folder.glob("saved/*optim_states.pt")
    saved = torch.load(path, weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    return {
        (key, name): value.shape
        for key, state in saved.items()
        for name, value in state.items()
        if torch.is_tensor(value)
    }


def test_a_checkpoint_of_stock_lion_loads_and_goes_back(swap_dir, tmp_path):
    """Stock's Lion makes an `exp_avg_sq` that it never uses; ours has it in checkpoints alone."""
    case = Case(algorithm="CPU Lion")
    with stock_deepspeed():
        stock = train(case.in_memory(), swap_dir, tmp_path / "stock")
    for formats in ({}, SPLIT):
        with engine_for(case, swap_dir, seed=5, **formats) as engine:
            engine.load_checkpoint(str(tmp_path / "stock"), tag="saved")
            loaded = snapshot(engine)
            engine.save_checkpoint(str(tmp_path / "ours"), tag="saved")
        assert all(name.endswith(", model") for name in differences(loaded, stock.at_save))
        assert shapes_in(tmp_path / "ours") == shapes_in(tmp_path / "stock")
    with stock_deepspeed():
        again = resume(case.in_memory(), swap_dir, tmp_path / "ours")
    assert again.losses == stock.losses[-len(AFTER_SAVE) :]
    assert differences(again.at_end, stock.at_end) == []


def test_state_that_does_not_exist_yet_is_a_key_error_wherever_it_would_live(swap_dir):
    for case in (Case(algorithm="torch SGD"), Case(algorithm="torch SGD").in_memory()):
        with engine_for(case, swap_dir) as engine, pytest.raises(KeyError, match="momentum_buffer"):
            safe_get_full_optimizer_state(engine.module.layers[0].weight, "momentum_buffer")


@pytest.mark.parametrize(
    "algorithm, options, reason",
    [
        ("torch Adam", {"torch_adam": True, "amsgrad": True}, "AdamW with amsgrad has no streamed kernel"),
        ("torch Adam", {"torch_adam": True}, "AdamW has no streamed kernel"),
        ("torch SGD", {"maximize": True}, "SGD with maximize has no streamed kernel"),
        ("torch SGD", {"fused": True}, "SGD with fused has no streamed kernel"),
    ],
)
def test_what_is_not_streamed_moves_whole_and_says_why(algorithm, options, reason, swap_dir, monkeypatch):
    case = Case(algorithm=algorithm)
    name = algorithm.removeprefix("torch ")
    section = {"optimizer": {"type": name, "params": {"lr": 0.01, **options}}}
    lines = []
    monkeypatch.setattr(streamed_zero3, "log_dist", lambda line, ranks: lines.append(line))
    with engine_for(case, swap_dir, **section) as engine:
        assert type(engine.optimizer.optimizer_swapper) is PartitionedOptimizerSwapper
        advance(engine, case, range(1))
    assert lines == [f"offload: optimizer state moves by whole sub-groups, because {reason}"]


@every_algorithm
def test_eight_bits_are_refused_for_all_but_adam(algorithm, swap_dir):
    case, section = Case(algorithm=algorithm), {"offload": {"state_format": "8bit"}}
    with (
        pytest.raises(OffloadConfigError, match=r'"8bit", but .* has no kernel for it; set it to "split"'),
        engine_for(case, swap_dir, **section),
    ):
        pass


def train_under_autocast(swap_dir, optimizer):
    """In a process of its own: DeepSpeed keeps autocast for all engines that follow."""
    case = Case(optimizer=optimizer, dtype="fp32", algorithm="torch SGD")
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    with engine_for(case, swap_dir, **autocast) as engine:
        assert engine.optimizer.torch_autocast_gradscaler is not None
        if optimizer == "nvme":
            assert type(engine.optimizer.optimizer_swapper) is PartitionedOptimizerSwapper
        return advance(engine, case, range(4)), snapshot(engine)


def test_a_grad_scaler_has_its_whole_sub_groups(swap_dir):
    (in_memory,) = run_ranks(1, train_under_autocast, swap_dir, "cpu")
    (on_nvme,) = run_ranks(1, train_under_autocast, swap_dir, "nvme")
    assert on_nvme[0] == in_memory[0]
    assert differences(on_nvme[1], in_memory[1]) == []
