"""Shares of chunks that were stored, or never will be, until the broker is told.

Those of many jobs travel in one message: to read one costs the broker as much as the rest of what
it does for a share.
"""

import time
from collections.abc import Sequence
from typing import TypeAlias

from kvd.lane.workers import Binding, Worker
from kvd.wire.link import ShareDone
from kvd_proto.arrays import IntArray
from kvd_proto.blocks import Chunks

PER_MESSAGE = 4096  # 20 bytes each: well inside one datagram of the link
_Row: TypeAlias = tuple[int, int, int, int, int]
"""Slot, generation, first block, count of blocks, group."""
_Whose: TypeAlias = tuple[int, int, bytes, bool]
"""Session, rank, namespace, and whether they were stored."""


class Shares:
    """What the broker is not told yet, in the order in which it happened to each worker."""

    def __init__(self) -> None:
        self._rows: dict[_Whose, list[_Row]] = {}
        self._since = 0.0

    @property
    def waited(self) -> float:
        """Seconds since the first of these was added."""
        return time.monotonic() - self._since

    def add(
        self, worker: Worker, binding: Binding, chunks: Chunks, which: Sequence[int], *, ok: bool
    ) -> None:
        """Add a job's chunks of these numbers: stored, or, where not `ok`, given up."""
        if not which:
            return
        if not self._rows:
            self._since = time.monotonic()
        slots, generations = chunks.slots, chunks.generations
        first, count, group = chunks.first, chunks.count, chunks.group
        whose = worker.order.session, worker.order.rank, binding.order.namespace, ok
        self._rows.setdefault(whose, []).extend(
            [(slots[i], generations[i], first[i], count[i], group[i]) for i in which]
        )

    def take(self) -> list[ShareDone]:
        """The messages that tell all of it; nothing waits then."""
        taken, self._rows = self._rows, {}
        return [
            _message(whose, rows[begin : begin + PER_MESSAGE])
            for whose, rows in taken.items()
            for begin in range(0, len(rows), PER_MESSAGE)
        ]

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __repr__(self) -> str:
        return f"<Shares of {sum(map(len, self._rows.values()))} chunks>"


def _message(whose: _Whose, rows: Sequence[_Row]) -> ShareDone:
    session, rank, namespace, ok = whose
    slots, generations, first, count, groups = map(list, zip(*rows, strict=True))
    return ShareDone(
        session=session,
        rank=rank,
        namespace=namespace,
        slots=IntArray.of(slots, "u4"),
        generations=IntArray.of(generations, "u8"),
        first=IntArray.of(first, "u2"),
        count=IntArray.of(count, "u2"),
        groups=IntArray.of(groups, "u2"),
        ok=ok,
    )
