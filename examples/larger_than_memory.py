"""Train a decoder that is larger than memory for a few steps, and show what that took.

    python examples/larger_than_memory.py                # 6.7 B parameters, 57 GB on the drive
    python examples/larger_than_memory.py --layers 4     # 1.1 B parameters

The model is built layer by layer, each going to the drive before the next one is made. Every step repeats one
batch, so its loss must fall, or the exit status is 1.
"""

import argparse
import json
import logging
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed picks its accelerator when it is imported

import deepspeed
from transformers import LlamaConfig, LlamaForCausalLM

import offload

HERE = Path(__file__).parent
GIB = 1 << 30

# DeepSpeed calls torch by older names
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def architecture(layers: int, hidden: int) -> LlamaConfig:
    """The shape of Llama 7B with 32 layers of 4096; `hidden` keeps its proportions."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=round(hidden * 2.6875),
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        use_cache=False,
    )


def peak_resident_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(engine: Any, steps: int, sequence_length: int) -> list[float]:
    """Steps on one batch of random tokens; each one's loss."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32000, (1, sequence_length), generator=generator).to(engine.device)
    losses = []
    for step in range(steps):
        started = time.monotonic()
        loss = engine(input_ids=tokens, labels=tokens).loss
        forward = time.monotonic()
        engine.backward(loss)
        backward = time.monotonic()
        engine.step()
        stepped = time.monotonic()
        losses.append(loss.item())
        record = offload.stats()["last_step"]
        moved = sum(record.bytes_read.values()) + sum(record.bytes_written.values())
        print(
            f"step {step + 1}: loss {losses[-1]:.4f}, forward {forward - started:.0f} s, "
            f"backward {backward - forward:.0f} s, optimizer {stepped - backward:.0f} s, "
            f"{moved / 1e9:.1f} GB moved, peak resident memory {peak_resident_nbytes() / GIB:.2f} GiB",
            flush=True,
        )
    return losses


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--config", type=Path, default=HERE / "ds_config_7b.json", help="DeepSpeed config (%(default)s)")
    add("--nvme-path", type=Path, help="swap folder, in place of the config's")
    add("--gradients", choices=("host", "nvme", "auto"), help="in place of the config's")
    add("--layers", type=int, default=32, help="default: %(default)s")
    add("--hidden", type=int, default=4096, help="width, a multiple of 128 (default: %(default)s)")
    add("--steps", type=int, default=3, help="default: %(default)s")
    add("--sequence-length", type=int, default=32, help="tokens per step (default: %(default)s)")
    return parser.parse_args()


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed config with the command line's settings put in."""
    config: dict[str, Any] = json.loads(args.config.read_text())
    for section in ("offload_param", "offload_optimizer") if args.nvme_path else ():
        config["zero_optimization"][section]["nvme_path"] = str(args.nvme_path)
    if args.gradients:
        config["offload"]["gradients"] = args.gradients
    return config


def main() -> int:
    args = parse_arguments()
    config = read_config(args)
    offload.enable()
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed()
    started = time.monotonic()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(architecture(args.layers, args.hidden))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    nparameters = sum(parameter.ds_numel for parameter in model.parameters())
    print(
        f"{nparameters:,} parameters, built in {time.monotonic() - started:.0f} s, "
        f"peak resident memory {peak_resident_nbytes() / GIB:.2f} GiB",
        flush=True,
    )
    losses = train(engine, args.steps, args.sequence_length)
    engine.destroy()
    torch.distributed.destroy_process_group()
    return 0 if losses == sorted(losses, reverse=True) else 1


if __name__ == "__main__":
    sys.exit(main())
