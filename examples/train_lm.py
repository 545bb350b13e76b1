"""Train a byte-level language model whose state lives on NVMe, save it, and resume it in a second process.

    python examples/train_lm.py                          # about 25 M parameters, one process
    torchrun --nproc-per-node 2 examples/train_lm.py     # the same on two ranks

After the checkpoint the run goes on for a few steps. Then a second process, built from another seed, loads it
and repeats them: losses and final state must be equal to the last bit, or the exit status is 1.
"""

import argparse
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed picks its accelerator when it is imported

import deepspeed
from corpus import Corpus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import offload

HERE = Path(__file__).parent
HEAD_DIM = 64
TAG = "last"
UNITS = {"": 1, "K": 1_000, "M": 1_000_000, "B": 1_000_000_000}

# DeepSpeed calls torch by older names, and asks for the learning rate before the schedule begins
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
logging.getLogger("DeepSpeed").addFilter(lambda record: "before it has started" not in record.getMessage())

console = Console(highlight=False)


def build_model(config: dict[str, Any], nparameters: int, seed: int) -> LlamaForCausalLM:
    """A Llama of about that many parameters, swapped out layer by layer while it is built."""
    layers = max(2, round((nparameters / (12 * HEAD_DIM**2)) ** (1 / 3)))
    heads = max(1, round((nparameters / (12 * layers)) ** 0.5 / HEAD_DIM))
    architecture = LlamaConfig(
        vocab_size=Corpus.vocabulary,
        hidden_size=heads * HEAD_DIM,
        intermediate_size=round(heads * 8 / 3) * HEAD_DIM,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=config):
        return LlamaForCausalLM(architecture)


class Board:
    """The progress bar: loss, speed, bytes moved per parameter, share of the step spent waiting for I/O."""

    def __init__(self, steps: int, nparameters: int) -> None:
        self.nparameters = nparameters
        columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=steps)

    def show(self, step: int, loss: float, ntokens: int) -> None:
        """Report one step; without a terminal, a line per ten steps takes the place of the bar."""
        record = offload.stats()["last_step"]
        moved = sum(record.bytes_read.values()) + sum(record.bytes_written.values())
        waited = sum(record.seconds_stalled.values())
        figures = (
            f"loss {loss:.3f}  {ntokens / record.seconds:,.0f} tokens/s  "
            f"{moved * dist.get_world_size() / self.nparameters:.1f} B/parameter moved  "
            f"I/O wait {waited / record.seconds:.0%}"
        )
        self.bar.update(self.task, advance=1, description=figures)
        if step % 10 == 0 and not console.is_terminal:
            console.print(f"step {step}: {figures}")


def train(engine: Any, corpus: Corpus, steps: range, board: Board) -> list[float]:
    """Run those steps; returns each one's loss, the mean over micro-batches and ranks."""
    world, accumulation = dist.get_world_size(), engine.gradient_accumulation_steps()
    losses = []
    for step in steps:
        total = torch.zeros((), device=engine.device)
        for micro in range(step * accumulation, (step + 1) * accumulation):
            tokens = corpus.batch(micro * world + dist.get_rank(), engine.train_micro_batch_size_per_gpu())
            tokens = tokens.to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / world / accumulation)
        board.show(step + 1, losses[-1], engine.train_batch_size() * corpus.sequence_length)
    return losses


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of every master weight and both its Adam moments, gathered one parameter at a time."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
        for tensor in (safe_get_full_fp32_param(parameter), *moments):
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


def first_run(engine: Any, corpus: Corpus, board: Board, args: argparse.Namespace) -> bool:
    """Train, save, go on; leave beside the checkpoint what a second process must find."""
    note = {"parameters": args.parameters, "sequence_length": args.sequence_length}
    with board.bar:
        losses = train(engine, corpus, range(args.steps), board)
        engine.save_checkpoint(args.checkpoint_path, tag=TAG)
        write_note(args, note)
        after = train(engine, corpus, range(args.steps, args.steps + args.steps_after), board)
    write_note(args, {**note, "losses": after, "fingerprint": fingerprint(engine.module)})
    console.print(f"the loss fell from {losses[0]:.3f} to {(losses + after)[-1]:.3f}")
    return True


