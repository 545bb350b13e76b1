"""One training process of bench_step: builds the model, trains, prints one JSON line."""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402  the environment comes first


class Blocks(torch.nn.Module):
    """`count` square layers with residuals: as many parameters as wanted, little else."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return ((x - target) ** 2).mean()


def config(args: argparse.Namespace) -> dict[str, object]:
    swap = str(args.swap)
    zero: dict[str, object] = {
        "stage": 3,
        "sub_group_size": args.sub_group_size,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": swap,
            "pin_memory": True,
            "buffer_count": args.buffer_count,
            "pipeline_read": True,
            "pipeline_write": True,
        },
    }
    if args.params == "nvme":
        largest = args.width * args.width + args.width
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": swap,
            "pin_memory": True,
            "buffer_count": 64,  # stock stops with an error when all its buffers are lent
            "buffer_size": largest,
            "max_in_cpu": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1},
        "offload": json.loads(args.offload),
    }


def storage_bytes() -> tuple[int, int]:
    """Bytes this process made the block layer read and write."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def locked_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmLck:")[1].split()[0]) << 10


def waited_for_state() -> float:
    """Seconds that our last step waited for optimizer state, on its way in or out; 0 for stock."""
    if "offload" not in sys.modules:
        return 0.0
    record = sys.modules["offload"].stats()["last_step"]
    return float(record.seconds_stalled.get("optimizer", 0.0))


def train(engine: object, args: argparse.Namespace) -> dict[str, object]:
    rows: list[dict[str, float]] = []
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randn(1, args.width, generator=generator).to(torch.bfloat16) for _ in range(2)]
    for _ in range(args.warmup + args.steps):
        read, written = storage_bytes()
        cpu = time.process_time()
        started = time.monotonic()
        loss = engine(*batch)  # type: ignore[operator]
        forward = time.monotonic()
        engine.backward(loss)  # type: ignore[attr-defined]
        backward = time.monotonic()
        engine.step()  # type: ignore[attr-defined]
        stepped = time.monotonic()
        read_after, written_after = storage_bytes()
        rows.append(
            {
                "forward_seconds": forward - started,
                "backward_seconds": backward - forward,
                "step_seconds": stepped - backward,
                "waiting_seconds": waited_for_state(),
                "bytes_read": read_after - read,
                "bytes_written": written_after - written,
                "cpu_seconds": time.process_time() - cpu,
            }
        )
    measured = rows[args.warmup :]
    medians = {name: statistics.median(row[name] for row in measured) for name in measured[0]}
    return {**medians, "loss": float(loss.detach())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--params", choices=["memory", "nvme"], default="memory")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--sub-group-size", type=int, default=50_000_000)
    parser.add_argument("--buffer-count", type=int, default=12)
    parser.add_argument("--offload", default="{}", help="the config's `offload` section")
    parser.add_argument("--swap", type=Path, required=True)
    args = parser.parse_args()
    if args.ours:
        import offload

        offload.enable()
    import deepspeed

    torch.manual_seed(0)
    settings = config(args)
    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
        model = Blocks(args.width, args.count)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    result = train(engine, args)
    numel = sum(p.ds_numel for p in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    result |= {"parameters": numel, "peak_resident_bytes": peak, "locked_bytes": locked_bytes()}
    sys.stdout.write("\nRESULT " + json.dumps(result) + "\n")
    engine.destroy()


if __name__ == "__main__":
    main()
