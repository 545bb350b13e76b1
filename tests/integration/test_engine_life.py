"""What users do to an engine between and around its steps leaves training as it would be without NVMe."""

import gc
import os
import threading

import deepspeed
import pytest
import torch

from tests.integration.comparison import differences
from tests.integration.faults import WAYS, changed
from tests.integration.training import Case, advance, batch, config, engine_for, snapshot

ON_NVME = Case(params="nvme")
STEPS = range(4)


@pytest.fixture(params=WAYS, ids=lambda way: way.replace(" ", "-"))
def way(request):
    """Changes to the config that choose how optimizer state moves."""
    return WAYS[request.param]


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Losses and state of the training that keeps all in memory."""
    known = {}

    def of(way):
        if str(way) not in known:
            case = ON_NVME.in_memory()
            with engine_for(case, tmp_path_factory.mktemp("swap"), **way) as engine:
                known[str(way)] = advance(engine, case, STEPS), snapshot(engine)
        return known[str(way)]

    return of


def assert_as_in_memory(engine, losses, truth):
    assert losses == truth[0]
    assert differences(snapshot(engine), truth[1]) == []


def breaking(register):
    """Breaks one step of the engine with an exception from the user's own code."""

    def boom(*arguments):
        raise LookupError("boom")

    return register(boom)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_raised_in_the_users_code_is_as_if_it_had_not_been(swap_dir, way, truth, where):
    with engine_for(ON_NVME, swap_dir, **way) as engine:
        losses = advance(engine, ON_NVME, range(2))
        layer = engine.module.layers[1]
        hook = breaking(
            layer.register_forward_pre_hook if where == "forward" else layer.register_full_backward_hook
        )
        with pytest.raises(LookupError):
            advance(engine, ON_NVME, range(2, 3))
        hook.remove()
        losses += advance(engine, ON_NVME, range(2, 4))
        assert_as_in_memory(engine, losses, truth(way))


def test_persistent_parameters_on_nvme_are_those_of_the_last_step(swap_dir, way, truth):
    zero = changed(ON_NVME, swap_dir)
    zero["zero_optimization"]["stage3_param_persistence_threshold"] = 10**7
    with engine_for(ON_NVME, swap_dir, **way, **zero) as engine:
        assert_as_in_memory(engine, advance(engine, ON_NVME, STEPS), truth(way))


def test_evaluation_before_every_step_changes_nothing(swap_dir, way, truth):
    with engine_for(ON_NVME, swap_dir, **way) as engine:
        losses = []
        for step in STEPS:
            engine.eval()
            with torch.no_grad():
                engine(*batch(99, ON_NVME.width, torch.bfloat16))
            engine.train()
            losses += advance(engine, ON_NVME, range(step, step + 1))
        assert_as_in_memory(engine, losses, truth(way))


def test_training_may_run_in_a_thread_and_beside_forked_workers(swap_dir, way, truth):
    losses = []
    with engine_for(ON_NVME, swap_dir, **way) as engine:
        losses += advance(engine, ON_NVME, range(1))
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        thread = threading.Thread(target=lambda: losses.extend(advance(engine, ON_NVME, range(1, 4))))
        thread.start()
        thread.join()
        assert_as_in_memory(engine, losses, truth(way))


def test_what_is_written_into_a_gathered_parameter_stays(swap_dir, way):
    with engine_for(ON_NVME, swap_dir, **way) as engine:
        advance(engine, ON_NVME, range(1))
        weight = engine.module.layers[1].weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.fill_(0.25)
        engine.eval()
        with torch.no_grad():
            engine(*batch(0, ON_NVME.width, torch.bfloat16))
        engine.train()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            assert weight.unique().tolist() == [0.25]


def test_saved_16bit_weights_are_those_of_the_model(swap_dir, checkpoint_dir):
    zero = changed(ON_NVME, swap_dir)
    zero["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    with engine_for(ON_NVME, swap_dir, **zero) as engine:
        advance(engine, ON_NVME, range(2))
        engine.save_16bit_model(str(checkpoint_dir), "model.bin")
        state = snapshot(engine)
    saved = torch.load(checkpoint_dir / "model.bin")
    assert len(saved) == 10
    assert all(torch.equal(values, state[f"{name}, model"]) for name, values in saved.items())


def test_an_engine_may_be_destroyed_twice(swap_dir, way):
    with engine_for(ON_NVME, swap_dir, **way) as engine:
        advance(engine, ON_NVME, range(1))
        engine.destroy()
        assert list(swap_dir.iterdir()) == []


@pytest.mark.parametrize("frozen", [False, True])
def test_an_engine_without_an_optimizer_computes_and_leaves_nothing(swap_dir, frozen):
    settings = config(ON_NVME, swap_dir)
    for name in ("optimizer", "scheduler"):
        del settings[name]
    del settings["zero_optimization"]["offload_optimizer"]
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = ON_NVME.uses.build(ON_NVME.width)
    net.requires_grad_(not frozen)
    engine, *_ = deepspeed.initialize(model=net, config=settings)
    engine.eval()
    with torch.no_grad():
        losses = {engine(*batch(0, ON_NVME.width, torch.bfloat16)).item() for _ in range(2)}
    assert len(losses) == 1
    engine.destroy()
    assert list(swap_dir.iterdir()) == []


def test_modules_built_in_nested_contexts_share_one_swapper(swap_dir):
    settings = config(ON_NVME, swap_dir)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        layers = [torch.nn.Linear(768, 768)]
        with deepspeed.zero.Init(config_dict_or_path=settings):
            layers.append(torch.nn.Linear(768, 768))
        layers.append(torch.nn.Linear(768, 768))
    net = torch.nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
    for _ in range(2):
        loss = engine(torch.ones(2, 768, dtype=torch.bfloat16)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    assert len({id(param.nvme_swapper) for param in net.parameters()}) == 1
    engine.destroy()
    assert list(swap_dir.iterdir()) == []