def resumed_run(engine: Any, corpus: Corpus, board: Board, args: argparse.Namespace) -> bool:
    """Load, repeat the steps that followed the checkpoint; whether all came out as in the first process."""
    engine.load_checkpoint(args.checkpoint_path, tag=TAG)
    start = engine.global_steps
    with board.bar:
        losses = train(engine, corpus, range(start, start + args.steps_after), board)
    found = fingerprint(engine.module)
    expected = read_note(args)
    if "losses" not in expected:
        console.print("the first process was stopped before it had losses to compare with")
        return True
    table = Table("step", "first process", "resumed", "equal")
    pairs = zip(expected["losses"], losses, strict=False)  # --steps-after may differ
    rows = [(str(start + i + 1), was, now) for i, (was, now) in enumerate(pairs)]
    for name, was, now in [*rows, ("state", expected["fingerprint"], found)]:
        table.add_row(name, str(was), str(now), "yes" if was == now else "NO")
    console.print(table)
    return all(was == now for _, was, now in rows) and found == expected["fingerprint"]


def write_note(args: argparse.Namespace, note: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        (args.checkpoint_path / "run.json").write_text(json.dumps(note))
    dist.barrier()


def read_note(args: argparse.Namespace) -> dict[str, Any]:
    try:
        return json.loads((args.checkpoint_path / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--resume: no checkpoint in {args.checkpoint_path} ({error})") from None


def second_process(args: argparse.Namespace, port: int) -> int:
    """Run this script again with --resume and other initial weights; returns its exit status."""
    flags = ["--resume", f"--seed={args.seed + 1}", f"--config={args.config}"]
    flags += [f"--checkpoint-path={args.checkpoint_path}", f"--steps-after={args.steps_after}"]
    flags += [f"--nvme-path={args.nvme_path}"] if args.nvme_path else []
    environment = {**os.environ, "MASTER_PORT": str(port)}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the launcher's store is used up by this process
    return subprocess.run([sys.executable, __file__, *flags], env=environment).returncode


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--config", type=Path, default=HERE / "ds_config.json", help="DeepSpeed config (default: %(default)s)"
    )
    add("--nvme-path", type=Path, help="swap folder, in place of the config's")
    add("--checkpoint-path", type=Path, default=Path("runs/checkpoint"), help="default: %(default)s")
    add("--parameters", type=count, default="25M", help="size of the model, about (default: %(default)s)")
    add("--sequence-length", type=count, default="256", help="bytes per sample (default: %(default)s)")
    add("--steps", type=count, default="60", help="steps before the checkpoint (default: %(default)s)")
    add("--steps-after", type=count, default="10", help="steps after it, made twice (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint, with the size it was saved with")
    add("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    return parser.parse_args()


def count(text: str) -> int:
    """A whole number above 0, with K, M or B for thousands, millions, billions."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        value = round(float(number) * UNITS[unit])
    except (ValueError, OverflowError, KeyError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number above 0, as in 60 or 25M")
    return value


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed config with the swap folder of the command line put in."""
    try:
        config = json.loads(args.config.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--config {args.config}: {error}") from None
    for section in ("offload_param", "offload_optimizer") if args.nvme_path else ():
        config["zero_optimization"][section]["nvme_path"] = str(args.nvme_path)
    return config


def join_process_group() -> None:
    """Take the launcher's ranks, or be the only one."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": str(free_port())}.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed()
    console.quiet = dist.get_rank() > 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train_or_resume(args: argparse.Namespace, config: dict[str, Any], corpus: Corpus) -> bool:
    """One process's part; False when a resumed run does not repeat what the first process did."""
    model = build_model(config, args.parameters, args.seed)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    nparameters = sum(parameter.ds_numel for parameter in model.parameters())
    console.print(f"{nparameters:,} parameters, {len(corpus.tokens):,} bytes of text")
    board = Board(args.steps_after if args.resume else args.steps + args.steps_after, nparameters)
    as_before = (resumed_run if args.resume else first_run)(engine, corpus, board, args)
    engine.destroy()
    return as_before


def main() -> int:
    args = parse_arguments()
    if args.resume:
        saved = read_note(args)
        args.parameters, args.sequence_length = saved["parameters"], saved["sequence_length"]
    config, corpus = read_config(args), Corpus(args.sequence_length)
    offload.enable()  # the one line that a DeepSpeed script needs
    join_process_group()
    as_before = train_or_resume(args, config, corpus)
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    if args.resume:
        return 0 if as_before else 1
    console.print("a second process, built from another seed, resumes:")
    return second_process(args, port[0])


if __name__ == "__main__":
    sys.exit(main())
