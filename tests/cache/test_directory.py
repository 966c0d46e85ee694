"""The directory: format, index, views."""

import zlib
from array import array
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.directory import DirectoryWriter
from kvd.errors import IntegrityError
from kvd_proto.directory import (
    CHECK_WORD,
    HEAD_DTYPE,
    HEADER,
    HEADER_BYTES,
    NO_SHARE_YET,
    PROBE_LIMIT,
    READ_HEADS,
    DirectoryHeader,
    DirectoryView,
    LookupResult,
    SlotState,
)
from kvd_proto.errors import DirectoryError

SPACE, BOOT = bytes(range(16)), bytes(range(16, 32))


def make(num_slots: int) -> tuple[bytearray, DirectoryWriter]:
    """A directory in a bytearray, and its writer."""
    header = DirectoryHeader.plan(num_slots, SPACE, BOOT)
    buffer = bytearray(header.total_bytes)
    return buffer, DirectoryWriter(buffer, header)


def begin(
    writer: DirectoryWriter, keys: Sequence[bytes], slots: Sequence[int], owner: int
) -> list[int]:
    """Chunks that are being written; the generations of their slots."""
    generations = writer.lend(slots)
    for key, slot, generation in zip(keys, slots, generations, strict=True):
        writer.place(key, slot, owner, generation)
    return generations


@cache
def colliding_keys(count: int, mask: int, home: int) -> list[bytes]:
    """Keys whose entries all want to be at the same place of the index."""
    found: list[bytes] = []
    number = 0
    while len(found) < count:
        key = number.to_bytes(8, "little")
        if zlib.crc32(key) & mask == home:
            found.append(key)
        number += 1
    return found


@given(st.integers(1, 10**9))
def test_index_load(num_slots: int) -> None:
    """The index is a power of two whose load is at most 0.75, and costs little for a chunk."""
    header = DirectoryHeader.plan(num_slots, SPACE, BOOT)
    assert header.index_capacity.bit_count() == 1
    assert num_slots <= 0.75 * header.index_capacity
    assert header.changes_offset - HEADER_BYTES <= 102 * num_slots + 64


@pytest.mark.parametrize(
    ("at", "words", "signed"),
    [
        (0, "not a chunk directory", False),
        (8, "version", False),
        (16, "damaged", False),
        (104, "damaged", False),
        (20, "contradicts", True),  # the index's capacity, under a check word that is right
        (92, "contradicts", True),  # and the ring's
        (96, "contradicts", True),  # and its place
    ],
)
def test_bad_header(at: int, words: str, signed: bool) -> None:
    """Another magic or version, a flipped byte and figures that do not fit are refused in words."""
    buffer, _ = make(8)
    buffer[at] ^= 7
    if signed:
        CHECK_WORD.pack_into(buffer, HEADER.size, zlib.crc32(buffer[: HEADER.size]))
    with pytest.raises(DirectoryError, match=words):
        DirectoryView(buffer)


@pytest.mark.parametrize("highest", [0, 2**32 - 1, 2**32 - 2, 2**32 - 4, 2**32, 2**33 - 3])
def test_generations_are_unique_and_name_their_loans(highest: int) -> None:
    """All slots of a directory share them; their low 32 bits are never 0, also across 2**32."""
    buffer, writer = make(8)
    given = [writer.lend(range(3)), writer.lend([3, 4])]
    assert [each for some in given for each in some] == [1, 2, 3, 4, 5]
    header = writer.header
    writer = DirectoryWriter(bytearray(len(buffer)), header, generation_base=highest)
    last = highest
    for count in (1, 2, 3, 8):
        generations = writer.lend(range(count))
        for slot, generation in enumerate(generations):
            assert generation > last
            assert writer.loan(slot) == generation & 0xFFFF_FFFF != 0
            last = generation
        assert writer.is_lent(0, generations[0])
        writer.end_loans(range(count))
    assert writer.place(b"filled by a tier", 0, 1)
    assert writer.generation(0) > last


