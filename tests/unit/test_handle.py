import os
import warnings

import pytest
import torch

from offload.errors import OffloadIOError, OffloadWarning
from offload.io import AsyncIOHandle, File, pinned

EDGES = [0, 1, 511, 513, 4095, 4096, 4097, 1_000_003, (1 << 20) - 1, (3 << 20) + 5]


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def locked(tensor: torch.Tensor) -> torch.Tensor:
    return pinned.new(tensor.numel(), tensor.dtype).copy_(tensor)


@pytest.mark.parametrize("nbytes", EDGES)
@pytest.mark.parametrize("lock", [True, False])
def test_read_returns_what_was_written(handle, tmp_path, nbytes, lock):
    path = tmp_path / "data"
    written = locked(noise(nbytes)) if lock else noise(nbytes)
    assert handle.write(written, path).wait() == nbytes
    assert path.stat().st_size == nbytes
    assert path.read_bytes() == written.numpy().tobytes()
    found = locked(torch.zeros(nbytes, dtype=torch.uint8)) if lock else torch.zeros(nbytes, dtype=torch.uint8)
    assert handle.read(found, path).wait() == nbytes
    assert torch.equal(found, written)


@pytest.mark.parametrize("intra_op_parallelism", [1, 2, 3])
@pytest.mark.parametrize("numel, dtype", [(300_001, torch.float32), (14_412_000, torch.float16)])
def test_no_length_is_refused_for_the_thread_count(backend, tmp_path, intra_op_parallelism, numel, dtype):
    path = tmp_path / "data"
    written = torch.arange(numel).to(dtype)
    with AsyncIOHandle(intra_op_parallelism=intra_op_parallelism, backend=backend) as handle:
        assert handle.sync_pwrite(written, str(path)) == 1
        assert path.stat().st_size == written.nbytes
        for found in (torch.empty_like(written), pinned.new(numel, dtype)):
            assert handle.sync_pread(found, str(path)) == 1
            assert torch.equal(found.view(torch.uint8), written.view(torch.uint8))


@pytest.mark.parametrize("offset", [1, 511, 4095, 4096, 4097, 8192, 1_000_003])
@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 70_001])
def test_any_offset_moves_exactly_its_bytes(handle, tmp_path, offset, nbytes):
    path = tmp_path / "data"
    before = noise(1_200_000, seed=1)
    path.write_bytes(before.numpy().tobytes())
    piece = noise(nbytes, seed=2)
    handle.write(piece, path, offset).wait()
    before[offset : offset + nbytes] = piece
    assert path.read_bytes() == before.numpy().tobytes()
    found = torch.zeros_like(piece)
    handle.read(found, path, offset).wait()
    assert torch.equal(found, piece)


@pytest.mark.parametrize("shift", [1, 8, 64, 512])
def test_unaligned_memory_is_taken(handle, tmp_path, shift):
    path = tmp_path / "data"
    memory = pinned.new((4 << 20) + shift)
    view = memory[shift:].copy_(noise(4 << 20))
    handle.write(view, path).wait()
    found = pinned.new((4 << 20) + shift)
    handle.read(found[shift:], path).wait()
    assert torch.equal(found[shift:], view)
    assert not found[:shift].any()


