"""What `offload doctor` looks at. Needs neither torch nor DeepSpeed."""

import os
import platform
import resource
import tempfile
from pathlib import Path


def examine(path: str) -> tuple[bool, list[str]]:
    """Whether offload works here, and the findings line by line."""
    lines = [f"kernel: {platform.release()}"]
    try:
        from offload import _C
    except ImportError as error:
        return False, [*lines, f"extension offload._C: {error}", "build it: pip install . (needs g++)"]
    probes = _C.probe_backends()
    picked = next((name for name, usable, _ in probes if usable), "none")
    lines.append(
        f"backend picked by 'auto': {picked}, the first of {', '.join(p[0] for p in probes)} that works"
    )
    lines += [f"  {name}: {detail}" for name, _, detail in probes]
    healthy_path, findings = _path_findings(path)
    return picked != "none" and healthy_path, lines + _limits() + findings


def _limits() -> list[str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [
        "limits:",
        f"  fs.aio-nr / fs.aio-max-nr: {_kernel('fs/aio-nr')} / {_kernel('fs/aio-max-nr')}",
        f"  kernel.io_uring_disabled: {_kernel('kernel/io_uring_disabled')}",
        f"  locked memory (ulimit -l): {_bytes(soft)}, at most {_bytes(hard)}{_privilege()}",
        f"  open files (ulimit -n): {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}",
    ]


def _kernel(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError as error:
        return f"unknown ({error.strerror})"


def _bytes(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} B"


def _privilege() -> str:
    return " (root is not held to it)" if os.geteuid() == 0 else ""


def _path_findings(path: str) -> tuple[bool, list[str]]:
    """Opens the file itself, or a file of our own in the folder: only a real open tells about O_DIRECT."""
    target = Path(path)
    lines = [f"path {target}:"]
    try:
        if not target.is_dir():
            return True, lines + _direct_findings(target)
        with tempfile.NamedTemporaryFile(dir=target, prefix=".offload-doctor-") as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            return True, [*lines, *_direct_findings(Path(probe.name)), f"  free: {_free(target)} B"]
    except OSError as error:
        return False, [*lines, f"  {error}"]


def _direct_findings(path: Path) -> list[str]:
    from offload import _C

    file = _C.File(os.fsencode(path), _C.FileMode.READ, True)
    if not file.is_direct:
        return ["  O_DIRECT: refused, transfers go through the page cache and cost memory and speed"]
    return [
        "  O_DIRECT: taken",
        f"  memory alignment: {file.memory_alignment} B; others are copied through aligned buffers",
        f"  offset alignment: {file.offset_alignment} B; heads and tails go through the page cache",
    ]


def _free(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize
