"""Chunks of sub-groups through a fixed ring of buffers."""

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from drive_faults import file_size_limit, interrupted_wait

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle, pinned
from offload.swap.buffers import SwapBufferManager
from offload.swap.formats import FORMATS, Column
from offload.swap.host_cache import HostCache
from offload.swap.slot import ring_shape
from offload.swap.stream import Stream
from offload.swap.sub_group import MASTER, SubGroup

COLUMNS = (Column(MASTER, torch.float32), Column("moment", torch.float32))


class Machine:
    """Sub-groups on storage, and what an unstreamed step would make of them."""

    def __init__(self, folder, numels, budget=8 << 20, cache=0):
        self.handle = AsyncIOHandle(block_size=1 << 16, queue_depth=16)
        self.manager = SwapBufferManager(budget, 1, torch.uint8, self.handle, lock=False)
        self.stream = Stream(self.handle, self.manager, COLUMNS, 2, cache=HostCache(cache, COLUMNS))
        self.groups = []
        self.expected = []
        for index, numel in enumerate(numels):
            group = SubGroup(index, torch.empty(0), numel, folder)
            values = torch.arange(numel, dtype=torch.float32) % 1000 + index
            extent = group.swapped_tensor(MASTER, torch.float32).extent
            self.handle.write(values, extent.path, 0).wait()
            self.groups.append(group)
            self.expected.append([values, torch.zeros(numel)])
        self.seen = []

    def compute(self, chunk, slot):
        self.seen.append((chunk.group.index, chunk.start, chunk.numel))
        moment = slot.view("moment")
        moment.add_(1.0)
        slot.view(MASTER).add_(moment)
        return ()

    @contextmanager
    def raising(self, group):
        """The arithmetic of one sub-group fails."""
        compute = self.compute

        def failing(chunk, slot):
            if chunk.group.index == group:
                raise LookupError
            return compute(chunk, slot)

        self.compute = failing
        try:
            yield
        finally:
            self.compute = compute

    def step(self):
        for group in self.groups:
            group.swapped_tensor("moment", torch.float32)
        self.stream.start(self.groups)
        for group, (master, moment) in zip(self.groups, self.expected, strict=True):
            self.stream.run(group, self.compute)
            moment.add_(1.0)
            master.add_(moment)

    def stored(self, index, name):
        swapped = self.groups[index].swapped[name]
        values = torch.empty(self.groups[index].numel)
        self.handle.read(values, swapped.extent.path, 0).wait()
        return values

    def close(self):
        self.stream.close()
        self.manager.close()
        self.handle.close()


@pytest.fixture
def make_machine(tmp_path):
    machines = []

    def make(numels, **settings):
        machines.append(Machine(tmp_path, numels, **settings))
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


@pytest.mark.parametrize("numels", [[1], [1023, 4096], [100_003], [300_000, 7, 1_200_001]])
def test_streamed_steps_equal_steps_in_memory(make_machine, numels):
    machine = make_machine(numels)
    for _ in range(3):
        machine.step()
    machine.stream.finish()
    for index, (master, moment) in enumerate(machine.expected):
        assert torch.equal(machine.stored(index, MASTER), master)
        assert torch.equal(machine.stored(index, "moment"), moment)


def test_every_element_is_computed_once_and_in_order(make_machine):
    machine = make_machine([1_000_001, 5])
    machine.step()
    machine.stream.finish()
    position = 0
    for index, start, numel in machine.seen[:-1]:
        assert (index, start) == (0, position)
        position += numel
    assert position == 1_000_001
    assert machine.seen[-1] == (1, 0, 5)


def test_memory_does_not_grow_with_the_sub_group(make_machine):
    machine = make_machine([4_000_000])
    machine.step()
    assert machine.manager.nbytes <= 8 << 20


def test_a_cancelled_pass_starts_again_from_what_is_stored(make_machine):
    machine = make_machine([500_000])
    machine.step()
    machine.stream.start(machine.groups)
    assert machine.stream.active
    machine.stream.cancel()
    assert not machine.stream.active
    machine.step()
    machine.stream.finish()
    assert torch.equal(machine.stored(0, MASTER), machine.expected[0][0])


def test_a_truncated_file_is_an_error_that_names_the_elements(make_machine):
    machine = make_machine([1_000_000])
    machine.step()
    machine.stream.finish()
    os.truncate(machine.groups[0].swapped["moment"].extent.path, 8192)
    with pytest.raises(OffloadIOError, match=r"elements 0 to .* of sub-group 0"):
        machine.step()
    machine.stream.cancel()


def test_a_pass_out_of_order_is_refused(make_machine):
    machine = make_machine([1000, 2000])
    machine.stream.start(machine.groups)
    with pytest.raises(ValueError, match="the pass is at"):
        machine.stream.run(machine.groups[1], machine.compute)
    assert not machine.stream.active
    machine.step()
    machine.stream.finish()
    assert torch.equal(machine.stored(1, MASTER), machine.expected[1][0])


@pytest.mark.parametrize("budget", [8 << 20, 64 << 20, 256 << 20])
@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("out_itemsize", [2, 4])
def test_the_ring_fits_its_budget_and_its_chunks_the_file_blocks(budget, name, out_itemsize):
    columns = FORMATS[name](("exp_avg", "exp_avg_sq")).columns
    chunk_numel, slots = ring_shape(budget, columns, out_itemsize)
    assert slots >= 3
    nbytes = [column.nbytes(chunk_numel) for column in columns]
    assert slots * (sum(nbytes) + chunk_numel * out_itemsize) <= budget
    assert all(column_nbytes % 4096 == 0 for column_nbytes in nbytes)


