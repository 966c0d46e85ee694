"""From tickets and an engine's blocks to the arrays of a job."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client import ChunkBlocks, LoadTicket, StoreTicket, UsageError
from kvd_client.tickets import pack_chunks
from kvd_proto.jobs import chunks_per_group
from tests.layouts import flat_layout


def store_ticket(places: dict[bytes, tuple[int, int]]) -> StoreTicket:
    """A ticket that grants these keys their slots and generations."""
    return StoreTicket(
        keys=tuple(places),
        slots=np.array([slot for slot, _ in places.values()], "<u4"),
        generations=np.array([generation for _, generation in places.values()], "<u8"),
    )


@st.composite
def groups_and_grants(draw: st.DrawFn) -> tuple[int, list[ChunkBlocks], list[bytes]]:
    """Groups of an engine's blocks, and those keys that a daemon granted."""
    factor = draw(st.integers(1, 4))
    groups, granted, block = [], [], 1
    for number in range(draw(st.integers(1, 3))):
        length, first = draw(st.integers(0, 12)), draw(st.integers(0, 9))
        chunks = -(-(length + first % factor) // factor) if length else 0
        keys = [b"%d-%d" % (number, chunk) for chunk in range(chunks)]
        groups.append(ChunkBlocks(keys, list(range(block, block + length)), first))
        granted += draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
        block += length
    return factor, groups, granted


@given(groups_and_grants())
def test_a_job_has_exactly_the_granted_chunks(
    made: tuple[int, list[ChunkBlocks], list[bytes]],
) -> None:
    """Each granted chunk's blocks are where it holds them; those of others are left out."""
    factor, groups, granted = made
    places = {key: (index, 100 + index) for index, key in enumerate(granted)}
    job = pack_chunks(store_ticket(places), groups, flat_layout(1, factor=factor))
    assert sum(job.sizes) == len(job.block_ids)
    counts = chunks_per_group(job.sizes, job.indices, factor)
    block_ids, slots = job.block_ids.numpy().tolist(), job.slots.numpy().tolist()
    assert sum(counts) == len(slots) == len(granted)
    # Read the job as a lane does, and compare with what the engine said.
    said = {}
    for group in groups:
        for position, block in enumerate(group.blocks):
            logical = group.first + position
            key = group.keys[(group.first % factor + position) // factor]
            said[block] = (key, logical % factor)
    keys_by_slot = {slot: key for key, (slot, _) in places.items()}
    position = chunk = 0
    for size, index in zip(job.sizes, job.indices, strict=True):
        inside = index % factor
        for _ in range(size):
            key = keys_by_slot[slots[chunk]]
            assert said[block_ids[position]] == (key, inside)
            position, inside = position + 1, inside + 1
            if inside == factor:
                chunk, inside = chunk + 1, 0
        chunk += bool(inside)
    assert [keys_by_slot[slot] for slot in slots] == [
        key for group in groups for key in group.keys if key in places
    ]
    assert job.generations.numpy().tolist() == [slot + 100 for slot in slots]


TICKET = store_ticket({b"k": (0, 1)})
NULL_BLOCK = 7
REFUSED: list[tuple[Any, list[Any], str]] = [  # ticket, groups, words of the error
    (
        TICKET,
        [ChunkBlocks([b"k"], [1, 2, 3, 4, 5], first=3)],
        r"groups\[0\] has 1 keys, its 5 blocks from 3 on lie in",
    ),
    (TICKET, [([b"k"], [1])], "ChunkBlocks are needed"),
    (None, [], "prepare_store or prepare_load"),
    # Also a block of a chunk that was not granted.
    (
        store_ticket({}),
        [ChunkBlocks([], []), ChunkBlocks([b"k"], [1, NULL_BLOCK])],
        r"groups\[1\]\.blocks has block 7, the layout's null block",
    ),
    (TICKET, [ChunkBlocks([b"k"], np.ones((2, 2)))], "whole numbers"),  # type: ignore[arg-type]
    *(
        (TICKET, [ChunkBlocks([key], [1])], r"keys\[0\] is .*: bytes are needed")  # type: ignore[list-item]
        for key in ("k", [1], bytearray(b"k"), None)
    ),
    # Fields of a ticket that no daemon gave have other types, or do not fit each other.
    *(
        (ticket, [ChunkBlocks([b"k"], [1])], "ticket=")
        for ticket in (StoreTicket(keys=(b"k",)), LoadTicket(slots=[3]), StoreTicket(keys=None))  # type: ignore[arg-type]
    ),
]


def test_what_does_not_fit_is_refused_by_an_error_that_names_it() -> None:
    """Keys, blocks and tickets of other kinds, or of numbers that contradict each other."""
    layout = flat_layout(1, factor=2, null_block=NULL_BLOCK)
    for ticket, groups, words in REFUSED:
        with pytest.raises(UsageError, match=words):
            pack_chunks(ticket, groups, layout)
