"""What writes the descriptions of a namespace's chunks; the I/O is the daemon's."""

from collections.abc import Callable
from typing import Protocol, TypeAlias


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
