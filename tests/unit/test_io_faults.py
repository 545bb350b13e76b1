"""Injected faults: every hard one is reported as an error, none of the others is ever noticed."""

import errno

import pytest
import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle
from offload.io.faults import FaultPlan

SOFT = {"short": 0.3, "eagain": 0.1, "eintr": 0.1, "delay": 0.05, "reorder": 0.4, "busy": 0.1}
REGION = 64 << 10


def noise(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def faulty(backend: str, block_size: int = 4096, **plan: object) -> tuple[AsyncIOHandle, FaultPlan]:
    faults = FaultPlan(**plan)
    return AsyncIOHandle(block_size, 32, backend=backend, faults=faults), faults


def outcome(ticket):
    """None, or the error's number."""
    try:
        assert ticket.wait() == ticket.nbytes
    except OffloadIOError as error:
        assert error.nbytes_wanted == ticket.nbytes and error.nbytes_moved < ticket.nbytes
        return error.errno
    return None


@pytest.mark.parametrize("writing", [True, False])
@pytest.mark.parametrize("soft", [{}, SOFT], ids=["alone", "among soft faults"])
def test_exactly_the_transfers_that_meet_a_hard_fault_fail(backend, tmp_path, writing, soft):
    path, data = tmp_path / "x", noise(200 * REGION)
    path.write_bytes(data.numpy().tobytes())
    handle, plan = faulty(backend, seed=7, rates={"eio": 0.05, "enospc": 0.05, **soft})
    found = data.clone() if writing else torch.zeros_like(data)
    with handle:
        start = handle.write if writing else handle.read
        tickets = [start(found[at : at + REGION], path, at) for at in range(0, data.nbytes, REGION)]
        met = {index: code for index, ticket in enumerate(tickets) if (code := outcome(ticket))}
    hit: dict[int, set[int]] = {}
    for fault in plan.hard():
        hit.setdefault(fault.offset // REGION, set()).add(fault.errno)
    assert len(hit) > 3 and met.keys() == hit.keys()
    assert all(met[index] in codes for index, codes in hit.items())
    for index in set(range(200)) - met.keys():
        assert torch.equal(found[index * REGION :][:REGION], data[index * REGION :][:REGION])


@pytest.mark.parametrize("fault, code", [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_a_fault_on_demand_hits_the_request_it_names(backend, tmp_path, fault, code):
    handle, plan = faulty(backend, scheduled=[(2, fault)])
    with handle:
        assert handle.write(torch.ones(4096, dtype=torch.uint8), tmp_path / "x").wait() == 4096
        with pytest.raises(OffloadIOError) as caught:
            handle.write(torch.ones(4096, dtype=torch.uint8), tmp_path / "x", 4096).wait()
        assert handle.write(torch.ones(4096, dtype=torch.uint8), tmp_path / "x", 4096).wait() == 4096
    assert (caught.value.errno, caught.value.offset, plan.counts()[fault]) == (code, 4096, 1)


@pytest.mark.parametrize("nbytes", [1, 2, 4095, 4096, 4097, 1_000_003])
def test_soft_faults_change_nothing(backend, tmp_path, nbytes):
    handle, plan = faulty(backend, seed=nbytes, rates=SOFT)
    data, found = noise(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    with handle:
        for _ in range(3):
            assert handle.write(data, tmp_path / "x", 3).wait() == nbytes
            assert handle.read(found.zero_(), tmp_path / "x", 3).wait() == nbytes
            assert torch.equal(found, data)
    assert handle.backend == f"fault:{backend}"
    if nbytes > 1_000_000:
        assert all(plan.counts()[name] for name in SOFT)


def test_a_kernel_that_never_stops_asking_to_try_again_is_an_error(backend, tmp_path):
    with faulty(backend, rates={"eagain": 1.0})[0] as handle, pytest.raises(OffloadIOError) as caught:
        handle.write(torch.ones(10), tmp_path / "x").wait()
    assert caught.value.errno == errno.EAGAIN


def test_a_drive_that_answers_late_delays_its_own_transfer_alone(backend, tmp_path):
    """Some tries: on a busy machine half a second may pass in the other write."""

    def overtaken():
        handle, _ = faulty(backend, scheduled=[(1, "delay")], delay_seconds=0.5)
        with handle:
            late = handle.write(torch.ones(1024), tmp_path / "late")
            with pytest.raises(TimeoutError):
                late.wait(timeout=0.01)
            handle.write(torch.ones(1024), tmp_path / "x").wait()
            before = not late.done()
            assert late.wait() == 4096
        return before

    assert any(overtaken() for _ in range(5))


def test_a_backend_that_breaks_fails_every_transfer_and_hangs_none(backend, tmp_path):
    handle, _ = faulty(backend, rates={"delay": 1.0}, scheduled=[(20, "broken")], delay_seconds=0.2)
    tickets = []
    with pytest.raises(OffloadIOError, match="fault backend"), handle:
        for index in range(40):
            tickets.append(handle.write(torch.ones(1024), tmp_path / "x", index << 12))
        handle.wait()
    assert tickets and all(ticket.done() for ticket in tickets)
    assert outcome(tickets[-1]) == errno.EIO
    assert {outcome(ticket) for ticket in tickets} <= {errno.EIO, None}  # those that came before it


def test_a_handle_destroyed_among_faults_drains(backend, tmp_path):
    handle, _ = faulty(backend, seed=3, rates=SOFT)
    data = noise(50 * REGION)
    tickets = [
        handle.write(data[at : at + REGION], tmp_path / "x", at) for at in range(0, 50 * REGION, REGION)
    ]
    handle.close()
    assert all(ticket.done() for ticket in tickets)
    assert (tmp_path / "x").read_bytes() == data.numpy().tobytes()


def test_plans_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="choose from eio"):
        FaultPlan(rates={"eoi": 0.1})
    with pytest.raises(ValueError, match="between 0 and 1"):
        FaultPlan(rates={"eio": 1.1})
    with pytest.raises(ValueError, match="numbered from 1"):
        FaultPlan(scheduled=[(0, "eio")])
