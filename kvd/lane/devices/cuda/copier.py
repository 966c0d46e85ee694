"""How a transfer's runs are moved: by the copy engine, or short ones by a kernel.

The copy engine is given a piece's runs in one call where driver and device take
it (`cuMemcpyBatchAsync`), else one by one. It disturbs no computing; a kernel of this
process takes the whole device from the engine's for as long as it runs (unless MPS lets
both run side by side), so only what is much faster by the kernel goes that way.

Sources of stores are read in stream order only: the engine may reuse its blocks as
soon as the event after the copies is reached, not before, and reads ahead of the
stream could see what it has not yet computed. Sources of loads lie in the pool,
which does not change while the chunk is leased; they may be read in any order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import BatchCopy, Stream
from kvd.lane.devices.cuda.move_kernel import MoveKernel
from kvd.lane.devices.cuda.moves import DEVICE, HOST, NBYTES, Columns, Runs
from kvd.lane.devices.device import Direction

Way: TypeAlias = Callable[[Runs, Direction, Stream], None]
"""Enqueues runs on a stream."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Below which length runs go by the kernel.

    below: by direction, bytes for 1, for 2 and 3, for 4 to 7 runs and so on; the last also for
        more. A direction that is not there has no use for the kernel.
    """

    below: Mapping[Direction, Sequence[int]] = field(default_factory=dict)

    def of(self, direction: Direction, count: int) -> int:
        """Bytes, for so many runs."""
        row = self.below.get(direction, ())
        return row[min(count.bit_length(), len(row)) - 1] if row and count else 0

    def __bool__(self) -> bool:
        return any(map(any, self.below.values()))

    def __str__(self) -> str:
        rows = (
            f"{way} below {'/'.join(str(length) for length in row)} bytes"
            for way, row in self.below.items()
            if any(row)
        )
        return ", ".join(rows) or "none"


@dataclass(repr=False)
class Copier:
    """Moves runs, each the way that is faster for its length.

    batch: None where runs are enqueued one by one.
    any_order: the pool may be read at any time; see above.
    """

    batch: BatchCopy | None
    any_order: bool = True
    kernel: MoveKernel | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)

    def by_engine(self, runs: Runs, direction: Direction, stream: Stream) -> None:
        """Enqueue runs, of which there are some, for the copy engine.

        Raises:
            CudaError: some may have been enqueued.
        """
        store = direction is Direction.STORE
        if self.batch is not None:
            host, device, nbytes = runs.pointers()
            target, source = (host, device) if store else (device, host)
            early = self.any_order and not store
            self.batch.enqueue(target, source, nbytes, len(runs), stream, source_in_any_order=early)
            return
        rows = runs.table.tolist()
        targets, sources = (rows[HOST], rows[DEVICE]) if store else (rows[DEVICE], rows[HOST])
        for target, source, nbytes in zip(targets, sources, rows[NBYTES], strict=True):
            driver.copy(target, source, nbytes, stream)

    def enqueue(self, runs: Runs, direction: Direction, stream: Stream, taken: list[int]) -> None:
        """Enqueue runs, the short ones by the kernel if it has room for a list of them.

        What must be given back when they have ended is added to `taken`.

        Raises:
            CudaError: some may have been enqueued.
        """
        below = self.thresholds.of(direction, len(runs))
        if self.kernel is not None and below:
            short = runs.table[NBYTES] < below
            mixed = not short.all()
            if short.any():
                few = _select(runs, short) if mixed else runs
                if self.kernel.enqueue(few, direction, stream, taken):
                    if not mixed:
                        return
                    runs = _select(runs, ~short)
        if len(runs):
            self.by_engine(runs, direction, stream)

    def give_back(self, direction: Direction, taken: list[int]) -> None:
        """The runs for which `enqueue` took this have ended, and all before them."""
        if self.kernel is not None:
            self.kernel.give_back(direction, taken)

    @property
    def engine_way(self) -> str:
        """How the copy engine is given many runs, in words."""
        return repr(self.batch) if self.batch else "one by one"

    def __repr__(self) -> str:
        way = self.engine_way
        order = "any" if self.any_order else "stream"
        return (
            f"copies are enqueued {way}, loads in {order} order, by the kernel: {self.thresholds}"
        )


def _select(runs: Runs, which: npt.NDArray[np.bool_]) -> Runs:
    return Columns(np.ascontiguousarray(runs.table[:, which])).all
