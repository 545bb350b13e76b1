"""Who takes part in bench_io: our handle, stock DeepSpeed's, and fio."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from offload.io import AsyncIOHandle, File, Ticket, pinned

MOST_TENSORS = 64
POOL_BYTES = 128 << 20


@dataclass(frozen=True)
class Workload:
    """Tensors of one size that go one way, or half of them each way."""

    mode: str  # read, write, mixed
    nbytes: int
    pinned: bool

    @property
    def ntensors(self) -> int:
        return max(2, min(MOST_TENSORS, POOL_BYTES // self.nbytes))

    def tensors(self) -> list[torch.Tensor]:
        """Pinned ones share one allocation, as a pool of buffers does: so they lie in huge pages."""
        if self.pinned:
            return list(pinned.new(self.ntensors * self.nbytes, strict=False).split(self.nbytes))
        return [torch.ones(self.nbytes, dtype=torch.uint8) for _ in range(self.ntensors)]


@dataclass(frozen=True)
class Result:
    """One measurement."""

    bytes_per_second: float
    cpu_seconds_per_gb: float
    submit_us: float = 0.0


class Ours:
    """As users meet it: defaults, an open file, a ticket waited for when its tensor is needed again."""

    name = "ours"

    def __init__(self, path: Path) -> None:
        self.handle = AsyncIOHandle()
        self.file = File(path, "rw")
        self.tickets: deque[Ticket] = deque()

    def submit(self, writing: bool, tensor: torch.Tensor, path: str, offset: int) -> None:
        move = self.handle.write if writing else self.handle.read
        self.tickets.append(move(tensor, self.file, offset))

    def make_room(self, ntensors: int) -> None:
        """Until another of the tensors is free."""
        while len(self.tickets) >= ntensors:
            self.tickets.popleft().wait()

    def finish(self) -> None:
        self.make_room(1)


class Stock:
    """DeepSpeed's handle: it has no tickets, so all tensors go, then all are waited for."""

    name = "stock"

    def __init__(self, op: Any, block_size: int, queue_depth: int, parallelism: int) -> None:
        self.settings = (block_size, queue_depth, parallelism)
        self.handle = op.aio_handle(block_size, queue_depth, False, True, parallelism)
        self.npending = 0

    def submit(self, writing: bool, tensor: torch.Tensor, path: str, offset: int) -> None:
        move = self.handle.async_pwrite if writing else self.handle.async_pread
        if move(tensor, path, offset) != 0:
            raise RuntimeError("stock DeepSpeed refused a transfer")
        self.npending += 1

    def make_room(self, ntensors: int) -> None:
        if self.npending >= ntensors:
            self.finish()

    def finish(self) -> None:
        if self.npending and self.handle.wait() != self.npending:
            raise RuntimeError("stock DeepSpeed lost a transfer")
        self.npending = 0


def load_stock(may_compile: bool) -> tuple[Any, str]:
    """DeepSpeed's operator, or None and why not."""
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder
    except ImportError as error:
        return None, f"{error}: pip install deepspeed==0.19.8"
    home = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    if not may_compile and not any(home.rglob("async_io.so")):
        return None, "async_io is not compiled yet, which takes minutes: run once without --quick"
    try:
        return AsyncIOBuilder().load(verbose=False), ""
    except Exception as error:  # whatever the compiler, ninja or a missing libaio-dev make of it
        return None, f"async_io does not build (it needs libaio-dev and ninja): {error}"


def measure(who: Ours | Stock, workload: Workload, path: Path, seconds: float) -> Result:
    tensors = workload.tensors()
    places = offsets(workload, path.stat().st_size)
    submit_seconds = []
    moved = 0
    started, cpu_started = time.perf_counter(), time.process_time()
    for index in count():
        tensor = tensors[index % len(tensors)]
        who.make_room(len(tensors))
        if moved and time.perf_counter() - started >= seconds:
            break
        writing, offset = next(places)
        before = time.thread_time()  # what wakes up and takes this core meanwhile is not the caller's cost
        who.submit(writing, tensor, str(path), offset)
        submit_seconds.append(time.thread_time() - before)
        moved += workload.nbytes
    who.finish()
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    return Result(moved / elapsed, cpu / moved * 1e9, median(submit_seconds) * 1e6)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def offsets(workload: Workload, file_nbytes: int):
    """Whether to write and where: reads go through the lower half, writes through the upper one."""
    half = file_nbytes // 2
    nslots = half // workload.nbytes
    for index in count():
        writing = workload.mode == "write" or (workload.mode == "mixed" and index % 2 == 1)
        slot = (index // (2 if workload.mode == "mixed" else 1)) % nslots
        yield writing, writing * half + slot * workload.nbytes


FIO_WAYS = {"read": "read", "write": "write", "mixed": "rw"}


@dataclass(frozen=True)
class Fio:
    """One way to run fio."""

    engine: str
    block_nbytes: int
    depth: int

    def measure(self, mode: str, path: Path, seconds: float) -> Result:
        command = ["fio", "--name=x", f"--filename={path}", f"--size={path.stat().st_size}", "--direct=1"]
        command += [f"--rw={FIO_WAYS[mode]}", "--rwmixread=50", f"--bs={self.block_nbytes}"]
        command += [f"--iodepth={self.depth}", f"--ioengine={self.engine}", "--output-format=json"]
        command += [f"--runtime={round(seconds * 1000)}ms", "--time_based"]
        # In huge pages, as ours: on drives that take few segments per request fio is twice as fast that way.
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir(), env=environment
        )
        if done.returncode:
            return Result(0.0, 0.0)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        return Result(job["read"]["bw_bytes"] + job["write"]["bw_bytes"], cpu / max(moved, 1) * 1e9)


def fio_ways(quick: bool) -> list[Fio]:
    """What to try; none without fio."""
    if shutil.which("fio") is None:
        return []
    if quick:
        return [Fio("io_uring", 1 << 20, 32), Fio("libaio", 1 << 20, 32)]
    sizes, depths = [256 << 10, 1 << 20, 4 << 20], [4, 16, 64]
    return [Fio(*way) for way in product(["io_uring", "libaio"], sizes, depths)]
