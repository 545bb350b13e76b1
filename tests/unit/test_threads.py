"""No call that can block holds the GIL, and any number of threads share a handle."""

import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from offload.io import AsyncIOHandle, File, pinned


@pytest.fixture
def peer_progress():
    """Runs a call and gives how often a peer thread ran meanwhile, when nobody is made to hand over."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    stop = threading.Event()
    ticks = [0]

    def tick():
        while not stop.wait(0.0005):
            ticks[0] += 1

    peer = threading.Thread(target=tick)
    peer.start()

    def measure(call):
        time.sleep(0.002)
        start = ticks[0]
        call()
        return ticks[0] - start

    yield measure
    stop.set()
    peer.join()
    sys.setswitchinterval(before)


def test_a_peer_thread_runs_during_every_blocking_call(backend, tmp_path, peer_progress):
    """Some tries: a busy machine may let the peer run too late."""
    data = torch.zeros(192 << 20, dtype=torch.uint8)
    path = tmp_path / "x"
    handles = [AsyncIOHandle(backend=backend)]

    def write():
        handles[0].write(data, path).wait()

    def read():
        handles[0].sync_pread(data, path)

    def wait():
        handles[0].wait()

    def close():
        handles.pop().close()

    def drop():
        handles.clear()

    for call in (write, read):
        assert any(peer_progress(call) for _ in range(5))
    for ending in (wait, close, drop):

        def progress(ending=ending):
            if not handles:
                handles.append(AsyncIOHandle(backend=backend))
            handles[0].async_pwrite(data, path)
            return peer_progress(ending)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert any(progress() for _ in range(5))
        assert ("dropped" in str([warning.message for warning in caught])) == (ending is drop)
    for handle in handles:
        handle.close()


def test_a_peer_thread_runs_while_memory_is_locked_and_freed(peer_progress):
    """Many tries: huge pages are unmapped before a busy machine lets the peer run."""
    held = []

    def lock():
        held.append(pinned.new(256 << 20))

    def free():
        pinned.free(held.pop())

    def drop():
        held.pop()

    assert any(peer_progress(lock) for _ in range(10))
    for release in (free, drop):
        assert any(lock() or peer_progress(release) for _ in range(200))


def test_threads_share_a_handle_and_each_gets_its_own_result(handle, tmp_path):
    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for step in range(30):
            nbytes = int(torch.randint(1, 300_000, (1,), generator=generator))
            data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
            found = torch.zeros_like(data)
            assert handle.sync_pwrite(data, tmp_path / f"{seed}-{step}") >= 1
            assert handle.read(found, tmp_path / f"{seed}-{step}").wait() == nbytes
            assert torch.equal(found, data)
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


def test_a_wait_for_one_ticket_does_not_wait_for_another(handle, tmp_path):
    """Some tries: on a busy machine this thread may sleep until both are done."""
    small = torch.ones(4096, dtype=torch.uint8)
    (tmp_path / "small").write_bytes(bytes(4096))
    data = torch.zeros(256 << 20, dtype=torch.uint8)

    def overtakes(file):
        large = handle.write(data, tmp_path / "large")
        assert handle.read(small, file).wait() == 4096
        overtaken = not large.done()
        assert large.wait() == data.nbytes
        return overtaken

    with File(tmp_path / "small") as file:
        assert any(overtakes(file) for _ in range(5))


def test_tensors_dropped_while_their_transfers_run(handle, tmp_path):
    """A worker that needed the GIL to destroy a tensor would meet a thread that holds it and waits."""
    end = time.monotonic() + 2

    def work(seed):
        count = 0
        while time.monotonic() < end:
            tickets = [handle.write(torch.full((70_001,), seed, dtype=torch.uint8), tmp_path / f"{seed}")]
            tickets += [handle.write(pinned.new(70_001), tmp_path / f"{seed}")]
            del tickets[0]
            if count % 7 == 0:
                handle.wait()
            count += 1
        return count

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    handle.wait()


def test_close_while_others_submit(backend, tmp_path):
    handle = AsyncIOHandle(backend=backend)
    started = threading.Event()

    def work(seed):
        done = 0
        try:
            while True:
                handle.write(torch.ones(50_000), tmp_path / f"{seed}").wait()
                done += 1
                started.set()
        except ValueError as error:
            assert "closed" in str(error)
        return done

    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(work, seed) for seed in range(4)]
        started.wait(60)
        handle.close()
        assert sum(future.result(timeout=60) for future in futures) > 0


def test_a_timer_signal_every_millisecond_breaks_nothing(handle, tmp_path):
    hits = []
    previous = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        data = torch.randint(0, 256, (32 << 20,), dtype=torch.uint8)
        for _ in range(5):
            found = torch.zeros_like(data)
            assert handle.write(data, tmp_path / "x").wait() == data.nbytes
            assert handle.read(found, tmp_path / "x").wait() == data.nbytes
            assert torch.equal(found, data)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert hits


def test_a_keyboard_interrupt_ends_the_wait_and_not_the_transfer(handle, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    ticket = handle.write(torch.zeros(256 << 20, dtype=torch.uint8), tmp_path / "x")
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            ticket.wait()
            time.sleep(1)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert ticket.wait() == 256 << 20
