"""The directory: its format, its index, and the order in which readers see changes."""

import sys
import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.cache.directory import DirectoryWriter
from kvd.errors import IntegrityError
from kvd_proto.changes import Change, ChangeKind
from kvd_proto.directory import (
    CHECK_WORD,
    HEAD_DTYPE,
    HEADER,
    HEADER_BYTES,
    NO_SHARE_YET,
    READ_HEADS,
    DirectoryHeader,
    DirectoryView,
    LookupResult,
    SlotState,
)
from kvd_proto.errors import DirectoryError
from tests.cache.tables import Place, apply, records

SPACE, BOOT = bytes(range(16)), bytes(range(16, 32))


def make(num_slots: int, **options: Any) -> tuple[bytearray, DirectoryWriter]:
    """A directory in a bytearray, and its writer."""
    header = DirectoryHeader.plan(num_slots, SPACE, BOOT, **options)
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
    keys: list[bytes] = []
    number = 0
    while len(keys) < count:
        key = number.to_bytes(8, "little")
        if zlib.crc32(key) & mask == home:
            keys.append(key)
        number += 1
    return keys


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
            assert writer.loan_of(slot) == generation & 0xFFFF_FFFF != 0
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
        for other in keys:
            assert view.find(other) == model.get(other, -1)
        writer.check_integrity()


READY, REMOVED = ChangeKind.READY, ChangeKind.REMOVED
WRITERS = {"kvd.cache.directory", "kvd.cache.change_log"}

Step: TypeAlias = tuple[str, list[int]]
TraceFunction: TypeAlias = Callable[[FrameType, str, object], "TraceFunction | None"]


def become_ready(writer: DirectoryWriter, key: bytes, slot: int) -> int:
    """A chunk with blocks 1 to 3 of group 5; its generation."""
    (generation,) = writer.lend([slot])
    writer.place(key, slot, 1, generation)
    writer.add_share(slot, 0, 1, 3, 5)
    writer.make_ready(slot)
    return generation


class Watch:
    """Looks after every instruction of the modules that write a directory."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> TraceFunction | None:
        if frame.f_globals.get("__name__") not in WRITERS:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, _frame: FrameType, event: str, _arg: object) -> TraceFunction:
        if event == "opcode":
            self._look()
        return self._step


ops = st.lists(
    st.tuples(
        st.sampled_from(["ready", "free", "doom", "forget"]),
        st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True),
    ),
    max_size=8,
)


def carry_out(writer: DirectoryWriter, what: str, slots: list[int]) -> None:
    """One thing that a broker does with those of these slots with which it can be done."""
    ready = [slot for slot in writer.slots_in(SlotState.READY) if writer.key(slot)]
    if what == "ready":
        for slot in slots:
            if slot not in writer.slots_in(SlotState.READY) and writer.find(b"%d" % slot) < 0:
                become_ready(writer, b"%d" % slot, slot)
    elif what == "free":
        writer.free([slot for slot in slots if slot in ready])
    elif what == "doom":
        for slot in slots:
            if slot in ready and writer.generation(slot) > writer.floor:
                writer.unindex(slot)
                writer.write_state(slot, SlotState.FREE)
    else:
        writer.forget()


@settings(max_examples=30)
@given(ops)
def test_between_any_two_stores_a_reader_sees_no_false_change(steps: list[Step]) -> None:
    """A change is told when the directory shows it; what is missed in the one is in the other.

    Who reads head, later the records, and later the changes after that head, knows everything.
    """
    ring = 4
    buffer, writer = make(16, changes=ring)
    view = DirectoryView(memoryview(buffer).toreadonly())
    log: list[Change] = []
    seen: dict[tuple[int, tuple[tuple[bytes, Place], ...]], None] = {}

    def look() -> None:
        shown, head = records(view), view.changes.head
        if head > len(log):
            log.extend(view.changes.read(head - 1, 1) or [])
            replayed = dict(shown)
            apply(replayed, log[head - 1])
            assert replayed == shown
        seen[head, tuple(shown.items())] = None
        for after in range(max(0, head - ring - 1), head):
            read = view.changes.read(after, ring)
            assert read == (log[after:] if after > head - ring else None)

    with Watch(look):
        for what, slots in steps:
            carry_out(writer, what, slots)
    look()
    writer.check_integrity()
    moments = list(seen)
    for number, (head, _) in enumerate(moments):
        for _, shown in moments[number:]:
            known = dict(shown)
            for change in log[head:]:
                apply(known, change)
            assert known == records(view)


def test_a_slot_whose_loan_has_ended_is_being_written_for_it() -> None:
    """Between any two stores: lanes wait for the broker while the loan is there, and no longer.

    They believe WRITING with the generation, so that comes first.
    """
    _, writer = make(8)
    old = become_ready(writer, b"old", 3)
    (generation,) = writer.lend([3])
    writer.free([3])
    seen: dict[tuple[bool, int, int], None] = {}

    def look() -> None:
        seen[writer.is_lent(3, generation), writer.generation(3), writer.state(3)] = None

    with Watch(look):
        writer.place(b"new", 3, 1, generation)
    assert list(seen) == [
        (True, old, SlotState.FREE),
        (True, generation, SlotState.FREE),
        (True, generation, SlotState.WRITING),
        (False, generation, SlotState.WRITING),
    ]


def test_a_chunk_is_kept_from_its_first_tier_to_its_last() -> None:
    """The first tier that holds a chunk is a change, and so is the last one that drops it."""
    header = DirectoryHeader.plan(4, bytes(16), bytes(16), 4, tier_capacity=16, num_tiers=2)
    writer = DirectoryWriter(bytearray(header.total_bytes), header)
    tiers = writer.tiers
    assert tiers is not None
    tiers.hold(b"a", 0, 1, 3, 5)
    tiers.hold(b"a", 1, 1, 3, 5)
    tiers.hold(b"a", 1, 2, 1, 5)  # less than the other tier has: not noted
    tiers.mark_absent(b"b", 1.0)
    for key, tier in ((b"a", 1), (b"b", 0)):
        tiers.release(key, tier)
    tiers.hold(b"a", 1, 0, 4, 5)
    for tier in (0, 1):
        tiers.release(b"a", tier)
    changes = writer.changes.read(0, 100)
    assert changes is not None
    assert [change[4:] for change in changes] == [
        (1, 3, 5, ChangeKind.KEPT, b"a"),
        (0, 4, 5, ChangeKind.KEPT, b"a"),
        (0, 0, 0, ChangeKind.RELEASED, b"a"),
    ]
    writer.check_integrity()