def free_slots(machine):
    """How many slots of the ring nothing uses."""
    machine.stream.cancel()
    return len(machine.stream._free)


@pytest.mark.parametrize("nth", range(1, 9))
def test_after_ctrl_c_at_any_wait_a_new_pass_begins_with_all_buffers(make_machine, monkeypatch, nth):
    machine = make_machine([300_000, 900_000])
    slots = free_slots(machine)
    machine.step()
    with interrupted_wait(monkeypatch, nth), pytest.raises(KeyboardInterrupt) as caught:
        for _ in range(9):
            machine.step()
    machine.stream.abandon(caught.value)
    assert not machine.stream.active
    before = [[machine_values(machine, index, name) for name in (MASTER, "moment")] for index in range(2)]
    machine.step()
    machine.stream.finish()
    for index, (master, moment) in enumerate(before):
        assert torch.equal(machine.stored(index, "moment"), moment + 1)
        assert torch.equal(machine.stored(index, MASTER), master + moment + 1)
    assert free_slots(machine) == slots


def machine_values(machine, index, name):
    machine.stream.cancel()
    return machine.stored(index, name)


@pytest.mark.parametrize("fault", ["write", "missing", "compute"])
def test_after_a_pass_that_failed_in_the_middle_a_new_one_begins_with_all_buffers(make_machine, fault):
    machine = make_machine([300_000, 900_000])
    slots = free_slots(machine)
    machine.step()
    machine.stream.finish()
    path = Path(machine.groups[1].swapped[MASTER].extent.path)
    with pytest.raises((OffloadIOError, LookupError)) as caught, ExitStack() as stack:
        if fault == "write":
            stack.enter_context(file_size_limit(2 << 20))
        elif fault == "missing":
            path.rename(path.with_suffix(".away"))
            stack.callback(path.with_suffix(".away").rename, path)
        else:
            stack.enter_context(machine.raising(group=1))
        machine.step()
        machine.stream.finish()
    machine.stream.abandon(caught.value)
    machine.stream.cancel()
    before = [[machine.stored(index, name) for name in (MASTER, "moment")] for index in range(2)]
    machine.step()
    machine.stream.finish()
    for index, (master, moment) in enumerate(before):
        assert torch.equal(machine.stored(index, MASTER), master + moment + 1)
    assert free_slots(machine) == slots


@pytest.mark.parametrize("cache", [1 << 20, 4 << 20, 1 << 30])
def test_cached_chunks_are_read_once_and_written_when_asked_for(make_machine, cache):
    machine = make_machine([900_000, 7, 300_001], cache=cache)
    for _ in range(3):
        machine.step()
    for group in machine.groups:
        machine.stream.flush(group)
    for index, (master, moment) in enumerate(machine.expected):
        assert torch.equal(machine.stored(index, MASTER), master)
        assert torch.equal(machine.stored(index, "moment"), moment)
    before = machine.handle.stats()
    machine.step()
    machine.stream.finish()
    moved = {key: machine.handle.stats()[key] - before[key] for key in ("bytes_read", "bytes_written")}
    whole = sum(2 * 4096 * -(-4 * numel // 4096) for numel in (900_000, 7, 300_001))
    assert (
        max(0, whole - cache) <= moved["bytes_read"] == moved["bytes_written"] <= max(0, whole - cache // 2)
    )


def test_the_cache_takes_no_more_than_it_may(make_machine):
    before = pinned.totals().allocated_bytes
    machine = make_machine([2_000_000], cache=3 << 20)
    ring = pinned.totals().allocated_bytes - before
    machine.step()
    assert 2 << 20 <= pinned.totals().allocated_bytes - before - ring <= 3 << 20


def test_what_the_cache_forgets_is_read_again(make_machine):
    machine = make_machine([500_000], cache=1 << 30)
    machine.step()
    machine.stream.flush(machine.groups[0])
    values = torch.full((500_000,), 5.0)
    machine.handle.write(values, machine.groups[0].swapped[MASTER].extent.path, 0).wait()
    machine.stream.forget(machine.groups[0])
    machine.expected[0][0].fill_(5.0)
    machine.step()
    machine.stream.flush(machine.groups[0])
    assert torch.equal(machine.stored(0, MASTER), machine.expected[0][0])


def test_a_flush_that_fails_names_the_chunk_and_the_next_one_makes_it_good(make_machine):
    machine = make_machine([600_000], cache=1 << 30)
    machine.step()
    with file_size_limit(1 << 20), pytest.raises(OffloadIOError, match="writing elements"):
        machine.stream.flush(machine.groups[0])
    machine.stream.flush(machine.groups[0])
    assert torch.equal(machine.stored(0, MASTER), machine.expected[0][0])


@pytest.mark.parametrize("cache", [0, 1 << 30])
@pytest.mark.parametrize("error", [OffloadIOError, KeyboardInterrupt])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_nothing_is_computed_on_what_could_not_be_asked_for(make_machine, monkeypatch, cache, error, nth):
    machine = make_machine([600_000, 300_000], cache=cache)
    machine.step()
    for group in machine.groups:
        machine.stream.flush(group)
        machine.stream.forget(group)
    readv, calls = machine.handle.readv, []

    def refusing(extents):
        calls.append(extents)
        if len(calls) == nth:
            raise error(24, "too many open files", "state")
        return readv(extents)

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(machine.handle, "readv", refusing)
        machine.stream.start(machine.groups)
    assert not machine.stream.active
    machine.step()
    for index, group in enumerate(machine.groups):
        machine.stream.flush(group)
        assert torch.equal(machine.stored(index, MASTER), machine.expected[index][0])
        assert torch.equal(machine.stored(index, "moment"), machine.expected[index][1])
