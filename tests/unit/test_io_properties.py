"""Whatever is asked for in whatever order, on whatever backend, among soft faults: a plain file's content.

`make stress` runs these with thousands of cases.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.io import AsyncIOHandle, File
from offload.io.digests import DIGESTS
from offload.io.faults import FaultPlan

PAGE = 4096
EDGES = [0, 1, 511, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 65_535, 65_537]
REGION = 150_000  # no multiple of a page, so that neighbours share one
SHAPES = st.one_of(st.sampled_from(EDGES), st.integers(0, 70_000))


@dataclass(frozen=True)
class Operation:
    """One ticket: its extents, as offsets and sizes inside the region of its thread."""

    writing: bool
    extents: list[tuple[int, int]]
    shift: int  # of the memory, in bytes past an aligned address
    seed: int


@st.composite
def operations(draw):
    extents = draw(st.lists(st.tuples(SHAPES, SHAPES), min_size=1, max_size=4))
    if not draw(st.booleans()):
        extents = extents[:1]
    return Operation(
        draw(st.booleans()),
        extents,
        draw(st.sampled_from([0, 0, 1, 512])),
        draw(st.integers(0, 1 << 30)),
    )


@st.composite
def fault_plans(draw):
    names = ["short", "eagain", "eintr", "delay", "reorder", "busy"]
    rates = {name: draw(st.sampled_from([0.0, 0.1, 0.5])) for name in names}
    return draw(st.sampled_from([None, (draw(st.integers(0, 1 << 30)), rates)]))


def memory(nbytes, shift):
    return torch.zeros(nbytes + shift, dtype=torch.uint8)[shift:]


def apply(handle, file, start, operation, model):
    """Submits the operation, does the same to the model, and gives what its tensors must hold at the end."""
    generator = torch.Generator().manual_seed(operation.seed)
    parts, expected = [], []
    disjoint_end = 0
    for offset, nbytes in sorted(operation.extents):
        offset = max(offset, disjoint_end)  # what one ticket's extents do to each other has no order
        nbytes = max(0, min(nbytes, REGION - offset))
        disjoint_end = offset + nbytes
        tensor = memory(nbytes, operation.shift)
        if operation.writing:
            tensor.random_(0, 256, generator=generator)
            model[offset : offset + nbytes] = tensor
        parts.append((tensor, file, start + offset))
        expected.append((tensor, tensor.clone() if operation.writing else model[offset:][:nbytes].clone()))
    move = handle.writev if operation.writing else handle.readv
    return move(parts), expected


def work(handle, file, start, script, model):
    pending = [apply(handle, file, start, operation, model) for operation in script]
    for ticket, expected in pending:
        assert ticket.wait() == sum(wanted.numel() for _, wanted in expected)
        assert all(torch.equal(found, wanted) for found, wanted in expected)


@dataclass(frozen=True)
class Case:
    """A script for each thread, and the handle that they share."""

    scripts: list[list[Operation]]
    faults: tuple[int, dict[str, float]] | None
    block_size: int
    queue_depth: int
    checksums: bool


CASES = st.builds(
    Case,
    scripts=st.lists(st.lists(operations(), max_size=8), min_size=1, max_size=3),
    faults=fault_plans(),
    block_size=st.sampled_from([PAGE, 3 * PAGE, 1 << 20]),
    queue_depth=st.sampled_from([1, 2, 64]),
    checksums=st.booleans(),
)
KEPT = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
any_file = pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])


def check(backend, direct, path, case):
    content = torch.randint(0, 256, (REGION * len(case.scripts),), dtype=torch.uint8)
    path.write_bytes(content.numpy().tobytes())
    DIGESTS.forget(str(path))
    models = content.split(REGION)
    plan = None if case.faults is None else FaultPlan(*case.faults, delay_seconds=0.0002)
    with (
        AsyncIOHandle(
            case.block_size, case.queue_depth, backend=backend, checksums=case.checksums, faults=plan
        ) as handle,
        File(path, "rw", direct=direct) as file,
        ThreadPoolExecutor(len(models)) as threads,
    ):
        jobs = [
            threads.submit(work, handle, file, index * REGION, script, models[index])
            for index, script in enumerate(case.scripts)
        ]
        for job in jobs:
            job.result(timeout=60)
    assert path.read_bytes() == content.numpy().tobytes()


@any_file
@settings(KEPT, max_examples=40)
@given(case=CASES)
def test_any_script_leaves_what_a_plain_file_would(backend, direct, tmp_path, case):
    check(backend, direct, tmp_path / "x", case)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@any_file
@settings(KEPT, max_examples=2000)
@given(case=CASES)
def test_thousands_of_scripts_leave_what_a_plain_file_would(backend, direct, tmp_path, case):
    check(backend, direct, tmp_path / "x", case)