@pytest.mark.parametrize(
    "block_size, queue_depth", [(4096, 64), (65_536 + 4096, 64), (4 << 20, 1), (4 << 20, 64)]
)
def test_plain_and_locked_memory_move_both_ways_at_once(backend, tmp_path, block_size, queue_depth):
    """Only plain memory waits for the few bounce buffers, and each block gets its own."""
    nbytes = (9 << 20) + 7
    sources = [noise(nbytes, seed) for seed in range(4)]
    sources = [locked(source) if seed % 2 else source for seed, source in enumerate(sources)]
    with AsyncIOHandle(block_size, queue_depth, backend=backend) as handle:
        for seed, source in enumerate(sources):
            handle.write(source, tmp_path / f"{seed}")
        assert handle.wait() == 4
        found = [torch.zeros(nbytes + 1, dtype=torch.uint8)[1:] for _ in range(2)]
        found += [locked(torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(2)]
        for seed, (target, source) in enumerate(zip(found, sources, strict=True)):
            handle.read(target, tmp_path / f"{seed}")
            handle.write(source, tmp_path / f"copy-{seed}")
        assert handle.wait() == 8
        assert handle.stats()["bounced_bytes"] > 4 * (nbytes - 4096)
    for seed, (target, source) in enumerate(zip(found, sources, strict=True)):
        assert torch.equal(target, source)
        assert (tmp_path / f"copy-{seed}").read_bytes() == source.numpy().tobytes()


def test_neighbours_written_at_once_keep_each_other(handle, tmp_path):
    path = tmp_path / "data"
    whole = noise(1_500_000)
    pieces = torch.split(whole, 12_345)
    tickets = [handle.write(piece, path, index * 12_345) for index, piece in enumerate(pieces)]
    assert sum(ticket.wait() for ticket in tickets) == whole.nbytes
    assert path.read_bytes() == whole.numpy().tobytes()


def test_transfers_of_the_same_bytes_run_in_the_order_of_submission(handle, tmp_path):
    path = tmp_path / "data"
    first, second = noise(8 << 20, seed=1), noise(4 << 20, seed=2)
    found = torch.zeros(8 << 20, dtype=torch.uint8)
    handle.write(first, path)
    handle.write(second, path, 4097)
    handle.read(found, path)
    handle.write(torch.zeros_like(first), path)
    handle.wait()
    first[4097 : 4097 + second.numel()] = second
    assert torch.equal(found, first)
    assert not any(path.read_bytes())


def test_random_overlapping_transfers_match_a_plain_file(handle, tmp_path):
    generator = torch.Generator().manual_seed(0)
    model = noise(400_000)
    handle.write(model, tmp_path / "data").wait()
    expected = []
    for seed in range(300):
        offset, nbytes = (int(torch.randint(1, 200_000, (1,), generator=generator)) for _ in range(2))
        if seed % 3:
            piece = noise(nbytes, seed)
            handle.write(piece, tmp_path / "data", offset)
            model[offset : offset + nbytes] = piece
        else:
            found = torch.zeros(nbytes, dtype=torch.uint8)
            handle.read(found, tmp_path / "data", offset)
            expected.append((found, model[offset : offset + nbytes].clone()))
    assert handle.wait() == 300
    assert all(torch.equal(found, wanted) for found, wanted in expected)
    assert (tmp_path / "data").read_bytes() == model.numpy().tobytes()


def test_vectored_transfers_share_one_ticket(handle, tmp_path):
    tensors = [noise(nbytes, seed=nbytes) for nbytes in EDGES]
    extents = [(tensor, tmp_path / f"file{index % 2}", index << 22) for index, tensor in enumerate(tensors)]
    assert handle.writev(extents).wait() == sum(EDGES)
    found = [(torch.zeros_like(tensor), path, offset) for tensor, path, offset in extents]
    assert handle.readv(found).wait() == sum(EDGES)
    assert all(torch.equal(left, right[0]) for left, right in zip(tensors, found, strict=True))
    assert handle.readv([]).wait() == 0


def test_a_longer_file_is_not_cut(handle, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(10_000))
    handle.write(noise(100), path).wait()
    assert path.stat().st_size == 10_000


def test_offsets_beyond_4_gib(handle, tmp_path):
    path = tmp_path / "sparse"
    piece = noise(70_001)
    handle.write(piece, path, (1 << 32) + 1).wait()
    assert path.stat().st_size == (1 << 32) + 1 + 70_001
    found = torch.zeros_like(piece)
    assert handle.read(found, path, (1 << 32) + 1).wait() == 70_001
    assert torch.equal(found, piece)


def test_a_tensor_beyond_2_gib_in_blocks_beyond_what_the_kernel_moves_at_once(tmp_path):
    path = tmp_path / "sparse"
    piece = noise(4097)
    found = pinned.new((1 << 31) + 4098, lock=False)
    with AsyncIOHandle(block_size=1 << 33, queue_depth=2) as handle:
        handle.write(piece, path, (1 << 31) + 1).wait()
        assert handle.read(found, path).wait() == found.nbytes
    assert torch.equal(found[-4097:], piece)
    assert not found[:-4097:4096].any()


def test_wait_counts_since_the_last_wait(handle, tmp_path):
    assert handle.wait() == 0
    for index in range(5):
        assert handle.async_pwrite(noise(5000), str(tmp_path / f"{index}")) == 0
    assert handle.wait() == 5
    assert handle.wait() == 0
    handle.write(noise(10), tmp_path / "x").wait()
    handle.async_pread(torch.empty(10, dtype=torch.uint8), str(tmp_path / "x"))
    assert handle.wait() == 1


def test_a_sync_call_waits_for_what_is_queued_and_counts_it(handle, tmp_path):
    handle.async_pwrite(noise(5000), str(tmp_path / "a"))
    handle.async_pwrite(noise(5000), str(tmp_path / "b"))
    assert handle.sync_pwrite(noise(5000), str(tmp_path / "c")) == 3
    assert handle.pwrite(noise(9), str(tmp_path / "d"), False, False) == 1
    assert handle.pread(torch.empty(9, dtype=torch.uint8), str(tmp_path / "d"), False, True, 0) == 0
    assert handle.wait() == 1


def test_a_descriptor_stands_for_its_file(handle, tmp_path):
    path = tmp_path / "data"
    data = noise(70_001)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o400)
    handle.async_pwrite(data, descriptor, 3)
    os.close(descriptor)
    assert handle.wait() == 1
    assert path.read_bytes() == bytes(3) + data.numpy().tobytes()


