import asyncio
import gc
import weakref

import pytest
import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle, File
from offload.io.faults import FaultPlan


def write_some(handle, tmp_path, count, nbytes=100_000):
    data = torch.arange(nbytes, dtype=torch.uint8)
    return [handle.write(data, tmp_path / f"{index}") for index in range(count)]


def test_a_ticket_can_be_asked_again_and_again(handle, tmp_path):
    ticket = handle.write(torch.ones(10), tmp_path / "x")
    assert ticket.nbytes == 40
    assert [ticket.wait(), ticket.wait(5), ticket.wait(0)] == [40, 40, 40]
    assert ticket.done() and "done" in repr(ticket)
    failing = handle.read(torch.empty(100), tmp_path / "x")
    for _ in range(2):
        with pytest.raises(OffloadIOError):
            failing.wait()


def test_a_timeout_tells_what_is_pending_and_leaves_the_transfer_alone(backend, tmp_path):
    with AsyncIOHandle(backend=backend, faults=FaultPlan(rates={"delay": 1.0}, delay_seconds=2)) as handle:
        ticket = handle.write(torch.zeros(10_000), tmp_path / "slow")
        with pytest.raises(TimeoutError, match=r"slow: \d+ of 40000 B"):
            ticket.wait(timeout=0)
        with pytest.raises(TimeoutError):
            handle.wait(timeout=0)
        assert ticket.wait() == 40_000


def test_tickets_can_be_awaited_together(handle, tmp_path):
    async def gather():
        return await asyncio.gather(*(await_one(ticket) for ticket in write_some(handle, tmp_path, 20)))

    async def await_one(ticket):
        return await ticket

    assert asyncio.run(gather()) == [100_000] * 20


def test_an_awaited_ticket_raises_its_error(handle, tmp_path):
    (tmp_path / "short").write_bytes(b"x")

    async def read():
        return await handle.read(torch.empty(100), tmp_path / "short")

    with pytest.raises(OffloadIOError, match="No data"):
        asyncio.run(read())


def test_each_failure_is_raised_by_its_own_ticket(handle, tmp_path):
    (tmp_path / "short").write_bytes(bytes(100))
    good = write_some(handle, tmp_path, 3)
    bad = [handle.read(torch.empty(size, dtype=torch.uint8), tmp_path / "short") for size in (200, 300)]
    assert [ticket.wait() for ticket in good] == [100_000] * 3
    for ticket, wanted in zip(bad, (200, 300), strict=True):
        with pytest.raises(OffloadIOError) as caught:
            ticket.wait()
        assert (caught.value.nbytes_wanted, caught.value.nbytes_moved) == (wanted, 100)
    assert handle.wait() == 0


def test_wait_for_all_raises_the_first_failure_once_and_drains(handle, tmp_path):
    (tmp_path / "short").write_bytes(bytes(100))
    bad = handle.read(torch.empty(200, dtype=torch.uint8), tmp_path / "short")
    good = write_some(handle, tmp_path, 5)
    with pytest.raises(OffloadIOError, match="No data"):
        handle.wait()
    assert all(ticket.done() for ticket in good)
    assert handle.wait() == 0
    with pytest.raises(OffloadIOError):
        bad.wait()


def test_a_tensor_lives_until_its_ticket_is_done_and_no_longer(handle, tmp_path):
    data = torch.full((64 << 20,), 7, dtype=torch.uint8)
    storage = weakref.ref(data.untyped_storage())
    ticket = handle.write(data, tmp_path / "x")
    del data
    gc.collect()
    ticket.wait()
    assert (tmp_path / "x").read_bytes() == b"\x07" * (64 << 20)
    assert storage() is None


def test_a_parameter_may_get_another_storage_while_its_bytes_are_in_flight(handle, tmp_path):
    parameter = torch.nn.Parameter(torch.full((16 << 20,), 3.0))
    ticket = handle.write(parameter, tmp_path / "x")
    parameter.data = torch.empty(0)
    ticket.wait()
    found = torch.empty(16 << 20)
    handle.read(found, tmp_path / "x").wait()
    assert bool((found == 3).all())


def test_dropped_tickets_are_counted_and_leave_nothing(handle, tmp_path):
    for _ in range(3):
        write_some(handle, tmp_path, 50)
    assert handle.wait() == 150
    assert handle._ledger.npending() == 0


def test_ten_thousand_tickets_in_flight(handle, tmp_path):
    source = torch.arange(10_000 * 512, dtype=torch.int64).view(torch.uint8).view(10_000, 4096)
    with File(tmp_path / "x", "rw", nbytes=source.nbytes) as file:
        tickets = [handle.write(row, file, index * 4096) for index, row in enumerate(source)]
        assert sum(ticket.wait() for ticket in tickets) == source.nbytes
        found = torch.empty_like(source)
        handle.readv([(row, file, index * 4096) for index, row in enumerate(found)]).wait()
    assert torch.equal(found, source)


def test_a_ticket_outlives_its_handle(backend, tmp_path):
    with AsyncIOHandle(backend=backend) as handle:
        ticket = handle.write(torch.ones(5000), tmp_path / "x")
    del handle
    assert ticket.wait() == 20_000


def test_ten_thousand_tickets_in_flight_cost_less_than_a_kibibyte_each(child, tmp_path, backend):
    code = """
    import ctypes, os, sys, torch
    from offload.io import AsyncIOHandle, File
    from offload.io.faults import FaultPlan

    class Heap(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks "
                    "uordblks fordblks keepcost".split()]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap

    def used():
        heap = mallinfo()
        return heap.uordblks + heap.hblkhd

    data = torch.ones(4096, dtype=torch.uint8)
    late = FaultPlan(scheduled=[(request, "delay") for request in range(2, 1000)], delay_seconds=300)
    handle = AsyncIOHandle(backend=sys.argv[2], faults=late)
    with File(sys.argv[1], "rw") as file:
        handle.write(data, file).wait()
        before = used()
        tickets = [handle.write(data, file, at << 12) for at in range(10_000)]
        nbytes = used() - before
        assert not any(ticket.done() for ticket in tickets)
        print(nbytes / len(tickets))
        sys.stdout.flush()
        os._exit(0)  # they would take hours
    """
    done = child(code, str(tmp_path / "x"), backend, PYTHONMALLOC="malloc")  # so that all is counted
    assert done.returncode == 0, done.stderr
    assert 200 < float(done.stdout) < 1024, done.stdout


def test_ten_thousand_tickets_in_flight_all_end_well(handle, tmp_path):
    data = torch.arange(10_000, dtype=torch.int32).repeat_interleave(1024)
    with File(tmp_path / "x", "rw") as file:
        tickets = [handle.write(piece, file, at << 12) for at, piece in enumerate(data.split(1024))]
        assert len(tickets) == 10_000 and all(ticket.wait() == 4096 for ticket in tickets)
    assert (tmp_path / "x").read_bytes() == data.numpy().tobytes()
