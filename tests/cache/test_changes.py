"""The ring of changes: what is a change, in which order it is told, and what is overrun."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.cache.directory import DirectoryWriter
from kvd_proto.changes import Change, ChangeKind
from kvd_proto.directory import DirectoryHeader, DirectoryView, SlotState
from tests.cache.followers import Place, apply, records

READY, REMOVED = ChangeKind.READY, ChangeKind.REMOVED
RING = 8
WRITERS = {"kvd.cache.directory", "kvd.cache.change_log"}

Step: TypeAlias = tuple[str, list[int]]
TraceFunction: TypeAlias = Callable[[FrameType, str, object], "TraceFunction | None"]


def make(ring: int = RING) -> tuple[bytearray, DirectoryWriter]:
    """A directory with a small ring, and its writer."""
    header = DirectoryHeader.plan(16, bytes(16), bytes(16), 4, changes=ring)
    buffer = bytearray(header.total_bytes)
    return buffer, DirectoryWriter(buffer, header)


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
    buffer, writer = make(ring)
    view = DirectoryView(memoryview(buffer).toreadonly())
    log: list[Change] = []
    seen: dict[tuple[int, tuple[tuple[bytes, Place], ...]], None] = {}

    def look() -> None:
        there, head = records(view), view.changes.head
        if head > len(log):
            log.extend(view.changes.read(head - 1, 1) or [])
            told = dict(there)
            apply(told, log[head - 1])
            assert told == there
        seen[head, tuple(there.items())] = None
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
        for _, there in moments[number:]:
            known = dict(there)
            for change in log[head:]:
                apply(known, change)
            assert known == records(view)


def test_a_slot_whose_loan_has_ended_is_being_written_for_it() -> None:
    """Between any two stores: lanes wait for the broker while the loan is there, and no longer.

    They believe WRITING with the generation, so that comes first.
    """
    _, writer = make()
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
