"""Forks, exits and handles that nobody closed: no crash, no hang, nothing lost in silence."""

PRELUDE = "import gc, os, sys, torch\nfrom offload.io import AsyncIOHandle, pinned\n"


def run(child, code, *arguments):
    return child(PRELUDE + code, *arguments)


def test_an_exit_with_transfers_in_flight_finishes_them(child, tmp_path):
    code = (
        "handles = [AsyncIOHandle(backend=name) for name in ('uring', 'libaio', 'posix')]\n"
        "data = torch.ones(64 << 20, dtype=torch.uint8)\n"
        "for handle in handles: handle.async_pwrite(data, f'{sys.argv[1]}/{handle.backend}')\n"
    )
    done = run(child, code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "transfers in flight" in done.stderr
    assert all((tmp_path / name).stat().st_size == 64 << 20 for name in ("uring", "libaio", "posix"))


def test_an_uncaught_error_still_ends_the_process_with_its_traceback(child, tmp_path):
    code = (
        "handle = AsyncIOHandle()\n"
        "handle.async_pwrite(torch.ones(64 << 20, dtype=torch.uint8), f'{sys.argv[1]}/x')\n"
        "raise RuntimeError('first error')\n"
    )
    done = run(child, code, str(tmp_path))
    assert done.returncode == 1 and "RuntimeError: first error" in done.stderr


def test_a_forked_child_is_told_and_ends_in_peace(child, tmp_path):
    code = """
from offload.errors import OffloadForkError
handles = [AsyncIOHandle(backend=name) for name in ("uring", "libaio", "posix")]
data = torch.ones(32 << 20, dtype=torch.uint8)
locked = pinned.new(1 << 20).fill_(5)
tickets = [handle.write(data, f"{sys.argv[1]}/{handle.backend}") for handle in handles]
for leave in (os._exit, sys.exit):
    pid = os.fork()
    if pid == 0:
        for handle, ticket in zip(handles, tickets):
            for call in (lambda: handle.write(data, sys.argv[1]), handle.wait, ticket.wait):
                try:
                    call()
                    os._exit(3)
                except OffloadForkError as error:
                    assert "make a new handle" in str(error)
            handle.close()
        assert pinned.totals().locked_bytes == 0 and bytes(locked.numpy()) == bytes([5]) * (1 << 20)
        del handles[:], handle, tickets[:], ticket
        gc.collect()
        with AsyncIOHandle() as own:
            own.write(data, f"{sys.argv[1]}/child").wait()
        leave(7)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
assert [ticket.wait() for ticket in tickets] == [32 << 20] * 3
for handle in handles:
    handle.close()
assert pinned.totals().locked_bytes == 1 << 20
print("done")
"""
    done = run(child, code, str(tmp_path))
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
    assert (tmp_path / "child").stat().st_size == 32 << 20


def test_a_fork_in_the_middle_of_allocations_leaves_no_lock_behind(child):
    code = """
import threading
stop = threading.Event()
def churn():
    while not stop.is_set():
        pinned.new(4096)
threads = [threading.Thread(target=churn) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        pinned.free(pinned.new(4096))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for thread in threads: thread.join()
assert pinned.totals() == (0, 0, 0)
"""
    done = run(child, code)
    assert done.returncode == 0, done.stderr
