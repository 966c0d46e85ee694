"""Shares of chunks that were stored, or never will be, until the broker is told.

Those of many jobs travel in one message: to read one costs the broker as much as the rest of what
it does for a share.
"""

import time
from array import array
from collections.abc import Sequence
from typing import TypeAlias

from kvd.lane.workers import Binding, Worker
from kvd.wire.link import ShareDone
from kvd_proto.arrays import IntArray
from kvd_proto.blocks import Chunks

PER_MESSAGE = 4096  # 20 bytes each: well inside one datagram of the link
_Whose: TypeAlias = tuple[int, int, bytes, bool]
"""Session, rank, namespace, and whether they were stored."""


class Shares:
    """What the broker is not told yet, in the order in which it happened to each worker."""

    def __init__(self) -> None:
        self._kept: dict[_Whose, Chunks] = {}
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
        if not self._kept:
            self._since = time.monotonic()
        whose = worker.order.session, worker.order.rank, binding.order.namespace, ok
        kept = self._kept.get(whose)
        if kept is None:
            kept = self._kept[whose] = Chunks(*(array(code) for code in "IQHHH"))
        for column, values in zip(kept.columns, chunks.columns, strict=True):
            if len(which) == len(values):
                column.extend(values)
            else:
                column.extend([values[i] for i in which])

    def take(self) -> list[ShareDone]:
        """The messages that tell all of it; nothing waits then."""
        taken, self._kept = self._kept, {}
        return [
            _message(whose, kept, slice(begin, begin + PER_MESSAGE))
            for whose, kept in taken.items()
            for begin in range(0, len(kept), PER_MESSAGE)
        ]

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __repr__(self) -> str:
        return f"<Shares of {sum(map(len, self._kept.values()))} chunks>"


def _message(whose: _Whose, kept: Chunks, part: slice) -> ShareDone:
    session, rank, namespace, ok = whose
    return ShareDone(
        session=session,
        rank=rank,
        namespace=namespace,
        slots=IntArray("u4", kept.slots[part].tobytes()),
        generations=IntArray("u8", kept.generations[part].tobytes()),
        first=IntArray("u2", kept.first[part].tobytes()),
        count=IntArray("u2", kept.count[part].tobytes()),
        groups=IntArray("u2", kept.group[part].tobytes()),
        ok=ok,
    )
