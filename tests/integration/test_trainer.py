"""transformers.Trainer with accelerate and a JSON config full of "auto": one line makes it swap here."""

import json
import os
from pathlib import Path

import torch

import offload
from tests.integration.combinations import TRAINER
from tests.integration.comparison import assert_swapped, differences
from tests.integration.parity import Answers
from tests.integration.ranks import run_ranks
from tests.integration.training import Run, config, snapshot

STEPS = 4
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}


def test_a_trainer_script_trains_and_resumes_as_in_memory(found, swap_dir, tmp_path):
    case_file = _write_config(TRAINER, swap_dir, tmp_path / "nvme.json")
    memory_file = _write_config(TRAINER.in_memory(), swap_dir, tmp_path / "cpu.json")
    [stock] = run_ranks(1, _train, memory_file, tmp_path / "stock", False)
    [in_memory] = run_ranks(1, _train, memory_file, tmp_path / "cpu", True)
    [swapped] = run_ranks(1, _train_on_nvme, case_file, tmp_path / "nvme")
    [resumed] = run_ranks(1, _train, case_file, tmp_path / "nvme", True, 2)
    assert swapped.losses == in_memory.losses
    assert differences(swapped.at_end, in_memory.at_end) == []
    assert torch.allclose(torch.tensor(swapped.losses), torch.tensor(stock.losses), rtol=1e-5, atol=0)
    assert resumed.losses == swapped.losses
    assert differences(resumed.at_end, swapped.at_end) == []
    found[TRAINER] = Answers()


def _write_config(case, swap_dir, path):
    path.write_text(json.dumps(config(case, swap_dir, **AUTO)))
    return path


def _train_on_nvme(config_file, output_dir):
    before = offload.stats()["bytes_written"]
    history = _train(config_file, output_dir, True)
    assert_swapped(TRAINER, before)
    return history


def _train(config_file, output_dir, enabled, first_step=None):
    """A user's script; the loss and gradient norm of every step, and all state at the end."""
    if not enabled:
        offload.disable()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch` sets it
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(output_dir),
        deepspeed=str(config_file),
        max_steps=STEPS,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0 if first_step is None else 1)
    shape = {"hidden_size": 768, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 1024}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, num_attention_heads=8))
    tokens = torch.randint(1024, (16, 32), generator=torch.Generator().manual_seed(3))
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    checkpoint = None if first_step is None else str(Path(output_dir) / f"checkpoint-{first_step}")
    trainer.train(resume_from_checkpoint=checkpoint)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    at_end = snapshot(trainer.model_wrapped)
    trainer.model_wrapped.destroy()
    return Run([number for entry in logged for number in (entry["loss"], entry["grad_norm"])], {}, at_end)
