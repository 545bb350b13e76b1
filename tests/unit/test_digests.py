"""With checksums a byte that changed on the drive is an error of the read, and nothing else is."""

import errno
import pickle
import threading
from dataclasses import dataclass

import pytest
import torch
from drive_faults import flip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import offload
from offload.errors import OffloadIntegrityError, OffloadIOError
from offload.io import AsyncIOHandle, digests
from offload.io.digests import DIGESTS, SEGMENT_NBYTES, Digests
from offload.io.faults import FaultPlan

MIB = 1 << 20
REGION = 60_000
SMALL_SEGMENT = 4096


@pytest.fixture
def handle(backend):
    with AsyncIOHandle(backend=backend, checksums=True) as handle:
        yield handle


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(digests, "SEGMENT_NBYTES", SMALL_SEGMENT)


def some(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def counts():
    return DIGESTS.bytes_checked, DIGESTS.bytes_unchecked


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 5 * MIB + 7])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_changed_byte_is_an_error_that_names_the_place(handle, tmp_path, nbytes, place):
    data, found, path = some(nbytes), torch.empty(nbytes, dtype=torch.uint8), tmp_path / "x"
    handle.write(data, path, 100).wait()
    handle.read(found, path, 100).wait()
    assert torch.equal(found, data)
    position = 0 if place == "first" else nbytes - 1
    flip(path, 100 + position)
    with pytest.raises(OffloadIntegrityError) as caught:
        handle.read(found, path, 100).wait()
    error = caught.value
    assert (error.errno, error.filename) == (errno.EIO, str(path))
    assert error.offset <= 100 + position < error.offset + error.nbytes_wanted
    assert error.nbytes_wanted <= SEGMENT_NBYTES
    for part in (
        f"offset {error.offset}",
        f"{error.expected:016x}",
        f"{error.found:016x}",
        "last checkpoint",
    ):
        assert part in str(error)
    handle.write(data, path, 100).wait()
    handle.read(found, path, 100).wait()


def test_the_error_survives_renaming_and_pickling(handle, tmp_path):
    handle.write(some(100), tmp_path / "x").wait()
    flip(tmp_path / "x", 0)
    with pytest.raises(OffloadIntegrityError) as caught:
        handle.read(torch.empty(100, dtype=torch.uint8), tmp_path / "x").wait()
    copy = pickle.loads(pickle.dumps(caught.value.during("reading y")))
    assert type(copy) is OffloadIntegrityError and str(copy).startswith(
        "[Errno 5] reading y: 100 B at offset 0"
    )
    assert vars(copy) == vars(caught.value)


SPANS = st.tuples(st.integers(0, REGION - 1), st.integers(1, 20_000)).map(
    lambda span: (span[0], min(span[1], REGION - span[0]))
)


@dataclass(frozen=True)
class Script:
    """Writes, then one changed byte, then reads."""

    writes: list[tuple[int, int]]
    position: int
    reads: list[tuple[int, int]]


SCRIPTS = st.builds(
    Script, st.lists(SPANS, min_size=1, max_size=8), st.integers(0, REGION - 1), st.lists(SPANS, max_size=5)
)


def surviving(writes):
    """What the file's digests cover, the plain way: a write drops every segment that it touches."""
    segments = []
    for offset, nbytes in writes:
        end = offset + nbytes
        segments = [part for part in segments if part[1] <= offset or part[0] >= end]
        starts = [p for p in range(offset, end) if p % SMALL_SEGMENT in (0, offset % SMALL_SEGMENT)]
        segments += zip(starts, [*starts[1:], end], strict=True)
    return segments


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(script=SCRIPTS)
def test_a_changed_byte_is_found_by_just_the_reads_that_cover_its_segment(
    handle, tmp_path, small_segments, script
):
    path = tmp_path / "x"
    path.write_bytes(bytes(REGION))
    DIGESTS.forget(str(path))
    tickets = [
        handle.write(some(nbytes, seed), path, offset) for seed, (offset, nbytes) in enumerate(script.writes)
    ]
    for ticket in tickets:
        ticket.wait()
    segments = surviving(script.writes)
    checked, unchecked = counts()
    handle.read(torch.empty(REGION, dtype=torch.uint8), path).wait()
    covered = sum(end - start for start, end in segments)
    assert counts() == (checked + covered, unchecked + REGION - covered)
    flip(path, script.position)
    for offset, nbytes in [(0, REGION), *script.reads]:
        bad = [
            (start, end)
            for start, end in segments
            if offset <= start <= script.position < end <= offset + nbytes
        ]
        ticket = handle.read(torch.empty(nbytes, dtype=torch.uint8), path, offset)
        if not bad:
            ticket.wait()
            continue
        with pytest.raises(OffloadIntegrityError) as caught:
            ticket.wait()
        assert (caught.value.offset, caught.value.offset + caught.value.nbytes_wanted) == bad[0]


