"""What the scheduler gets back: plain values, empty where nothing was granted.

A ticket is a context manager: leaving the block completes it. Leave it when its jobs have
ended. A ticket that was sent to another process has no scheduler, and completes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvd_proto.answers import StoreAnswer

Array = npt.NDArray[Any]


def _none(dtype: Any) -> Array:
    return np.empty(0, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class StoreTicket:
    """Slots to store into.

    Attributes:
        keys: the accepted keys, in the order of the request.
        slots: u4[len(keys)], the slot of each.
        generations: u8[len(keys)], the generation of each slot.
        answers: one per requested key; empty where the daemon did not answer.
        evicted: keys that had to go to make room.
        on_exit: what leaving a `with` block calls, with whether all went well.
    """

    keys: tuple[bytes, ...] = ()
    slots: Array = field(default_factory=lambda: _none("<u4"))
    generations: Array = field(default_factory=lambda: _none("<u8"))
    answers: tuple[StoreAnswer, ...] = ()
    evicted: tuple[bytes, ...] = ()
    on_exit: Callable[[bool], object] | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The stores are over; after an exception what is unfinished is dropped."""
        if self.on_exit is not None:
            self.on_exit(kind is None)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreTicket, (self.keys, self.slots, self.generations, self.answers, self.evicted)

    @property
    def served(self) -> bool:
        """Whether the daemon decided, be it against every key."""
        return bool(self.answers)

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        if not self.served:
            return "<StoreTicket not served>"
        return (
            f"<StoreTicket {len(self.keys)} of {len(self.answers)} keys accepted,"
            f" {len(self.evicted)} evicted>"
        )


@dataclass(frozen=True, slots=True, eq=False)
class LoadTicket:
    """Chunks that are pinned for loading until `complete_load` or the lease's end.

    Attributes:
        keys: the found keys, in the order of the request.
        slots: u4[len(keys)], the slot of each.
        generations: u8[len(keys)], the generation of each slot.
        found: bool[requested keys]; all false where the daemon did not answer.
        lease: the daemon's number of the lease, 0 where there is none.
        lease_seconds: how long it holds, from the request on.
        on_exit: what leaving a `with` block calls.
    """

    keys: tuple[bytes, ...] = ()
    slots: Array = field(default_factory=lambda: _none("<u4"))
    generations: Array = field(default_factory=lambda: _none("<u8"))
    found: Array = field(default_factory=lambda: _none(np.bool_))
    lease: int = 0
    lease_seconds: float = 0.0
    on_exit: Callable[[], object] | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the lease back."""
        if self.on_exit is not None:
            self.on_exit()

    def __reduce__(self) -> tuple[Any, ...]:
        public = (self.keys, self.slots, self.generations, self.found)
        return LoadTicket, (*public, self.lease, self.lease_seconds)

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return (
            f"<LoadTicket {len(self.keys)} of {len(self.found)} keys found,"
            f" lease {self.lease} for {self.lease_seconds:g} s>"
        )


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """What became of completed stores: chunks ready, still being written, dropped."""

    ready: int = 0
    pending: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class ResetSummary:
    """Chunks dropped now, and those that go when their leases end.

    Attributes:
        served: whether the daemon did it; otherwise everything is as it was.
    """

    dropped: int = 0
    deferred: int = 0
    served: bool = False
