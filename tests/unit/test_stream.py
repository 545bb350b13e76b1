"""Chunks of sub-groups through a fixed ring of buffers."""

import os

import pytest
import torch

from offload.errors import OffloadIOError
from offload.io import AsyncIOHandle
from offload.swap.buffers import SwapBufferManager
from offload.swap.stream import Stream, ring_shape
from offload.swap.sub_group import MASTER, SubGroup

NAMES = (MASTER, "moment")


class Machine:
    """Sub-groups on storage, and what an unstreamed step would make of them."""

    def __init__(self, folder, numels, budget=8 << 20):
        self.handle = AsyncIOHandle(block_size=1 << 16, queue_depth=16)
        self.manager = SwapBufferManager(budget, 1, torch.uint8, self.handle, lock=False)
        self.stream = Stream(self.handle, self.manager, NAMES, 4, 2)
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
        moment = slot.view("moment", torch.float32)
        moment.add_(1.0)
        slot.view(MASTER, torch.float32).add_(moment)
        return ()

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
@pytest.mark.parametrize("per_element", [10, 14, 16])
def test_the_ring_fits_its_budget(budget, per_element):
    chunk_numel, slots = ring_shape(budget, per_element)
    assert slots >= 3
    assert chunk_numel * slots * per_element <= budget