@given(st.lists(st.integers(0, 7), max_size=40))
def test_heads_are_the_records_without_their_keys(slots: list[int]) -> None:
    """Whatever slots are asked for, in their order; one that does not exist is an error."""
    _, writer = make(8)
    begin(writer, [b"a", b"b", b"c"], [0, 1, 7], owner=5)
    writer.add_share(1, 0, first=1, count=2, group=3)
    writer.make_ready(1)
    (loan,) = writer.lend([1])
    known = {
        0: (1, 5, SlotState.WRITING, 0, NO_SHARE_YET, 0, 0),
        1: (2, 5, SlotState.READY, 1, 2, 3, loan),
        7: (3, 5, SlotState.WRITING, 0, NO_SHARE_YET, 0, 0),
    }
    heads = writer.heads(array("I", slots))
    assert list(READ_HEADS(heads)) == [known.get(slot, (0,) * 7) for slot in slots]
    table = np.frombuffer(heads, HEAD_DTYPE) if slots else np.empty(0, HEAD_DTYPE)
    names = ("generation", "owner", "state", "first", "count", "group", "loan")
    columns = [table[name].tolist() for name in names]
    assert list(zip(*columns, strict=True)) == list(READ_HEADS(heads))
    with pytest.raises(IndexError):
        writer.heads(array("I", [*slots, 8]))


def test_crowded_home_is_refused() -> None:
    """A key that has no place within the probe limit is refused; the slot stays on loan."""
    num_slots = PROBE_LIMIT + 8
    buffer, writer = make(num_slots)
    mask = writer.header.index_capacity - 1
    keys = colliding_keys(PROBE_LIMIT + 2, mask, home=mask)  # wraps round the end
    generations = begin(writer, keys, range(len(keys)), owner=1)
    for slot, generation in list(enumerate(generations))[PROBE_LIMIT:]:
        assert writer.state(slot) == SlotState.FREE
        assert writer.is_lent(slot, generation)
    view = DirectoryView(buffer)
    assert view.lookup_many(keys) == [LookupResult.HIT_PENDING] * PROBE_LIMIT + [0, 0]
    writer.check_integrity()
    writer.unindex(0)
    assert writer.place(keys[-1], PROBE_LIMIT, 1, generations[PROBE_LIMIT])
    assert view.find(keys[-1]) == PROBE_LIMIT
    writer.write_state(0, SlotState.DRAINING)
    writer.check_integrity()


def test_a_garbled_index_never_hits() -> None:
    """Entries that point nowhere, or to another key, are misses and not errors."""
    buffer, writer = make(4)
    begin(writer, [b"k"], [0], owner=1)
    at = writer.header.index_offset + (zlib.crc32(b"k") & writer.header.index_capacity - 1) * 8
    for slot in (2, 99, 2**32 - 2, -1):
        buffer[at : at + 4] = (slot + 1).to_bytes(4, "little")
        assert DirectoryView(buffer).lookup(b"k") is LookupResult.MISS
        with pytest.raises(IntegrityError):
            writer.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 47), st.integers(0, 23)), max_size=80))
def test_the_index_is_a_dict(steps: list[tuple[int, int]]) -> None:
    """Of keys that crowd a few homes and wrap round the end each is found where it was put.

    A step puts a key into a slot, and frees the slot or the key's before where it is taken.
    """
    buffer, writer = make(24)
    view = DirectoryView(buffer)
    mask = writer.header.index_capacity - 1
    keys = [key for home in (mask, mask - 1, 0, 3) for key in colliding_keys(12, mask, home)]
    model: dict[bytes, int] = {}
    for number, slot in steps:
        key = keys[number]
        gone = [k for k, s in model.items() if k == key or s == slot]
        writer.free([model.pop(k) for k in gone])
        begin(writer, [key], [slot], 1)
        writer.make_ready(slot)
        model[key] = slot
        for each in keys:
            assert view.find(each) == model.get(each, -1)
        writer.check_integrity()
