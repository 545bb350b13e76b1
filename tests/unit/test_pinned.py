import gc
from pathlib import Path

import pytest
import torch

from offload.errors import OffloadMemoryError
from offload.io import AsyncIOHandle, pinned


def kernel_locked_bytes() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck")
    )
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("numel, dtype", [(1, torch.uint8), (4097, torch.float32), (3, torch.complex128)])
def test_a_locked_tensor_is_zeroed_aligned_and_of_exact_size(numel, dtype):
    tensor = pinned.new(numel, dtype)
    assert tensor.dtype == dtype and tensor.shape == (numel,) and not tensor.any()
    assert tensor.data_ptr() % 4096 == 0
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert pinned.totals() == (1, 4096 * -(-tensor.nbytes // 4096), 4096 * -(-tensor.nbytes // 4096))
    assert pinned.is_pinned(tensor) and kernel_locked_bytes() >= tensor.nbytes


def test_memory_goes_with_its_last_view():
    before = kernel_locked_bytes()
    view = pinned.new(1 << 20)[5:10].view(5)
    gc.collect()
    assert pinned.totals().allocations == 1 and view.sum() == 0
    del view
    gc.collect()
    assert pinned.totals() == (0, 0, 0) and kernel_locked_bytes() == before


def test_twenty_dropped_tensors_leave_nothing_locked():
    before = kernel_locked_bytes()
    for _ in range(20):
        with AsyncIOHandle() as handle:
            handle.new_cpu_locked_tensor(1 << 20, torch.empty(0))
    assert pinned.totals() == (0, 0, 0) and kernel_locked_bytes() == before


def test_views_count_as_pinned_only_inside_one_allocation():
    tensor = pinned.new(10_000)
    assert pinned.is_pinned(tensor[100:9000]) and pinned.is_pinned(tensor[9999:])
    assert not pinned.is_pinned(tensor[::2])
    assert not pinned.is_pinned(torch.zeros(10_000)) and not pinned.is_managed(torch.zeros(10_000))
    assert not pinned.is_pinned(torch.empty(3, device="meta"))


def test_freed_memory_is_given_back_and_old_views_are_harmless():
    before = kernel_locked_bytes()
    tensor = pinned.new(8 << 20).fill_(7)
    pinned.free(tensor)
    assert pinned.totals() == (0, 0, 0) and kernel_locked_bytes() == before
    assert not pinned.is_pinned(tensor)
    assert not tensor.any()


def test_freeing_twice_or_a_view_or_foreign_memory_is_refused():
    tensor = pinned.new(10_000)
    for view in (tensor[1:], tensor[:-1]):
        with pytest.raises(ValueError, match="view"):
            pinned.free(view)
    with pytest.raises(ValueError, match="not a locked tensor"):
        pinned.free(torch.zeros(10))
    pinned.free(tensor)
    with pytest.raises(ValueError, match="freed already"):
        pinned.free(tensor)


def test_a_handle_frees_what_another_allocated():
    with AsyncIOHandle() as one, AsyncIOHandle() as other:
        tensor = one.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.float64))
        assert other.is_pinned(tensor) and other.free_cpu_locked_tensor(tensor) is True
        assert not one.is_pinned(tensor)
        with pytest.raises(ValueError, match="freed already"):
            one.free_cpu_locked_tensor(tensor)


def test_unlocked_memory_locks_nothing():
    before = kernel_locked_bytes()
    tensor = pinned.new(4 << 20, lock=False).fill_(1)
    assert pinned.totals() == (1, 4 << 20, 0) and kernel_locked_bytes() == before
    assert pinned.is_managed(tensor) and not pinned.is_pinned(tensor) and tensor.data_ptr() % 4096 == 0


def test_sizes_at_the_edge():
    assert pinned.new(0).numel() == 0
    pinned.free(pinned.new(0))
    with pytest.raises(ValueError, match="negative"):
        pinned.new(-1)
    with pytest.raises(OffloadMemoryError, match="cannot"):
        pinned.new(1 << 60, lock=False)
    with pytest.raises(OffloadMemoryError, match="lock"):
        pinned.new(1 << 60)


def test_memory_in_a_transfer_cannot_be_freed_under_it(handle, tmp_path):
    tensor = pinned.new(64 << 20).fill_(3)
    ticket = handle.write(tensor, tmp_path / "x")
    with pytest.raises(ValueError, match="in flight"):
        pinned.free(tensor)
    ticket.wait()
    pinned.free(tensor)
    assert (tmp_path / "x").read_bytes() == b"\x03" * (64 << 20)


def test_the_lock_limit_is_an_exception_or_one_warning(child, tmp_path):
    done = child(
        """
        import os, resource, sys, warnings, torch
        from offload.errors import OffloadMemoryError, OffloadWarning
        from offload.io import AsyncIOHandle, pinned
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        handle = AsyncIOHandle()
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        for call in (lambda: handle.new_cpu_locked_tensor(64 << 20, torch.empty(0, dtype=torch.uint8)),
                     lambda: pinned.new(64 << 20)):
            try:
                call()
                sys.exit("no exception")
            except OffloadMemoryError as error:
                assert all(words in str(error) for words in ("67108864 B", "65536 B", "ulimit -l")), error
        assert pinned.totals() == (0, 0, 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tensors = [handle.new_cpu_locked_tensor(1 << 20, torch.empty(0), strict=False) for _ in range(3)]
        assert [warning.category for warning in caught] == [OffloadWarning], caught
        assert "RLIMIT_MEMLOCK is 65536 B" in str(caught[0].message)
        assert not handle.is_pinned(tensors[0]) and pinned.totals().locked_bytes == 0
        assert handle.is_pinned(pinned.new(1000))
        for tensor in tensors:
            handle.free_cpu_locked_tensor(tensor)
        with AsyncIOHandle() as own:
            print(own.backend)
        """,
    )
    assert done.returncode == 0, done.stderr


def huge_bytes(tensor):
    """How much of the mapping that holds the tensor lies in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            start, end = (int(part, 16) for part in line.split(" ")[0].split("-"))
            inside = start <= tensor.data_ptr() < end
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def test_large_allocations_lie_in_huge_pages_where_the_kernel_gives_them():
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("transparent huge pages are off")
    tensor = pinned.new((16 << 20) + 5)
    assert tensor.data_ptr() % (2 << 20) == 0
    if not huge_bytes(tensor):
        pytest.skip("the kernel had no huge page free")
    assert huge_bytes(tensor) >= 8 << 20
