"""The optimizer step against stock DeepSpeed: one run, alternating, medians and ratios.

python benchmarks/bench_step.py [--quick] [--formats fp32 split 8bit] [--settings] [--params memory nvme]
    [--rounds N] [--json FILE] [--swap FOLDER]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
MEASURES = {
    "step_seconds": "step, s",
    "waiting_seconds": "of it waiting for the drive, s",
    "backward_seconds": "backward, s",
    "backward_and_step": "backward + step, s",
    "read_per_parameter": "read, B/param",
    "written_per_parameter": "written, B/param",
    "resident_above_model": "peak resident above the model's own, MB",
    "locked": "locked, MB",
    "cpu_seconds": "CPU, s",
    "share_of_fio": "mixed bandwidth in the step, share of fio",
}


NUMEL = 48 * (2048 * 2048 + 2048)
"""Parameters of the full-size model."""


def variants(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name of each competitor, and its worker's arguments."""
    sections = {form: {"state_format": form} for form in args.formats}
    if args.settings:
        sections["fp32, 64 MiB"] = {"buffer_bytes": 64 << 20}
        sections["fp32, 8 MiB"] = {"buffer_bytes": 8 << 20}
        sections["fp32, half cached"] = {"host_cache": 6 * NUMEL}
        sections["fp32, gradients on NVMe"] = {"gradients": "nvme"}
    for section in sections.values():
        section.setdefault("gradients", "host")
    ours = {f"ours {name}": ["--ours", "--offload", json.dumps(it)] for name, it in sections.items()}
    return {"stock": [], **ours}


def run_worker(arguments: list[str], swap: Path, port: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(HERE / "step_worker.py"), *arguments, "--swap", str(swap)]
    environment = {**os.environ, "MASTER_PORT": str(port), "PYTHONPATH": str(HERE.parent)}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    if finished.returncode or not lines:
        raise SystemExit(
            f"{' '.join(command)}\nfailed with {finished.returncode}:\n{finished.stderr[-4000:]}"
        )
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def fio_mixed(swap: Path, seconds: int) -> float:
    """Bytes per second of fio's 50/50 mix, direct, io_uring, 1 MiB blocks at depth 32; 0 without fio."""
    if shutil.which("fio") is None:
        return 0.0
    target = swap / "fio.dat"
    command = ["fio", "--name=mixed", f"--filename={target}", "--size=4g", "--rw=randrw", "--rwmixread=50"]
    command += ["--bs=1m", "--iodepth=32", "--ioengine=io_uring", "--direct=1", "--output-format=json"]
    command += [f"--runtime={seconds}", "--time_based"]
    huge_pages = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # as the handle's memory
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=huge_pages).stdout
    target.unlink()
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def derived(result: dict[str, Any], params: str, fio: float) -> dict[str, float]:
    numel = result["parameters"]
    moved = result["bytes_read"] + result["bytes_written"]
    own = (4 if params == "memory" else 2) * numel  # bf16 gradients, and parameters where they live there
    return {
        "step_seconds": result["step_seconds"],
        "waiting_seconds": result["waiting_seconds"],
        "backward_seconds": result["backward_seconds"],
        "backward_and_step": result["backward_seconds"] + result["step_seconds"],
        "read_per_parameter": result["bytes_read"] / numel,
        "written_per_parameter": result["bytes_written"] / numel,
        "resident_above_model": (result["peak_resident_bytes"] - own) / 1e6,
        "locked": result["locked_bytes"] / 1e6,
        "cpu_seconds": result["cpu_seconds"],
        "share_of_fio": moved / result["step_seconds"] / fio if fio else 0.0,
    }


def measure(args: argparse.Namespace, params: str, swap: Path) -> dict[str, dict[str, float]]:
    """Median of each measure by variant, the variants taking turns."""
    rows: dict[str, list[dict[str, float]]] = {}
    size = ["--width", "2048", "--count", "12", "--steps", "3"] if args.quick else []
    for turn in range(args.rounds):
        fio = fio_mixed(swap, 3 if args.quick else 10)
        for order, (name, arguments) in enumerate(variants(args).items()):
            result = run_worker([*arguments, *size, "--params", params], swap, 29700 + order)
            rows.setdefault(name, []).append(derived(result, params, fio))
            print(f"round {turn + 1}, {name}: {rows[name][-1]['step_seconds']:.2f} s", file=sys.stderr)
    return {
        name: {measure: statistics.median(row[measure] for row in found) for measure in MEASURES}
        for name, found in rows.items()
    }


def show(title: str, medians: dict[str, dict[str, float]]) -> None:
    table = Table("measure", *medians, title=title)
    for key, label in MEASURES.items():
        stock = medians["stock"][key]
        cells = [
            f"{found[key]:.2f}" + (f"  ({found[key] / stock:.2f})" if name != "stock" and stock else "")
            for name, found in medians.items()
        ]
        table.add_row(label, *cells)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--swap", type=Path, help="folder on the drive to measure")
    formats = ["fp32", "split", "8bit"]
    parser.add_argument("--formats", nargs="+", choices=formats, help="default: all; fp32 with --quick")
    parser.add_argument("--params", nargs="+", default=["memory", "nvme"], choices=["memory", "nvme"])
    parser.add_argument("--settings", action="store_true", help="fp32 with other memory settings, too")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.params = 1, ["memory"]
    args.formats = args.formats or (["fp32"] if args.quick else formats)
    results = {}
    with tempfile.TemporaryDirectory(dir=args.swap or Path.cwd()) as folder:
        for params in args.params:
            results[params] = measure(args, params, Path(folder))
            show(f"parameters in {params}" if params == "memory" else "parameters on NVMe", results[params])
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
