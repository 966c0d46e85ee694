"""What the scheduler returns: plain values, empty where nothing was granted.

A ticket is a context manager: leaving the block completes it. Leave it when its jobs have
ended. A ticket that was sent to another process has no scheduler, and completes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class StoreAnswer(IntEnum):
    """What a scheduler says about a key that is offered for storing."""

    ACCEPTED = 1  # a slot is given; write it
    PRESENT = 2  # READY already; nothing to do
    PENDING = 3  # somebody is writing it, perhaps this engine; nothing to do
    FULL = 4  # no slot is at hand; offer it next time
    NOT_YET = 5  # not offered often enough to be worth a slot; offer it next time


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """Slots of some chunks.

    Attributes:
        keys: the keys that have a slot, in the order of the request.
        slots: u4[len(keys)], the slot of each.
        generations: u8[len(keys)], the generation of each slot.
        on_exit: called when a `with` block is left, with whether it raised no exception.
    """

    keys: tuple[bytes, ...] = ()
    slots: Array = field(default_factory=lambda: np.empty(0, "<u4"))
    generations: Array = field(default_factory=lambda: np.empty(0, "<u8"))
    on_exit: Callable[[bool], object] | None = field(default=None, repr=False, kw_only=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.on_exit is not None:
            self.on_exit(kind is None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if not f.kw_only)

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoreTicket(Ticket):
    """Slots to store into; the `with` block's end completes the stores, or drops unfinished ones.

    Attributes:
        answers: one per requested key; empty where no daemon serves the engine.
        serial: the scheduler's number of the ticket; 0 where it has none.
    """

    answers: tuple[StoreAnswer, ...] = ()
    serial: int = 0

    @property
    def served(self) -> bool:
        """Whether a daemon serves the engine, even if no key was accepted."""
        return bool(self.answers)

    def __repr__(self) -> str:
        if not self.served:
            return "<StoreTicket not served>"
        return f"<StoreTicket {len(self.keys)} of {len(self.answers)} keys accepted>"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoadTicket(Ticket):
    """Chunks that are pinned for loading until `complete_load` or the lease's end.

    Attributes:
        found: bool[requested keys]; all false where no daemon serves the engine.
        lease: the scheduler's number of the lease, 0 where there is none.
        lease_seconds: duration of the lease, from when the daemon is told; it may give less.
    """

    found: Array = field(default_factory=lambda: np.empty(0, np.bool_))
    lease: int = 0
    lease_seconds: float = 0.0

    def __repr__(self) -> str:
        return (
            f"<LoadTicket {len(self.keys)} of {len(self.found)} keys found,"
            f" lease {self.lease} for {self.lease_seconds:g} s>"
        )
