"""Which of a job's chunks are not its own, looked at one by one and all at once."""

from array import array
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.lane import jobs
from kvd.lane.workers import Binding
from kvd_proto.directory import SlotState
from kvd_proto.jobs import Chunks
from tests.lane.support import SLOTS, Directory, bind_message
from tests.layouts import flat_layout

FACTOR = 4
LAYOUT = flat_layout(4096, blocks=32, factor=FACTOR)
Blocks = tuple[int, int, int]  # first, count, group
small = st.integers(1, 2)
blocks = st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 1))
records = st.tuples(small, st.integers(7, 8), st.sampled_from(list(SlotState)), blocks)
named = st.tuples(st.integers(0, SLOTS - 1), small, blocks)
loans = st.sampled_from([0, 1, 2, 2**32 - 1])
lent_as = st.sampled_from([1, 2, 2**32 + 1, 2**33 - 1])


@pytest.fixture(scope="module")
def table() -> Iterator[Directory]:
    """A directory for all examples."""
    made = Directory(SLOTS)
    yield made
    made.memory.close()


@pytest.fixture(scope="module")
def binding(table: Directory) -> Binding:
    """Engine 7's binding to it."""
    size = LAYOUT.slot_bytes * SLOTS
    return Binding.of(bind_message(1, table), [table.memory.fd], LAYOUT, size)


@given(
    st.lists(records, min_size=SLOTS, max_size=SLOTS),
    st.lists(named, max_size=20),
    st.sets(st.integers(0, 19)),
)
def test_few_and_many_are_looked_at_with_the_same_result(
    table: Directory,
    binding: Binding,
    slots: list[tuple[int, int, SlotState, Blocks]],
    chunks: list[tuple[int, int, Blocks]],
    some: set[int],
) -> None:
    """The chunks that are lost are those whose records say so, however many are named."""
    for number, (generation, owner, state, (first, count, group)) in enumerate(slots):
        table.set(
            [number],
            state,
            generation=generation,
            owner=owner,
            first=first,
            count=count,
            group=group,
        )
    columns = [[chunk[0] for chunk in chunks], [chunk[1] for chunk in chunks]]
    columns += [[chunk[2][i] for chunk in chunks] for i in range(3)]
    job = Chunks(*(array(code, column) for code, column in zip("IQHHH", columns, strict=True)))
    which = sorted(number for number in some if number < len(chunks))
    lost: list[int] = []
    gone: list[int] = []
    short: list[int] = []
    for number, (slot, named_generation, (first, count, group)) in enumerate(chunks):
        generation, owner, state, (held_first, held_count, held_group) = slots[slot]
        same = generation == named_generation
        if not (same and owner == 7 and state is SlotState.WRITING):
            lost.append(number)
        if not (same and state is SlotState.READY):
            gone.append(number)
        inside = held_first <= first and first + count <= held_first + held_count
        if not (inside and group == held_group):
            short.append(number)
    heads = binding.directory.heads(job.slots)
    theirs = binding.directory.heads(array("I", [job.slots[i] for i in which]))
    for few in (0, 100):
        with mock.patch.object(jobs, "SMALL_BATCH", few):
            found = jobs.not_writable(theirs, 7, job, which)
            assert found == [number for number in which if number in lost]
            assert jobs.not_ready(heads, job) == gone
            assert jobs.not_covered(heads, job) == short


@given(
    st.lists(loans, min_size=SLOTS, max_size=SLOTS),
    st.lists(st.tuples(st.integers(0, SLOTS - 1), lent_as), max_size=20),
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
