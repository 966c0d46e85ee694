"""Pure parts of a lane: the runs of jobs, and which of their chunks are not theirs."""

import itertools
from array import array
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.lane import jobs, reports
from kvd.lane.cuda.copies import PoolSide, prepare
from kvd.lane.device import PreparedRuns
from kvd.lane.workers import Binding, Bindings
from kvd_proto.copies import Copies
from kvd_proto.directory import SlotState
from kvd_proto.expand import Expander
from kvd_proto.jobs import Chunks, JobBlocks
from kvd_proto.layout import RankLayout
from tests.lane.support import SLOTS, Directory, bind_message
from tests.layouts import flat_layout

NUM_BLOCKS = 24


@st.composite
def layouts_and_blocks(draw: st.DrawFn) -> tuple[RankLayout, JobBlocks]:
    """Blocks of one group, some of them neighbours, in layers of one or two lengths of page."""
    factor = draw(st.integers(1, 4))
    pages = draw(st.lists(st.sampled_from([512, 1536]), min_size=1, max_size=5))
    layout = flat_layout(*pages, blocks=NUM_BLOCKS, factor=factor)
    ids = draw(
        st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=1, max_size=12)
        | st.integers(1, 12).map(lambda count: list(range(1, count + 1)))
    )
    chunks = -(-len(ids) // factor)
    slots = draw(st.lists(st.integers(0, 99), min_size=chunks, max_size=chunks, unique=True))
    return layout, JobBlocks.of(ids, [len(ids)], [0], slots, slots)


@given(
    job=layouts_and_blocks(),
    longest=st.sampled_from([512, 700, 4096, 2**23]),
    registration=st.sampled_from([512, 4096, 2**14, 2**30]),
    base=st.sampled_from([0, 512, 4096, 10_000]),
)
def test_addresses_are_the_same_however_runs_are_given(
    job: tuple[RankLayout, JobBlocks], longest: int, registration: int, base: int
) -> None:
    """Few, alike or as columns: the same bytes move, each run inside one registration and short."""
    layout, blocks = job
    expander = Expander(layout)
    grids = expander.expand_many(blocks)
    pieces = 2**22 // registration + 1
    rng = np.random.default_rng(1)
    where = rng.integers(2**40, 2**41, pieces).astype(np.uint64)
    storages = np.arange(1, len(layout.storages) + 1, dtype=np.uint64) * np.uint64(2**42)
    pool = PoolSide(base, registration, where)
    forms = (grids, Copies(*grids.columns), Copies.of(expander.expand_few(blocks)))
    made = [prepare(copies, pool, storages, longest) for copies in forms]
    for moves in made[1:]:
        np.testing.assert_array_equal(moves.columns.table, made[0].columns.table)
        np.testing.assert_array_equal(moves.ends, made[0].ends)
    moved = []
    for storage, offset, arena, nbytes in grids.runs:
        for byte in range(0, nbytes, 4):  # pages, boundaries and lengths are multiples of it
            at = base + arena + byte
            address = at + int(where[at // registration])
            moved.append((address, int(storages[storage]) + offset + byte))
    prepared = []
    for host, device, nbytes in made[0].columns.table.T.tolist():
        assert 0 < nbytes <= longest
        prepared += [(host + byte, device + byte) for byte in range(0, nbytes, 4)]
    assert prepared == moved
    np.testing.assert_array_equal(made[0].ends, made[0].columns.table[2].cumsum())


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    most=st.integers(1, 2000),
    few=st.booleans(),
)
def test_no_job_has_more_pieces_than_its_bytes_need(
    lengths: list[int], most: int, few: bool
) -> None:
    """Every run is in one piece, in order; none is above what is wanted by a whole run."""
    ends = list(itertools.accumulate(lengths))
    runs = PreparedRuns(ends if few else np.array(ends))
    begin = num_pieces = 0
    while begin < len(lengths):
        end, nbytes = runs.next_piece(begin, most)
        assert nbytes == sum(lengths[begin:end])
        assert nbytes < most + lengths[end - 1]
        begin, num_pieces = end, num_pieces + 1
    assert begin == len(lengths)
    assert num_pieces <= -(-sum(lengths) // most)


LAYOUT = flat_layout(4096, blocks=32, factor=4)
Blocks = tuple[int, int, int]  # first, count, group
blocks = st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 1))
generations = st.integers(1, 2)
records = st.tuples(generations, st.integers(7, 8), st.sampled_from(list(SlotState)), blocks)
chunks_in_slots = st.tuples(st.integers(0, SLOTS - 1), generations, blocks)
loans = st.sampled_from([0, 1, 2, 2**32 - 1])
lent_generations = st.sampled_from([1, 2, 2**32 + 1, 2**33 - 1])


@pytest.fixture(scope="module")
def table() -> Iterator[Directory]:
    """A directory for all examples."""
    directory = Directory(SLOTS)
    yield directory
    directory.memory.close()


@pytest.fixture(scope="module")
def binding(table: Directory) -> Binding:
    """Engine 7's binding to it."""
    size = LAYOUT.slot_bytes * SLOTS
    return Bindings().bind(bind_message(1), [table.memory.fd], LAYOUT, size)


@given(
    st.lists(records, min_size=SLOTS, max_size=SLOTS),
    st.lists(chunks_in_slots, max_size=20),
    st.sets(st.integers(0, 19)),
)
def test_few_and_many_chunks_are_looked_at_with_the_same_result(
    table: Directory,
    binding: Binding,
    slots: list[tuple[int, int, SlotState, Blocks]],
    chunks: list[tuple[int, int, Blocks]],
    some: set[int],
) -> None:
    """The chunks that are lost are those whose records say so, however many there are."""
    for slot, (generation, owner, state, (first, count, group)) in enumerate(slots):
        fields = {"generation": generation, "first": first, "count": count, "group": group}
        table.set([slot], state, owner=owner, **fields)
    columns = [[slot, generation, *place] for slot, generation, place in chunks]
    job = Chunks(*(array(code, [row[i] for row in columns]) for i, code in enumerate("IQHHH")))
    which = sorted(number for number in some if number < len(chunks))
    lost: list[int] = []
    gone: list[int] = []
    short: list[int] = []
    for number, (slot, named_generation, (first, count, group)) in enumerate(chunks):
        generation, owner, state, (slot_first, slot_count, slot_group) = slots[slot]
        same = generation == named_generation
        if number in which and not (same and owner == 7 and state is SlotState.WRITING):
            lost.append(number)
        if not (same and state is SlotState.READY):
            gone.append(number)
        inside = slot_first <= first and first + count <= slot_first + slot_count
        if not (inside and group == slot_group):
            short.append(number)
    heads = binding.directory.heads(job.slots)
    some_heads = binding.directory.heads(array("I", [job.slots[i] for i in which]))
    for few in (0, 100):
        with mock.patch.object(jobs, "SMALL_BATCH", few):
            assert jobs.not_writable(some_heads, 7, job, which) == lost
            assert jobs.not_ready(heads, job) == gone
            assert jobs.not_covered(heads, job) == short


@given(
    st.lists(loans, min_size=SLOTS, max_size=SLOTS),
    st.lists(st.tuples(st.integers(0, SLOTS - 1), lent_generations), max_size=20),
)
def test_a_store_awaits_the_broker_while_a_slot_is_on_loan_for_it(
    table: Directory, binding: Binding, numbers: list[int], stored: list[tuple[int, int]]
) -> None:
    """A loan is the store's by the low half of its generation; few or many are looked at alike."""
    for slot, loan in enumerate(numbers):
        table.set([slot], SlotState.READY, loan=loan)
    heads = binding.directory.heads(array("I", [slot for slot, _ in stored]))
    generations = array("Q", [generation for _, generation in stored])
    unread = any(numbers[slot] == generation % 2**32 for slot, generation in stored)
    for few in (0, 100):
        with mock.patch.object(jobs, "SMALL_BATCH", few):
            assert jobs.any_on_loan(heads, generations) is unread


def test_shares_wait_for_others_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no other follows leaves after a millisecond, the first of a stream after five."""
    now_us, shares = 0, reports.ShareBuffer()
    chunks = Chunks(array("I", [1]), array("Q", [2]), *[array("H", [0]) for _ in range(3)])
    clock = mock.Mock(monotonic=lambda: now_us / 1e6)
    monkeypatch.setattr(reports, "time", clock)

    def due_after(pause_us: int) -> int:
        nonlocal now_us
        begin = now_us
        while not shares.due:
            if (now_us - begin) % pause_us == 0:
                shares.add(mock.Mock(), mock.Mock(), chunks, [0], ok=True)
            now_us += 100
        shares.take()
        return now_us - begin

    assert not shares.due
    assert due_after(10_000) == 1000
    assert due_after(500) == 5000
