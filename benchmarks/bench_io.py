"""The handle against stock DeepSpeed's and fio: one run, taking turns, medians and ratios.

python benchmarks/bench_io.py [--quick] [--json FILE] [--folder FOLDER]

Ours runs with its defaults. Stock and fio are tuned first, each for every direction, and run at their best
(--quick tries one setting of stock and two of fio).
"""

import argparse
import datetime
import json
import logging
import os
import platform
import shlex
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from io_contestants import Fio, Ours, Result, Stock, Workload, fio_ways, load_stock, measure, median
from rich.console import Console
from rich.table import Table

MODES = ("read", "write", "mixed")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "64 MiB": 64 * MIB, "1 GiB": GIB}
STOCK_SETTINGS = [(block, 64, threads) for block, threads in product((MIB, 8 * MIB), (1, 2, 4, 8))]


@dataclass(frozen=True)
class Scale:
    """How much to measure."""

    workloads: list[Workload]
    stock_settings: list[tuple[int, int, int]]
    file_nbytes: int
    seconds: float
    rounds: int


def full_scale(rounds: int) -> Scale:
    workloads = [
        Workload(mode, nbytes, lock) for mode in MODES for nbytes in SIZES.values() for lock in (1, 0)
    ]
    return Scale(workloads, STOCK_SETTINGS, 4 * GIB, 2.0, rounds)


def quick_scale() -> Scale:
    shapes = [(MIB, True), (64 * MIB, True), (64 * MIB, False)]
    workloads = [Workload(mode, nbytes, lock) for mode in MODES for nbytes, lock in shapes]
    return Scale(workloads, [(MIB, 64, 1)], GIB // 2, 0.2, 2)


def fill(path: Path, nbytes: int) -> None:
    """Written, not only reserved: reads of what was never written touch no device."""
    piece = os.urandom(16 * MIB)
    with open(path, "wb") as file:
        for _ in range(nbytes // len(piece)):
            file.write(piece)
        os.fsync(file.fileno())


def tuned_stock(op: Any, scale: Scale, path: Path) -> dict[str, Stock]:
    """The best of stock's settings for each direction."""
    if len(scale.stock_settings) == 1:
        return dict.fromkeys(MODES, Stock(op, *scale.stock_settings[0]))
    best: dict[str, tuple[float, Stock]] = {}
    for settings, mode in product(scale.stock_settings, MODES):
        stock = Stock(op, *settings)
        speed = measure(stock, Workload(mode, 64 * MIB, True), path, scale.seconds).bytes_per_second
        if mode not in best or speed > best[mode][0]:
            best[mode] = (speed, stock)
    return {mode: stock for mode, (_, stock) in best.items()}


def tuned_fio(ways: list[Fio], scale: Scale, path: Path) -> dict[str, Fio]:
    if not ways:
        return {}
    return {
        mode: max(ways, key=lambda way: way.measure(mode, path, scale.seconds).bytes_per_second)
        for mode in MODES
    }


def medians(results: list[Result]) -> dict[str, float]:
    return {key: median([asdict(result)[key] for result in results]) for key in asdict(results[0])}


def compete(scale: Scale, path: Path, stocks: dict[str, Stock], fios: dict[str, Fio]) -> list[dict[str, Any]]:
    """For each workload, the medians of everybody; they take turns within every round."""
    ours = Ours(path)
    found: dict[Workload, dict[str, list[Result]]] = {workload: {} for workload in scale.workloads}
    for turn in range(scale.rounds):
        for workload, results in found.items():
            results.setdefault("ours", []).append(measure(ours, workload, path, scale.seconds))
            if stocks:
                stock = measure(stocks[workload.mode], workload, path, scale.seconds)
                results.setdefault("stock", []).append(stock)
        for mode, fio in fios.items():
            result = fio.measure(mode, path, scale.seconds)
            for workload, results in found.items():
                if workload.mode == mode:
                    results.setdefault("fio", []).append(result)
        print(f"round {turn + 1} of {scale.rounds}", file=sys.stderr)
    return [
        {**asdict(workload), **{name: medians(runs) for name, runs in results.items()}}
        for workload, results in found.items()
    ]


def ratio(row: dict[str, Any], other: str, key: str = "bytes_per_second") -> str:
    if other not in row or not row[other][key]:
        return "-"
    return f"{row['ours'][key] / row[other][key]:.2f}"


def figure(row: dict[str, Any], name: str, key: str, scale: float = 1, digits: int = 0) -> str:
    return f"{row[name][key] / scale:.{digits}f}" if name in row else "-"


def show(rows: list[dict[str, Any]]) -> None:
    speed, cpu, submit = "bytes_per_second", "cpu_seconds_per_gb", "submit_us"
    table = Table(title="MB/s; CPU seconds per GB; the caller's CPU µs to submit one ticket")
    for column in ("", "tensor", "memory"):
        table.add_column(column)
    columns = [
        "ours",
        "stock",
        "fio",
        "/stock",
        "/fio",
        "CPU ours",
        "stock",
        "fio",
        "/fio",
        "µs ours",
        "stock",
    ]
    for column in columns:
        table.add_column(column, justify="right")
    names = {nbytes: name for name, nbytes in SIZES.items()}
    for row in rows:
        table.add_row(
            row["mode"],
            names[row["nbytes"]],
            "pinned" if row["pinned"] else "plain",
            *(figure(row, name, speed, 1e6) for name in ("ours", "stock", "fio")),
            ratio(row, "stock"),
            ratio(row, "fio"),
            *(figure(row, name, cpu, 1, 2) for name in ("ours", "stock", "fio")),
            ratio(row, "fio", cpu),
            *(figure(row, name, submit, 1, 1) for name in ("ours", "stock")),
        )
    Console(width=140).print(table)


def facts(scale: Scale, stocks: dict[str, Stock], fios: dict[str, Fio]) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(sys.argv),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "file_nbytes": scale.file_nbytes,
        "seconds": scale.seconds,
        "rounds": scale.rounds,
        "stock": {mode: stock.settings for mode, stock in stocks.items()},
        "fio": {mode: asdict(fio) for mode, fio in fios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, settings and repeats: under 40 s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="folder on the drive to measure (here)")
    args = parser.parse_args()
    scale = quick_scale() if args.quick else full_scale(args.rounds)
    started = time.monotonic()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    op, why_not = load_stock(may_compile=not args.quick)
    ways = fio_ways(args.quick)
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd()) as folder:
        path = Path(folder) / "data"
        fill(path, scale.file_nbytes)
        stocks = tuned_stock(op, scale, path) if op else {}
        fios = tuned_fio(ways, scale, path)
        rows = compete(scale, path, stocks, fios)
    show(rows)
    known = facts(scale, stocks, fios)
    if not stocks:
        print(f"no stock column: {why_not}")
    if not fios:
        print("no fio column: fio is not installed")
    print(f"{time.monotonic() - started:.0f} s; stock at {known['stock']}; fio at {known['fio']}")
    if args.json:
        args.json.write_text(json.dumps({**known, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
