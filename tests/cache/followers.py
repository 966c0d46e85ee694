"""Readers of a directory's changes, as docs/protocol.md tells them to go about it."""

from typing import TypeAlias

import numpy as np

from kvd_proto.changes import Change, ChangeKind
from kvd_proto.directory import FLOOR_AT, RECORD_DTYPE, DirectoryView, SlotState

Place: TypeAlias = tuple[int, int, int, int, int]
"""Slot, generation, first block, count of blocks and group of a chunk."""


def records(view: DirectoryView) -> dict[bytes, Place]:
    """The chunks that count, by what the records of all slots say."""
    whole = view._memory  # it reads as one who has only the memory
    floor = int.from_bytes(whole[FLOOR_AT : FLOOR_AT + 8], "little")
    table = np.frombuffer(whole, RECORD_DTYPE, view.num_slots, view.header.records_offset)
    counts = (table["state"] == SlotState.READY) & (table["generation"] > floor)
    found = {}
    for slot in np.flatnonzero(counts & (table["key_len"] > 0)).tolist():
        row = table[slot]
        generation, first, count, group = row[["generation", "first", "count", "group"]].tolist()
        key = row["key"].tobytes()[: row["key_len"]]
        found[key] = slot, generation, first, count, group
    return found


def apply(said: dict[bytes, Place], change: Change) -> None:
    """Take in a change, which may be there already."""
    _, _, generation, slot, first, count, group, kind, key = change
    if kind == ChangeKind.READY:
        said[key] = slot, generation, first, count, group
    elif kind == ChangeKind.CLEARED:
        for gone in [key for key, place in said.items() if place[1] <= generation]:
            del said[gone]
    elif key in said and said[key][:2] == (slot, generation):
        del said[key]


class Follower:
    """Follows the changes of a directory from now on.

    `said` are the chunks that count, as far as it knows.
    """

    def __init__(self, view: DirectoryView) -> None:
        self.view = view
        self.number = view.changes.head
        self.said = records(view)

    def catch_up(self) -> None:
        """Take in all that has changed.

        Raises:
            AssertionError: it was overrun, or a change says what was so already.
        """
        changes = self.view.changes.read(self.number, 2**20)
        assert changes is not None
        for change in changes:
            key = change[-1]
            if change[-2] > ChangeKind.CLEARED:
                continue  # of tiers
            if change[-2] != ChangeKind.CLEARED:
                assert (key in self.said) == (change[-2] == ChangeKind.REMOVED)
            before = self.said.copy()
            apply(self.said, change)
            assert change[-2] == ChangeKind.CLEARED or self.said != before
        self.number += len(changes)
