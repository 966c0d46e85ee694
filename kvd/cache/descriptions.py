"""The descriptions of a namespace's chunks; the I/O is the daemon's."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from kvd.metrics.counts import ChunkCounts


class DescriptionWriter(Protocol):
    """Keeps a description for each slot of a namespace."""

    @property
    def room(self) -> int:
        """How many bytes a description may have."""

    def write(self, slot: int, generation: int, description: bytes) -> bool:
        """Keep the description of the slot's chunk; False where there is no room."""


MakeDescriptions: TypeAlias = Callable[[str, int], DescriptionWriter | None]
"""Makes the writer for a namespace, by its id in hex, with records of so many bytes; None where
that cannot be now."""


class Descriptions:
    """Keeps descriptions, and counts those that are not kept.

    Attributes:
        writer: None where none are kept.
    """

    def __init__(self, counts: ChunkCounts) -> None:
        self._counts = counts
        self.writer: DescriptionWriter | None = None

    @property
    def room(self) -> int:
        """How many bytes a description may have; 0 where none are kept."""
        return 0 if self.writer is None else self.writer.room

    def keep(self, slot: int, generation: int, description: bytes) -> None:
        """Keep a description, or count why it is not kept: the store goes on without it."""
        writer, counts = self.writer, self._counts
        if writer is not None and len(description) > writer.room:
            counts.descriptions_too_long += 1
        elif writer is None or not writer.write(slot, generation, description):
            counts.descriptions_no_room += 1
        else:
            counts.descriptions += 1
