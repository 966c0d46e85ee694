"""Shares of chunks that were stored, or never will be, until the broker is told.

Those of many jobs travel in one message: to read one costs the broker as much as the rest of what
it does for a share.
"""

import time
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from kvd.lane.workers import Binding, Worker
from kvd.wire.link import ShareDone
from kvd_proto.arrays import IntArray
from kvd_proto.blocks import Chunks

PER_MESSAGE = 4096  # 20 bytes each: well inside one message of the link
_WIDTHS = (4, 8, 2, 2, 2)  # bytes of one item of each column of Chunks
_Whose: TypeAlias = tuple[int, int, bytes, bool]
"""Session, rank, namespace, and whether they were stored."""


class Shares:
    """What the broker is not told yet, in the order in which it happened to each worker."""

    def __init__(self) -> None:
        self._kept: dict[_Whose, list[Chunks]] = {}
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
        if len(which) < len(chunks):
            chunks = Chunks(
                *(array(column.typecode, [column[i] for i in which]) for column in chunks.columns)
            )
        self._kept.setdefault(whose, []).append(chunks)

    def take(self) -> list[ShareDone]:
        """The messages that tell all of it; nothing waits then."""
        taken, self._kept = self._kept, {}
        return [message for whose, kept in taken.items() for message in _messages(whose, kept)]

    def __bool__(self) -> bool:
        return bool(self._kept)


def _messages(whose: _Whose, kept: Sequence[Chunks]) -> Iterator[ShareDone]:
    session, rank, namespace, ok = whose
    joined = [b"".join(column) for column in zip(*(one.columns for one in kept), strict=True)]
    count = sum(map(len, kept))
    for begin in range(0, count, PER_MESSAGE):
        columns = [
            column[begin * width : (begin + PER_MESSAGE) * width]
            for column, width in zip(joined, _WIDTHS, strict=True)
        ]
        yield ShareDone(
            session=session,
            rank=rank,
            namespace=namespace,
            slots=IntArray("u4", columns[0]),
            generations=IntArray("u8", columns[1]),
            first=IntArray("u2", columns[2]),
            count=IntArray("u2", columns[3]),
            groups=IntArray("u2", columns[4]),
            ok=ok,
        )
