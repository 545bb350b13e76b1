"""Imports run one way: cli -> checkpoint, runtime -> swap -> io -> _C; DeepSpeed stays in runtime."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "offload"

MAY_IMPORT = {
    "errors": set(),
    "io": {"_C"},
    "config": {"io", "_C"},
    "swap": {"config", "io", "_C"},
    "checkpoint": {"swap", "config", "io", "_C"},
    "runtime": {"checkpoint", "swap", "config", "io", "_C"},
    "cli": {"runtime", "checkpoint", "swap", "config", "io", "_C"},
}
"""What each part may import beside itself, `errors` and the bare package; the rest of `offload` may not."""

ENTRY = {"__init__", "__main__"}
"""The doors: they may import whatever they open."""

DISTRIBUTED = {"runtime", "swap"}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    """The subpackage, or the module, that a source belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Dotted names of everything a source imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts_imported(path):
    return {name.split(".")[1] for name in imported(path) if name.startswith("offload.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_source_imports_only_what_lies_below_it(path):
    part = part_of(path)
    if part in ENTRY:
        return
    assert part in MAY_IMPORT, f"{part}: say in MAY_IMPORT what it may import"
    allowed = MAY_IMPORT[part] | {part, "errors"}
    parts = {entry.stem for entry in PACKAGE.iterdir() if not entry.name.startswith("__")} | {"_C"}
    assert (parts_imported(path) & parts) <= allowed


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_deepspeed_and_torch_distributed_stay_where_they_belong(path):
    text, part, roots = path.read_text(), part_of(path), {name.split(".")[0] for name in imported(path)}
    assert "deepspeed" not in roots or part == "runtime"
    assert "torch.distributed" not in text or part in DISTRIBUTED


def test_reading_a_config_needs_no_torch_at_import():
    for path in SOURCES:
        if part_of(path) not in ("config", "errors"):
            continue
        top = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = [alias.name for node in top for alias in node.names]
        names += [node.module or "" for node in top if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if name.split(".")[0] == "torch"], path


@pytest.mark.parametrize("path", sorted((REPOSITORY / "csrc").glob("*")), ids=lambda path: path.name)
def test_the_extension_knows_no_torch(path):
    includes = [line for line in path.read_text().splitlines() if line.lstrip().startswith("#include")]
    assert not [line for line in includes if "torch" in line or "ATen" in line or "c10" in line]


def test_the_rules_form_no_circle():
    order = []
    rest = dict(MAY_IMPORT)
    while rest:
        ready = [part for part, below in rest.items() if not (below & rest.keys())]
        if not ready:
            break
        order += ready
        for part in ready:
            del rest[part]
    assert not rest, f"{sorted(rest)} import each other"