def test_a_handle_lives_on_after_errors(handle, tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(4096))
    with pytest.raises(OffloadIOError) as caught:
        handle.sync_pread(torch.empty(8192, dtype=torch.uint8), str(path))
    assert (caught.value.nbytes_wanted, caught.value.nbytes_moved) == (8192, 4096)
    assert caught.value.filename == str(path)
    for call in (handle.sync_pread, handle.async_pread):
        with pytest.raises(OffloadIOError, match="No such file") as caught:
            call(torch.empty(1), str(tmp_path / "missing"))
            handle.wait()
        assert caught.value.filename == str(tmp_path / "missing")
    handle.write(noise(100), path).wait()


def test_paths_that_are_no_files_are_refused(handle, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("", "pipe"):
        with pytest.raises(OffloadIOError):
            handle.read(torch.empty(1), tmp_path / name)
        with pytest.raises(OffloadIOError):
            handle.write(torch.empty(1), tmp_path / name)
    with pytest.raises(ValueError, match="null byte"):
        handle.write(torch.empty(1), str(tmp_path) + "/a\0b")


def test_offsets_that_no_file_has_are_refused(handle, tmp_path):
    for offset in (-1, (1 << 63) - 2, 1 << 70):
        with pytest.raises(ValueError, match="offset"):
            handle.write(torch.empty(4), tmp_path / "x", offset)


def test_a_closed_handle_says_so(backend, tmp_path):
    handle = AsyncIOHandle(backend=backend)
    ticket = handle.write(noise(5000), tmp_path / "x")
    handle.close()
    handle.close()
    assert handle.closed and ticket.done() and ticket.wait() == 5000
    for call in (lambda: handle.write(noise(1), tmp_path / "y"), handle.wait, lambda: handle.readv([])):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_close_raises_what_nobody_has_met(backend, tmp_path):
    (tmp_path / "short").write_bytes(b"x")
    handle = AsyncIOHandle(backend=backend)
    handle.read(torch.empty(100), tmp_path / "short")
    with pytest.raises(OffloadIOError, match="No data"):
        handle.close()


def test_a_dropped_handle_finishes_its_writes_and_warns(backend, tmp_path):
    handle = AsyncIOHandle(backend=backend)
    handle.async_pwrite(noise(64 << 20), str(tmp_path / "x"))
    with pytest.warns(OffloadWarning, match="1 transfers in flight"):
        del handle
    assert (tmp_path / "x").stat().st_size == 64 << 20


def test_a_dropped_handle_reports_lost_failures(backend, tmp_path):
    (tmp_path / "short").write_bytes(b"x")
    handle = AsyncIOHandle(backend=backend)
    handle.read(torch.empty(100), tmp_path / "short")
    with pytest.warns(OffloadWarning, match="nobody waited for it.*No data"):
        del handle


def test_files_replaced_between_transfers_are_told_apart(handle, tmp_path):
    path, other = tmp_path / "x", tmp_path / "y"
    tickets = []
    for seed in range(20):
        tickets.append(handle.write(noise(300_000, seed), path))
        os.rename(path, other)
    handle.write(noise(300_000, 99), path)
    handle.wait()
    assert path.read_bytes() == noise(300_000, 99).numpy().tobytes()
    assert other.read_bytes() == noise(300_000, 19).numpy().tobytes()


def test_stats_count_bytes_both_ways(handle, tmp_path):
    handle.write(noise(10_000), tmp_path / "x").wait()
    handle.read(torch.empty(4097, dtype=torch.uint8), tmp_path / "x").wait()
    stats = handle.stats()
    assert (stats["bytes_written"], stats["bytes_read"], stats["failures"]) == (10_000, 4097, 0)
    assert stats["direct_bytes"] + stats["buffered_bytes"] == 14_097


def test_an_open_file_serves_many_transfers(handle, tmp_path):
    with File(tmp_path / "x", "rw", nbytes=1 << 20) as file:
        handle.write(noise(1 << 18), file, 1 << 19).wait()
        found = torch.empty(1 << 18, dtype=torch.uint8)
        ticket = handle.read(found, file, 1 << 19)
    ticket.wait()
    assert torch.equal(found, noise(1 << 18))
    with pytest.raises(ValueError, match="closed"):
        handle.read(found, file)
    with File(tmp_path / "x") as file, pytest.raises(ValueError, match="not open for writing"):
        handle.write(found, file)


def test_no_warning_in_ordinary_use(backend, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with AsyncIOHandle(backend=backend) as handle:
            handle.write(noise(5000), tmp_path / "x").wait()
            assert backend in repr(handle) and handle.backend == backend and handle.backend_reason
