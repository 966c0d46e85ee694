"""Which layers of a load have arrived, by how many of its bytes have.

A load that reports its layers is moved layer after layer, and a device ends the pieces of one
direction in the order in which it was given them; so the bytes that have arrived are the first.
"""

from bisect import bisect_right
from collections.abc import Sequence


class Layers:
    """The layers of one load.

    Args:
        word: number of the progress word.
        ends: bytes of all layers up to and with each.

    Attributes:
        word: as given.
        told: how many the worker has been told of.
    """

    __slots__ = ("_ends", "told", "word")

    def __init__(self, word: int, ends: Sequence[int]) -> None:
        self.word = word
        self.told = 0
        self._ends = ends

    def arrived(self, nbytes: int) -> int:
        """How many layers are within the first `nbytes`."""
        return bisect_right(self._ends, nbytes)
