"""An arena hands out ranges that never overlap and loses none."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.swap.arena import ALIGNMENT, Arena, align_up

MIB = 1 << 20


@pytest.mark.parametrize(("nbytes", "aligned"), [(0, 0), (1, 4096), (4095, 4096), (4096, 4096), (4097, 8192)])
def test_align_up_goes_to_the_next_boundary(nbytes, aligned):
    assert align_up(nbytes) == aligned


def test_a_new_arena_is_free_and_idle():
    arena = Arena(MIB)
    assert arena.free_nbytes == arena.nbytes == MIB
    assert arena.idle


def test_an_arena_of_nothing_gives_nothing():
    arena = Arena(0)
    assert arena.allocate(1) is None
    assert arena.free_nbytes == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097])
def test_every_range_starts_on_a_boundary(nbytes):
    arena = Arena(MIB)
    arena.allocate(nbytes)
    assert arena.allocate(nbytes) % ALIGNMENT == 0


def test_the_whole_arena_can_be_one_range():
    arena = Arena(MIB)
    assert arena.allocate(MIB) == 0
    assert arena.allocate(1) is None


def test_a_range_larger_than_the_arena_is_refused_and_changes_nothing():
    arena = Arena(MIB)
    assert arena.allocate(MIB + 1) is None
    assert arena.free_nbytes == MIB


def test_freed_neighbours_merge_in_any_order():
    arena = Arena(4 * ALIGNMENT)
    offsets = [arena.allocate(ALIGNMENT) for _ in range(4)]
    for offset in (offsets[1], offsets[3], offsets[0], offsets[2]):
        arena.free(offset)
    assert arena.allocate(4 * ALIGNMENT) == 0


@pytest.mark.parametrize("offset", [-1, 1, ALIGNMENT, MIB])
def test_freeing_what_is_not_allocated_is_an_error_that_names_the_offset(offset):
    arena = Arena(MIB)
    arena.allocate(2 * ALIGNMENT)
    with pytest.raises(ValueError, match=f"offset {offset}"):
        arena.free(offset)


def test_freeing_twice_is_an_error():
    arena = Arena(MIB)
    offset = arena.allocate(1)
    arena.free(offset)
    with pytest.raises(ValueError, match="nothing is allocated"):
        arena.free(offset)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9 * ALIGNMENT)), max_size=60))
def test_random_sequences_never_overlap_and_everything_comes_back(commands):
    arena = Arena(32 * ALIGNMENT)
    lent: dict[int, int] = {}
    for frees, number in commands:
        if frees and lent:
            offset = sorted(lent)[number % len(lent)]
            arena.free(offset)
            del lent[offset]
        elif (offset := arena.allocate(number)) is not None:
            lent[offset] = align_up(max(number, 1))
        ends = [(start, start + nbytes) for start, nbytes in sorted(lent.items())]
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert all(end <= arena.nbytes for _, end in ends)
        assert arena.free_nbytes == arena.nbytes - sum(lent.values())
        assert arena.idle == (not lent)
    for offset in list(lent):
        arena.free(offset)
    assert arena.allocate(arena.nbytes) == 0