def test_transfers_in_flight_are_compared_with_the_write_before_them(backend, tmp_path):
    late = FaultPlan(rates={"delay": 0.5, "reorder": 0.5}, delay_seconds=0.002)
    with AsyncIOHandle(4096, backend=backend, checksums=True, faults=late) as handle:
        pairs = []
        for seed in range(20):
            data, found = some(10_000, seed), torch.zeros(10_000, dtype=torch.uint8)
            handle.write(data, tmp_path / "x", 50)
            pairs.append((data, found, handle.read(found, tmp_path / "x", 50)))
        for data, found, ticket in reversed(pairs):
            ticket.wait()
            assert torch.equal(data, found)


def test_many_extents_under_one_ticket_are_all_compared(handle, tmp_path):
    data = [some(5000, seed) for seed in range(6)]
    places = [(tmp_path / f"{number % 2}", 7000 * number) for number in range(6)]
    handle.writev([(part, *place) for part, place in zip(data, places, strict=True)]).wait()
    found = [torch.empty(5000, dtype=torch.uint8) for _ in data]
    handle.readv([(part, *place) for part, place in zip(found, places, strict=True)]).wait()
    flip(places[3][0], places[3][1] + 4999)
    with pytest.raises(OffloadIntegrityError) as caught:
        handle.readv([(part, *place) for part, place in zip(found, places, strict=True)]).wait()
    assert (caught.value.filename, caught.value.offset) == (str(places[3][0]), places[3][1])


def test_a_write_that_failed_leaves_nothing_to_compare_with(backend, tmp_path):
    path, found = tmp_path / "x", torch.empty(8192, dtype=torch.uint8)
    plan = FaultPlan(scheduled=[(2, "eio")])
    with AsyncIOHandle(backend=backend, checksums=True, faults=plan) as handle:
        handle.write(some(8192, 1), path).wait()
        failing = handle.write(some(8192, 2), path)
        unchecked = DIGESTS.bytes_unchecked
        handle.read(found, path).wait()  # behind the write, before anybody has heard of its failure
        with pytest.raises(OffloadIOError):
            failing.wait()
        handle.read(found, path).wait()
        assert DIGESTS.bytes_unchecked == unchecked + 2 * 8192
        handle.write(some(8192, 3), path).wait()
        flip(path, 0)
        with pytest.raises(OffloadIntegrityError):
            handle.read(found, path).wait()


def test_what_one_handle_wrote_another_compares(handle, tmp_path):
    with AsyncIOHandle(backend="posix", checksums=True) as other:
        other.write(some(100), tmp_path / "x").wait()
    flip(tmp_path / "x", 1)
    with pytest.raises(OffloadIntegrityError):
        handle.read(torch.empty(100, dtype=torch.uint8), tmp_path / "x").wait()


def test_without_checksums_nothing_is_kept_and_nothing_compared(backend, tmp_path):
    before = counts()
    with AsyncIOHandle(backend=backend) as handle:
        handle.write(some(100), tmp_path / "x").wait()
        flip(tmp_path / "x", 1)
        handle.read(torch.empty(100, dtype=torch.uint8), tmp_path / "x").wait()
    assert counts() == before
    assert str(tmp_path / "x") not in DIGESTS._files


def test_the_figures_tell_what_was_checked(handle, tmp_path):
    before = offload.stats()
    handle.write(some(1000), tmp_path / "x").wait()
    handle.write(some(1000), tmp_path / "x", 1500).wait()
    handle.read(torch.empty(2100, dtype=torch.uint8), tmp_path / "x").wait()
    after = offload.stats()
    assert after["bytes_checked"] - before["bytes_checked"] == 1000
    assert after["bytes_unchecked"] - before["bytes_unchecked"] == 1100


@pytest.mark.parametrize("cut_by", ["the write", "the file"])
def test_parts_of_what_was_written_at_once_are_checked_whole(handle, tmp_path, cut_by):
    start, found = 5 * 4096, torch.empty(2 * MIB, dtype=torch.uint8)
    handle.write(some(8 * MIB), tmp_path / "x", start).wait()
    first = start if cut_by == "the write" else 2 * MIB
    unchecked = DIGESTS.bytes_unchecked
    for turn in range(3):
        handle.read(found, tmp_path / "x", first + turn * found.nbytes).wait()
    assert DIGESTS.bytes_unchecked == unchecked


def test_threads_share_a_file(handle, tmp_path):
    failures = []

    def work(number):
        try:
            for turn in range(30):
                data, found = some(5000, turn), torch.empty(5000, dtype=torch.uint8)
                handle.write(data, tmp_path / "x", 5000 * number)
                handle.read(found, tmp_path / "x", 5000 * number).wait()
                assert torch.equal(data, found)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_large_file_costs_no_time_to_look_up():
    table = Digests()
    segments = [digests.Segment(number * MIB, MIB, number) for number in range(100_000)]
    table._files["x"] = list(segments)
    for number in range(0, 100_000, 10):
        table._replace(table._files["x"], segments[number : number + 2])
    assert table._files["x"] == segments
    assert len(list(table._expected("x", 0, 3 * MIB, 70 * MIB + 1))) == 2
