"""A worker's control page, which only this process and its CUDA streams write."""

import ctypes
import mmap
import os

from kvd_client.memory import sealed_file
from kvd_proto.control import CONTROL_BYTES, CONTROL_WORDS, TIMELINE_WORD, ControlWords


class ControlPage(ControlWords):
    """A new control page of this process; all words are 0."""

    nbytes = CONTROL_BYTES

    def __init__(self) -> None:
        self.fd = sealed_file("kvd-control", CONTROL_BYTES)
        super().__init__(mmap.mmap(self.fd, CONTROL_BYTES))

    @property
    def address(self) -> int:
        """Where word 0 is in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        """Close the descriptor; a lane that has mapped the page keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StoreWords:
    """Which words of a control page are free for stores. Not for several threads at once.

    Every store under way has a word of its own, so that only the named ones are voided, and no
    message has to arrive for it: a lane reads the word after the copy, before it reports. The
    page's size bounds them; a store beyond that is shed.
    """

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._free = list(range(CONTROL_WORDS - 1, TIMELINE_WORD, -1))

    @property
    def next(self) -> tuple[int, int]:
        """The word that the next store gets and its epoch; word 0 where none is free."""
        word = self._free[-1] if self._free else 0
        return word, self._page.epoch(word)

    def take(self) -> None:
        """A store was sent with `next`."""
        self._free.pop()

    def end(self, word: int) -> None:
        """The store of this word is over. Whatever a lane may still do for it is void."""
        self._page.next_epoch(word)
        self._free.append(word)

    def __repr__(self) -> str:
        return f"<StoreWords {len(self._free)} free>"
