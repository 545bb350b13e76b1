"""Imports run one way: cli -> checkpoint, runtime -> swap -> io -> _C; DeepSpeed stays in runtime."""

import ast
from pathlib import Path

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


def roots_imported(path):
    return {name.split(".")[0] for name in imported(path)}


def parts_imported(path):
    return {name.split(".")[1] for name in imported(path) if name.startswith("offload.")}


def test_a_source_imports_only_what_lies_below_it():
    parts = {entry.stem for entry in PACKAGE.iterdir() if not entry.name.startswith("__")} | {"_C"}
    inner = [path for path in SOURCES if part_of(path) not in ENTRY]
    unknown = {part_of(path) for path in inner} - MAY_IMPORT.keys()
    assert not unknown, "say in MAY_IMPORT what they may import"
    wrong = {}
    for path in inner:
        allowed = MAY_IMPORT[part_of(path)] | {part_of(path), "errors"}
        if beyond := (parts_imported(path) & parts) - allowed:
            wrong[str(path.relative_to(PACKAGE))] = beyond
    assert wrong == {}


def test_deepspeed_and_torch_distributed_stay_where_they_belong():
    deepspeed = {part_of(path) for path in SOURCES if "deepspeed" in roots_imported(path)}
    distributed = {part_of(path) for path in SOURCES if "torch.distributed" in path.read_text()}
    assert deepspeed <= {"runtime"}
    assert distributed <= DISTRIBUTED


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


def test_the_extension_knows_no_torch():
    lines = [line for path in (REPOSITORY / "csrc").iterdir() for line in path.read_text().splitlines()]
    includes = [line for line in lines if line.lstrip().startswith("#include")]
    assert includes
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
