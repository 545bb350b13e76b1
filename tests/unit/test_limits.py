"""Settings that make no sense are refused; limits of the system cost speed and a warning, never data."""

import contextlib
import ctypes

import pytest
import torch

from offload.errors import OffloadWarning
from offload.io import AsyncIOHandle

REFUSE = """
import ctypes, errno, struct, sys, warnings

def refuse(*numbers):
    '''A seccomp filter that answers these system calls with EPERM, as container profiles do.'''
    code = [(0x20, 0, 0, 0)]
    for left, number in zip(range(len(numbers), 0, -1), numbers):
        code.append((0x15, left, 0, number))
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.EPERM)]
    packed = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(packed)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()

URING, AIO = (425, 426, 427), (206,)
"""


def check_moves_whole(handle, path):
    data = torch.randint(0, 256, (5_000_003,), dtype=torch.uint8)
    found = torch.zeros_like(data)
    assert handle.write(data, path).wait() == data.nbytes
    assert handle.read(found, path).wait() == data.nbytes
    assert torch.equal(found, data)


@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism"])
@pytest.mark.parametrize("value", [0, -1, -(1 << 40)])
def test_settings_below_one_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not {value}"):
        AsyncIOHandle(**{name: value})


@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism"])
@pytest.mark.parametrize("value", [1.5, "8", None, True])
def test_settings_that_are_no_integers_are_refused(name, value):
    with pytest.raises(TypeError, match=name):
        AsyncIOHandle(**{name: value})


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="choose auto, uring, libaio or posix"):
        AsyncIOHandle(backend="io_ring")


@pytest.mark.parametrize("block_size, rounded", [(1, 4096), (1000, 4096), (4097, 8192), (1 << 62, 1 << 40)])
def test_an_odd_block_size_is_rounded_with_one_warning(backend, tmp_path, block_size, rounded):
    with pytest.warns(OffloadWarning, match=f"block_size {block_size} .*{rounded}") as caught:
        handle = AsyncIOHandle(block_size=block_size, backend=backend)
    with handle:
        check_moves_whole(handle, tmp_path / "x")
        assert handle.get_block_size() == rounded
    assert len(caught) == 1


@pytest.mark.parametrize("name, limit", [("uring", "io_uring takes 32768"), ("libaio", "aio-max-nr is")])
def test_a_depth_beyond_the_kernels_limit_is_lowered_with_one_warning(tmp_path, name, limit):
    with pytest.warns(OffloadWarning, match=f"queue_depth 1000000 lowered to .*{limit}") as caught:
        handle = AsyncIOHandle(queue_depth=1_000_000, backend=name)
    with handle:
        check_moves_whole(handle, tmp_path / "x")
        assert 1 <= handle.get_queue_depth() < 1_000_000
    assert len(caught) == 1


@pytest.mark.parametrize("queue_depth", [1, 2, 100_000])
def test_any_depth_moves_whole(backend, tmp_path, queue_depth):
    lowered = queue_depth > 65536 and backend != "posix"
    with pytest.warns(OffloadWarning, match="lowered") if lowered else contextlib.nullcontext():
        handle = AsyncIOHandle(queue_depth=queue_depth, backend=backend)
    with handle:
        check_moves_whole(handle, tmp_path / "x")


def test_exhausted_aio_events_are_named_or_lower_the_depth(tmp_path):
    libc = ctypes.CDLL(None, use_errno=True)
    contexts = []
    for size in (16384, 4096, 512, 64, 8, 1):
        while True:
            context = ctypes.c_ulong(0)
            if libc.syscall(206, size, ctypes.byref(context)) != 0:
                break
            contexts.append(context)
    try:
        with pytest.raises(OSError, match="io_setup") as caught:
            AsyncIOHandle(backend="libaio")
        assert "fs.aio-max-nr" in str(caught.value)
    finally:
        for context in contexts:
            libc.syscall(207, context)
    with AsyncIOHandle(backend="libaio") as handle:
        check_moves_whole(handle, tmp_path / "x")


def test_a_refused_io_uring_falls_back_and_says_why(child, tmp_path):
    done = child(
        REFUSE
        + """
import torch
from offload.io import AsyncIOHandle
warnings.simplefilter("error")
data = torch.arange(1_000_003)
for refused, expected in ((URING, "libaio"), (AIO, "posix")):
    refuse(*refused)
    with AsyncIOHandle() as handle:
        assert handle.backend == expected, (handle.backend, handle.backend_reason)
        print(handle.backend_reason)
        found = torch.zeros_like(data)
        handle.write(data, sys.argv[1]).wait()
        handle.read(found, sys.argv[1]).wait()
        assert torch.equal(found, data)
try:
    AsyncIOHandle(backend="uring")
except OSError as error:
    print(error)
""",
        str(tmp_path / "x"),
    )
    assert done.returncode == 0, done.stderr
    first, second, explicit = done.stdout.splitlines()
    assert "uring refused" in first and "Operation not permitted" in first and "seccomp" in first
    assert "libaio refused" in second and "posix is the first that works" in second
    assert "Operation not permitted" in explicit
