"""Training in processes of its own, one or several joined by gloo."""

import functools
import gc
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def join(rank: int, world: int, port: int) -> None:
    """Make this process one rank of a run on the CPU, with offload enabled."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    import cpuinfo
    import deepspeed

    import offload

    offload.enable()  # before DeepSpeed joins the ranks: it would compile an operator for that
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # takes a second, for every engine
    # DeepSpeed refuses fp16 on a CPU without instructions for it; torch computes it there all the same
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    gc.freeze()  # what the imports made need not be looked through after every engine


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)` returns in each of `world` new processes with offload enabled, in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (world, free_port(), folder, function, args)
        torch.multiprocessing.spawn(_work, settings, nprocs=world)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _work(rank: int, world: int, port: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    join(rank, world, port)
    import offload

    torch.save(function(*args), Path(folder) / f"{rank}.pt")
    gc.collect()
    locked = offload.stats()["locked_bytes"]
    if locked:
        raise AssertionError(f"{locked} B are still locked at the end")
    torch.distributed.destroy_process_group()
